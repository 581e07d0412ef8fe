"""Real processes under load, killed at random moments: every prompt once, or dropped and counted.

Each test breaks one kind of process again and again while a run of two engines, a ref step and a
train step goes on; the supervisor of the test starts what was killed as the real one does. At the
end the journal, the train step's own log and the prompts' fate must agree (`_count`), every byte
that was delivered was what its uid says (checked by the consumers), and nothing is left in shared
memory. A few kills in CI, at least twenty of each kind with --long.
"""

import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from relax_hpc.control.identity import LocalPlace, observer_identity, task_environment
from relax_hpc.control.journal import GenerationalJournal
from relax_hpc.control.rpc import create_keys
from relax_hpc.runfolder import RunFolder, create_run_folder
from relax_hpc.transfer import queue_data as q
from relax_hpc.transfer import wire
from relax_hpc.transfer.queue_state import QueueState
from relax_hpc.transfer.transfer_queue import TransferQueue
from tests.distributed.chaos_process import DROPPED, NUM_PROMPTS, is_dropped, rules
from tests.unit.transfer.protocol_model import admitted_prompts, key_of, trained_uids

PLACES = {
    "dcs0": ("dcs", 0, 0, "n1"),
    "dcs1": ("dcs", 0, 1, "n2"),
    "rollout0": ("rollout", 0, 0, "n1"),
    "rollout1": ("rollout", 1, 0, "n2"),
    "ref0": ("ref", 0, 0, "n1"),
    "train0": ("train", 0, 0, "n1"),
}
"""Name -> role, index, rank, node."""

_DEADLINE_S = 240.0
"""Against hanging only."""


class World:
    """Starts, kills and restarts processes; counts incarnations as the supervisor does."""

    def __init__(self, folder: RunFolder, train_steps: int, prefix: str = "127.") -> None:
        self.folder, self.train_steps, self.prefix = folder, train_steps, prefix
        self.incarnations: collections.Counter[str] = collections.Counter()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.num_breaks = 0
        (folder.path / "chaos.json").write_text(json.dumps({"train_steps": train_steps}))

    def command(self, name: str) -> list[str]:
        """The command of a process; a test may put it into a network namespace."""
        return [sys.executable, str(Path(__file__).with_name("chaos_process.py"))]

    def start(self, name: str) -> None:
        role, index, rank, node = PLACES[name]
        self.incarnations[name] += 1
        environment = task_environment(
            run=self.folder,
            role=role,
            index=index,
            attempt=1,
            incarnation=self.incarnations[name],
            address_prefix=self.prefix,
            local=LocalPlace(rank=rank, world=1, local_rank=0, node=node),
        )
        root = str(Path(__file__).parents[2])
        with (self.folder.path / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self.command(name),
                env={**os.environ, **environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": root},
                stdout=log,
                stderr=log,
            )

    def kill(self, *names: str) -> None:
        for name in names:
            self.processes[name].send_signal(signal.SIGKILL)
        for name in names:
            self.processes[name].wait()

    def logs(self) -> str:
        paths = sorted(self.folder.path.glob("*.log"))
        return "".join(f"--- {path.name}\n{path.read_text()[-2500:]}" for path in paths)

    def steps(self) -> int:
        path = self.folder.path / "trained"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def check_alive(self) -> None:
        """A process may end only with 0, and only at the end of the run."""
        for name, process in self.processes.items():
            code = process.poll()
            assert code in (None, 0), f"{name} ended with {code}\n{self.logs()}"

    def wait_for_steps(self, num_lines: int) -> bool:
        """False when the run is over."""
        deadline = time.monotonic() + _DEADLINE_S
        while self.steps() < num_lines:
            self.check_alive()
            if self.processes["train0"].poll() == 0:
                return False
            assert time.monotonic() < deadline, f"no progress\n{self.logs()}"
            time.sleep(0.01)
        return True

    def finish(self) -> None:
        """Wait for the end of all but the dcs step, count, then end that in order."""
        deadline = time.monotonic() + _DEADLINE_S
        for name in ("train0", "ref0", "rollout0", "rollout1"):
            while self.processes[name].poll() is None:
                self.check_alive()
                assert time.monotonic() < deadline, f"{name} does not end\n{self.logs()}"
                time.sleep(0.02)
        self.check_alive()
        _count(self)
        for name in ("dcs1", "dcs0"):
            self.processes[name].terminate()
            assert self.processes[name].wait(60) == 0, self.logs()
        left = [str(path) for node in ("n1", "n2") for path in _shm_of(self.folder, node)]
        assert not left, left

    def stop(self) -> None:
        """At the end of a failed test: only what this test started."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def _shm_of(folder: RunFolder, node: str) -> list[Path]:
    path = folder.shm(node)
    return [path, *path.rglob("*")] if path.exists() else []


def restored(folder: RunFolder, train_steps: int) -> QueueState:
    """What a controller that started now would know."""
    lines = GenerationalJournal(folder.journal, wire.SERVICE, 1, 10**6).read()
    data = msgspec.json.decode(next(lines), type=q.QueueData)
    state = rules(train_steps).new_state(data)
    for line in lines:
        state.apply(msgspec.json.decode(line, type=q.AnyEvent))
    return state


def _count(world: World) -> None:
    """Every admitted prompt was trained exactly once, or dropped and counted, or waits its turn."""
    final: dict[int, list[str]] = {}
    for line in (world.folder.path / "trained").read_text().splitlines():
        step, *uids = line.split()
        final[int(step)] = sorted(uids)  # a repeated step replaces what the lost one did
    queue = TransferQueue(observer_identity(world.folder), grace_s=60)
    status = queue.status()
    queue.close()
    assert status.done and status.version == world.train_steps and status.in_flight == 0, status
    data = restored(world.folder, world.train_steps).data
    assert trained_uids(data.ledger) == final, "the queue and the train step agree"
    trained = [key_of(uid) for uids in final.values() for uid in uids]
    assert len(set(trained)) == len(trained) == 4 * world.train_steps, "trained exactly once"
    waiting = {(t.epoch, t.prompt_index) for t in data.ledger.again}
    admitted = admitted_prompts(rules(world.train_steps), NUM_PROMPTS, data.ledger.position)
    dropped = {key for key in admitted if is_dropped(*key)} - waiting
    assert set(trained) | waiting | dropped == admitted, "none is lost"
    assert not set(trained) & waiting and not set(trained) & dropped, "none is in two places"
    assert data.ledger.dropped == status.dropped == ({DROPPED: len(dropped)} if dropped else {})


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    run = create_run_folder(tmp_path, "run")
    create_keys(run)
    yield run
    for node in ("n1", "n2"):
        shutil.rmtree(run.shm(node), ignore_errors=True)


def _num_kills() -> int:
    return 24 if os.environ.get("RELAX_TEST_LONG") == "1" else 3


def _chaos(
    folder: RunFolder, seed: int, break_something: Callable[[World, random.Random], None]
) -> World:
    """Break something at random moments of a run, each time after it made a step again."""
    num_kills, chance = _num_kills(), random.Random(seed)
    world = World(folder, train_steps=6 + 2 * num_kills)
    try:
        for name in PLACES:
            world.start(name)
        for _ in range(num_kills):
            assert world.wait_for_steps(world.steps() + 1), "the run is over before the last kill"
            time.sleep(chance.random() * 0.2)
            break_something(world, chance)
        world.finish()
    finally:
        world.stop()
    return world


def _kill_and_restart(*choices: str) -> Callable[[World, random.Random], None]:
    def break_something(world: World, chance: random.Random) -> None:
        name = chance.choice(choices)
        # Tasks of one job step end together, a moment apart.
        names = ["dcs0", "dcs1"] if name.startswith("dcs") else [name]
        names.sort(key=lambda other: other != name)
        for victim in names:
            world.kill(victim)
            time.sleep(chance.random() * 0.1)
        role, index, _, _ = PLACES[name]
        if role != "dcs" and chance.random() < 0.5:  # the supervisor may tell it first
            supervisor = TransferQueue(observer_identity(world.folder), grace_s=60)
            supervisor.release_producer(role, index, world.incarnations[name])
            supervisor.close()
        for victim in names:
            world.start(victim)
        world.num_breaks += 1

    return break_something


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("victims", "seed"),
    [
        (("rollout0", "rollout1"), 1),
        (("ref0",), 2),
        (("train0",), 3),
        (("dcs0",), 4),
        (("dcs1",), 5),
        (tuple(PLACES), 6),
    ],
    ids=["producer", "forward", "consumer", "controller", "agent", "any"],
)
def test_killed_at_random_moments(folder: RunFolder, victims: tuple[str, ...], seed: int) -> None:
    world = _chaos(folder, seed, _kill_and_restart(*victims))
    assert world.num_breaks == _num_kills()
