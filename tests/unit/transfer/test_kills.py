"""kill -9 of the controller, of producers and of the consumer in a run of real processes."""

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relax_hpc.control.identity import LocalPlace, observer_identity, task_environment
from relax_hpc.control.rpc import RpcClient
from relax_hpc.runfolder import RunFolder
from relax_hpc.transfer import wire
from relax_hpc.transfer.agent import NodeAgent
from relax_hpc.transfer.transfer_queue import TransferQueue

from .queue_process import NUM_PROMPTS, RULES

_ROLES = {"controller": "dcs", "rollout0": "rollout", "rollout1": "rollout", "train": "train"}


class Run:
    """Starts, kills and restarts the processes; counts incarnations as the supervisor does."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.incarnations = dict.fromkeys(_ROLES, 0)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        self.incarnations[name] += 1
        environment = task_environment(
            run=self.folder,
            role=_ROLES[name],
            index=int(name[-1]) if name[-1].isdigit() else 0,
            attempt=1,
            incarnation=self.incarnations[name],
            address_prefix="127.",
            local=LocalPlace(rank=0, world=1, local_rank=0, node="n1"),
        )
        log = (self.folder.path / f"{name}.log").open("ab")
        script = Path(__file__).with_name("queue_process.py")
        self.processes[name] = subprocess.Popen(
            [sys.executable, str(script), name.rstrip("01")],
            env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
        log.close()

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def stop(self) -> None:
        for name in self.processes:
            self.kill(name)

    def logs(self) -> str:
        return "".join(
            f"--- {p.name}\n{p.read_text()[-1500:]}" for p in self.folder.path.glob("*.log")
        )

    def trained_steps(self) -> int:
        path = self.folder.path / "trained"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def wait_for_steps(self, num_lines: int) -> None:
        deadline = time.monotonic() + 120
        while self.trained_steps() < num_lines:
            assert time.monotonic() < deadline, f"no progress\n{self.logs()}"
            if self.processes["train"].poll() is not None:
                assert self.processes["train"].returncode == 0, self.logs()
                return
            time.sleep(0.02)


def _run_with_kills(folder: RunFolder, victims: list[str], chance: random.Random) -> Run:
    run = Run(folder)
    try:
        for name in _ROLES:
            run.start(name)
        for victim in victims:
            run.wait_for_steps(run.trained_steps() + 1)
            time.sleep(chance.random() * 0.1)
            run.kill(victim)
            run.start(victim)
        deadline = time.monotonic() + 150
        for name in ("train", "rollout0", "rollout1"):
            code = run.processes[name].wait(max(1.0, deadline - time.monotonic()))
            assert code == 0, f"{name} ended with {code}\n{run.logs()}"
        _check(run)
    finally:
        run.stop()
    return run


def _check(run: Run) -> None:
    """The final ledger: every step trained on whole, distinct prompts; none lost, none twice."""
    final: dict[int, list[str]] = {}
    for line in (run.folder.path / "trained").read_text().splitlines():
        step, *uids = line.split()
        final[int(step)] = uids  # a repeated step replaces what the lost one did
    assert sorted(final) == list(range(RULES.train_steps))
    uids = [uid for step in final.values() for uid in step]
    prompts = [tuple(int(part) for part in uid.split(".")[:2]) for uid in uids]
    assert len(prompts) == len(set(prompts)) == RULES.train_steps * RULES.groups_per_step
    queue = TransferQueue(observer_identity(run.folder), grace_s=30)
    status = queue.status()
    assert (status.version, status.in_flight, status.done) == (RULES.train_steps, 0, True)
    assert status.trained_groups == len(uids) and not status.dropped
    # What was dispatched is trained, or waits for a dispatch that the last step left no room for.
    first_epoch = {index for epoch, index in prompts if epoch == 0}
    assert len(first_epoch) >= NUM_PROMPTS - status.to_dispatch
    _check_memory(run, queue)


def _check_memory(run: Run, queue: TransferQueue) -> None:
    """All producers have ended and all groups are trained: the sweep leaves nothing of them."""
    me = dataclasses.replace(observer_identity(run.folder), node="n1")
    client = RpcClient(run.folder, wire.SERVICE, me)
    NodeAgent(me).sweep(client)
    client.close()
    queue.close()
    assert not list((run.folder.shm("n1") / "arenas").iterdir())


@pytest.mark.parametrize("seed", [1, 2])
def test_the_run_ends_with_every_prompt_once_whoever_is_killed(
    folder: RunFolder, seed: int
) -> None:
    chance = random.Random(seed)
    victims = [*_ROLES, *chance.choices(list(_ROLES), k=3)]
    chance.shuffle(victims)
    _run_with_kills(folder, victims, chance)


def test_clients_carry_on_over_kills_of_the_controller(folder: RunFolder) -> None:
    run = _run_with_kills(folder, ["controller"] * 4, random.Random(0))
    assert run.incarnations == {"controller": 5, "rollout0": 1, "rollout1": 1, "train": 1}
    status = run.logs()
    assert "Traceback" not in status, status
