"""The dcs step as real processes: two node names on this host, kills, restarts, orderly ends."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from relax_hpc.config import config_from_tree, config_to_json
from relax_hpc.control.identity import Identity, LocalPlace, task_environment
from relax_hpc.control.registry import members
from relax_hpc.control.rpc import RpcClient, create_keys
from relax_hpc.dcs.client import WeightPublisher, WeightSubscriber
from relax_hpc.dcs.layout import TensorSpec
from relax_hpc.dcs.store import VersionId
from relax_hpc.runfolder import create_run_folder, write_atomic

NODES = ("n01", "n02")
SPECS = [TensorSpec("a", "float32", (3, 100)), TensorSpec("b", "bfloat16", (7,))]


class Step:
    """Tasks of one incarnation of the dcs step, as the supervisor would start them."""

    def __init__(self, folder, incarnation):
        self.folder, self.incarnation = folder, incarnation
        self.log = folder.path / f"dcs-{incarnation}.log"
        self.tasks = [self._start(rank) for rank in range(len(NODES))]

    def _start(self, rank):
        place = LocalPlace(rank=rank, world=len(NODES), local_rank=0, node=NODES[rank])
        environment = task_environment(
            run=self.folder,
            role="dcs",
            attempt=1,
            incarnation=self.incarnation,
            address_prefix="127.",
            local=place,
        )
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "relax_hpc.steps.dcs"],
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def services(self):
        return psutil.Process(self.tasks[0].pid).children()

    def wait(self, timeout_s=60):
        return [task.wait(timeout=timeout_s) for task in self.tasks]

    def end(self):
        for task in self.tasks:
            if task.poll() is None:
                task.kill()
            task.wait(timeout=30)


@pytest.fixture
def folder(tmp_path):
    folder = create_run_folder(tmp_path, "run")
    create_keys(folder)
    tree = {
        "run": {"name": "run", "train_steps": 2},
        "model": {"path": "nowhere"},
        "data": {"train": "nowhere.jsonl"},
        "rollout": {"groups_per_step": 4, "group_size": 2, "max_response_tokens": 8},
    }
    write_atomic(folder.config, config_to_json(config_from_tree(tree, "test")))
    yield folder
    for node in NODES:
        shutil.rmtree(folder.shm(node), ignore_errors=True)


@pytest.fixture
def start(folder):
    with contextlib.ExitStack() as stack:

        def start_step(incarnation):
            step = Step(folder, incarnation)
            stack.callback(step.end)
            wait_for_members(folder, incarnation)
            return step

        yield start_step


def me(folder, role, node):
    return Identity(run=folder, role=role, node=node, address_prefix="127.")


def wait_until(predicate, what, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline, f"{what} did not happen in {timeout_s:g} s"
        time.sleep(0.05)


def wait_for_members(folder, incarnation):
    """Wait until both tasks of an incarnation are registered."""
    client = RpcClient(folder, "control", me(folder, "observer", "n00"))

    def are_registered():
        known = [m for m in members(client, timeout_s=60) if m.role == "dcs"]
        return [m.incarnation for m in known] == [incarnation] * len(NODES)

    wait_until(are_registered, "registration of the dcs tasks")
    client.close()


def is_alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def weights(seed):
    generator = np.random.default_rng(seed)
    return {s.name: generator.integers(0, 256, s.nbytes, dtype=np.uint8) for s in SPECS}


def publish(folder, version):
    """Publish from node n01, in this process."""
    pieces = [(s.whole(), s.dtype, weights(version)[s.name]) for s in SPECS]
    return WeightPublisher(me(folder, "train", "n01")).publish(version, pieces, SPECS, 1, 0)


def check_fetch(folder, version, node="n02"):
    subscriber = WeightSubscriber(me(folder, "rollout", node))
    newest = subscriber.wait_newer(None, 30)
    assert newest == VersionId(1, version)
    tensors = subscriber.fetch(newest)
    for name, data in weights(version).items():
        assert tensors[name].data.tobytes() == data.tobytes()


def test_publish_kill_restart_fetch_and_clean_end(folder, start):
    first = start(1)
    publish(folder, 3)
    check_fetch(folder, 3)
    services = first.services()
    assert len(services) == 3

    first.tasks[0].kill()
    first.tasks[0].wait(timeout=30)
    wait_until(lambda: not any(map(is_alive, services)), "death of the services")
    first.tasks[1].terminate()  # as srun does with the tasks that are left
    assert first.tasks[1].wait(timeout=60) == 128 + signal.SIGTERM, first.log.read_text()
    assert all(folder.shm(node).is_dir() for node in NODES), "the next incarnation needs it"

    second = start(2)
    left = Path("/dev/shm") / f"sgl_shm_mq_{os.getpid()}_left"  # by an engine that was killed
    left.touch()
    record = folder.shm("n02") / "sglang-0" / "shared-memory"
    record.parent.mkdir()
    record.write_text(f"{left}\n")
    check_fetch(folder, 3)
    publish(folder, 4)
    check_fetch(folder, 4)
    for task in second.tasks:
        task.terminate()
    assert second.wait() == [0, 0], second.log.read_text()
    assert not [node for node in NODES if folder.shm(node).exists()]
    assert not left.exists()
    assert not list(folder.control.glob("*.addr")), second.log.read_text()


def test_a_dead_service_ends_its_task_and_the_step_starts_again(folder, start):
    first = start(1)
    publish(folder, 0)
    coordinator = next(s for s in first.services() if "weights" in s.cmdline())
    os.kill(coordinator.pid, signal.SIGKILL)
    assert first.tasks[0].wait(timeout=60) == 1
    assert "service weights (pid" in first.log.read_text()
    first.tasks[1].terminate()
    first.tasks[1].wait(timeout=60)
    start(2)
    check_fetch(folder, 0, node="n01")
    check_fetch(folder, 0, node="n02")


@pytest.mark.parametrize("name", ["transfer", "weights"])
def test_a_service_that_hangs_ends_its_task_and_the_step_starts_again(folder, start, name):
    tree = msgspec.json.decode(folder.config.read_bytes())
    tree["recovery"]["heartbeat_timeout_s"] = 4.0
    write_atomic(folder.config, msgspec.json.encode(tree))
    first = start(1)
    publish(folder, 0)
    service = next(s for s in first.services() if name in s.cmdline())
    answers = f"service answers service={name}"  # until then it counts as starting: 600 s
    wait_until(lambda: answers in first.log.read_text(), "the first ping")
    service.suspend()
    assert first.tasks[0].wait(timeout=60) == 1, first.log.read_text()
    assert f"service {name} (pid {service.pid}) did not answer a ping" in first.log.read_text()
    assert not is_alive(service), "it must not wake up beside its successor"
    first.tasks[1].terminate()
    first.tasks[1].wait(timeout=60)
    start(2)
    check_fetch(folder, 0)


def test_a_task_that_was_stopped_itself_does_not_blame_its_services(folder, start):
    tree = msgspec.json.decode(folder.config.read_bytes())
    tree["recovery"]["heartbeat_timeout_s"] = 4.0
    write_atomic(folder.config, msgspec.json.encode(tree))
    step = start(1)
    task = psutil.Process(step.tasks[0].pid)
    task.suspend()
    time.sleep(8)  # what is tested is the absence
    task.resume()
    publish(folder, 0)
    check_fetch(folder, 0)
    for process in step.tasks:
        process.terminate()
    assert step.wait() == [0, 0], step.log.read_text()


def test_end_after_the_death_of_another_task_keeps_shared_memory(folder, start):
    step = start(1)
    publish(folder, 0)
    step.tasks[1].kill()
    step.tasks[1].wait(timeout=30)
    step.tasks[0].terminate()
    assert step.tasks[0].wait(timeout=60) == 128 + signal.SIGTERM
    assert folder.shm("n01").is_dir()
    start(2)
    check_fetch(folder, 0)


def test_wrong_use_is_one_sentence():
    result = subprocess.run(
        [sys.executable, "-m", "relax_hpc.steps.dcs"],
        env={k: v for k, v in os.environ.items() if not k.startswith("RELAX_")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert "RELAX_RUN is not set" in result.stderr
    assert "Traceback" not in result.stderr
