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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest

from relax_hpc.control.identity import LocalPlace, observer_identity, task_environment
from relax_hpc.control.journal import GenerationalJournal
from relax_hpc.control.rpc import create_keys
from relax_hpc.runfolder import RunFolder, create_run_folder
from relax_hpc.transfer import queue_data as q
from relax_hpc.transfer import wire
from relax_hpc.transfer.leftovers import SHM, FolderState, scan
from relax_hpc.transfer.queue_rules import QueueRules, QueueRulesConfig
from relax_hpc.transfer.transfer_queue import TransferQueue
from tests.distributed.chaos_process import DROPPED, NUM_PROMPTS, SPILLED, is_dropped, rules
from tests.netns import TwoNodes, two_nodes, why_not
from tests.unit.transfer.state_view import admitted_prompts, key_of, trained_uids

PLACES = {
    "dcs0": ("dcs", 0, 0, "n1"),
    "dcs1": ("dcs", 0, 1, "n2"),
    "rollout0": ("rollout", 0, 0, "n1"),
    "rollout1": ("rollout", 1, 0, "n2"),
    "ref0": ("ref", 0, 0, "n1"),
    "train0": ("train", 0, 0, "n1"),
}
"""Name -> role, index, rank, node."""

MEMORY = {"arena_mb": 16}
SPILL = {"arena_mb": 4, "spill_mb": 512}
"""With steps so slow that puts wait longer than the arena's patience."""

_DEADLINE_S = 240.0
"""Against hanging only."""


class World:
    """Starts, kills and restarts processes; counts incarnations as the supervisor does."""

    def __init__(
        self,
        folder: RunFolder,
        train_steps: int,
        nodes: TwoNodes | None = None,
        memory: Mapping[str, int] = MEMORY,
    ) -> None:
        """With `nodes` its processes live in two network namespaces, else on the loopback."""
        self.folder, self.train_steps, self.nodes = folder, train_steps, nodes
        self.incarnations: collections.Counter[str] = collections.Counter()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.num_breaks, self.attempt = 0, 1
        # While one is dead or cut off the other engine goes on: the run must not end meanwhile.
        chunk_s = 0.6 if memory is SPILL else 0.05 if nodes is None else 0.1
        settings = {"train_steps": train_steps, "chunk_s": chunk_s, "transfer": dict(memory)}
        (folder.path / "chaos.json").write_text(json.dumps(settings))

    def start(self, name: str) -> None:
        role, index, rank, node = PLACES[name]
        self.incarnations[name] += 1
        environment = task_environment(
            run=self.folder,
            role=role,
            index=index,
            attempt=self.attempt,
            incarnation=self.incarnations[name],
            address_prefix="127." if self.nodes is None else "10.77.",
            local=LocalPlace(rank=rank, world=1, local_rank=0, node=node),
        )
        root = str(Path(__file__).parents[2])
        environment |= {**os.environ, **environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
        command = [sys.executable, str(Path(__file__).with_name("chaos_process.py"))]
        with (self.folder.path / f"{name}.log").open("ab") as log:
            options = {"env": environment, "stdout": log, "stderr": log}
            if self.nodes is None:
                self.processes[name] = subprocess.Popen(command, **options)
            else:
                self.processes[name] = self.nodes.start(int(node == "n2"), command, **options)

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
        for name in ("dcs1", "dcs0"):
            self.processes[name].terminate()
            assert self.processes[name].wait(60) == 0, self.logs()
        _count(self)
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


def restored(folder: RunFolder, config: QueueRulesConfig) -> QueueRules:
    """What a controller that started now would know."""
    lines = GenerationalJournal(folder.journal, wire.SERVICE, 10**6, 10**6).read()
    state = config.new_state(msgspec.json.decode(next(lines), type=q.QueueData))
    for line in lines:
        state.apply(msgspec.json.decode(line, type=q.AnyEvent))
    return QueueRules(config, state)


def _count(world: World) -> None:
    """Every admitted prompt was trained exactly once, or dropped and counted, or waits its turn."""
    final: dict[int, list[str]] = {}
    for line in (world.folder.path / "trained").read_text().splitlines():
        step, *uids = line.split()
        final[int(step)] = sorted(uids)  # a repeated step replaces what the lost one did
    config = rules(world.train_steps)
    queue = restored(world.folder, config)
    status, ledger = queue.status(0.0), queue.state.data.ledger
    assert status.done and status.version == world.train_steps and status.in_flight == 0, status
    assert trained_uids(ledger) == final, "the queue and the train step agree"
    trained = [key_of(uid) for uids in final.values() for uid in uids]
    assert len(set(trained)) == len(trained) == 4 * world.train_steps, "trained exactly once"
    waiting = {(t.epoch, t.prompt_index) for t in ledger.again}
    admitted = admitted_prompts(config, NUM_PROMPTS, ledger.position)
    dropped = {key for key in admitted if is_dropped(*key)} - waiting
    assert set(trained) | waiting | dropped == admitted, "none is lost"
    assert not set(trained) & waiting and not set(trained) & dropped, "none is in two places"
    assert ledger.dropped == ({DROPPED: len(dropped)} if dropped else {})


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    run = create_run_folder(tmp_path, "run")
    create_keys(run)
    yield run
    for node in ("n1", "n2"):
        shutil.rmtree(run.shm(node), ignore_errors=True)


def _num_breaks() -> int:
    return 24 if os.environ.get("RELAX_TEST_LONG") == "1" else 3


def _chaos(
    folder: RunFolder,
    seed: int,
    break_something: Callable[[World, random.Random], None],
    nodes: TwoNodes | None = None,
    memory: Mapping[str, int] = MEMORY,
) -> World:
    """Break something at random moments of a run, each time after it made a step again."""
    num_breaks, chance = _num_breaks(), random.Random(seed)
    steps_per_break = 2 if memory is SPILL else 8 if nodes is None else 30
    world = World(folder, 6 + steps_per_break * num_breaks, nodes, memory)
    try:
        for name in PLACES:
            world.start(name)
        for _ in range(num_breaks):
            assert world.wait_for_steps(world.steps() + 1), "the run is over before the last break"
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
            _tell(world, role, index, world.incarnations[name])
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
    assert world.num_breaks == _num_breaks()


def _tell(world: World, role: str, index: int, incarnation: int) -> None:
    supervisor = TransferQueue(observer_identity(world.folder), grace_s=60)
    supervisor.release_producer(role, index, incarnation)
    supervisor.close()


@pytest.mark.timeout(1800)
def test_killed_at_random_moments_while_payload_spills(folder: RunFolder) -> None:
    """The arena holds two or three groups, the others go through files of the spill."""
    _chaos(folder, 9, _kill_and_restart(*PLACES), memory=SPILL)
    assert (folder.path / SPILLED).exists(), "nothing was spilled"
    assert not _spilled(folder), "segments outlive the run"


def _spilled(folder: RunFolder) -> list[Path]:
    return [path for path in (folder.path / "spill").rglob("*.s*") if path.is_file()]


@pytest.mark.timeout(1800)
def test_all_killed_at_once_leave_what_doctor_knows_as_dead(folder: RunFolder) -> None:
    chance = random.Random(10)
    for attempt in range(8 if os.environ.get("RELAX_TEST_LONG") == "1" else 2):
        world = World(folder, 1000)
        try:
            for name in PLACES:
                world.start(name)
            world.wait_for_steps(1 + attempt % 2)
            time.sleep(chance.random())
        finally:
            world.stop()
        assert _shm_of(folder, "n1"), "a killed run leaves its memory"
        ours = {str(folder.shm(node)) for node in ("n1", "n2")}
        found = [left for left in scan(SHM, min_age_s=0.0) if str(left.path) in ours]
        assert found and all(left.state is FolderState.DEAD for left in found), found
        for left in found:  # not by examine(clean=True): other runs of this machine may restart
            shutil.rmtree(left.path)
        assert not _shm_of(folder, "n1") and not _shm_of(folder, "n2")
        for path in folder.path.glob("trained*"):
            path.unlink()
        shutil.rmtree(folder.journal)
        folder.journal.mkdir()


def _lose_node(world: World, chance: random.Random) -> None:
    """All processes of n2 at once; with the node its memory is gone, mostly."""
    world.kill("rollout1", "dcs1")
    is_rebooted = chance.random() < 0.7
    if is_rebooted:
        shutil.rmtree(world.folder.shm("n2"), ignore_errors=True)
    time.sleep(chance.random() * 0.2)
    world.kill("dcs0")  # the other task of that job step ends with it
    world.start("dcs0")
    if chance.random() < 0.5:
        _tell(world, "rollout", 1, world.incarnations["rollout1"])
    time.sleep(chance.random() * 0.5)
    world.start("dcs1")
    world.start("rollout1")


def _requeue(world: World, chance: random.Random) -> None:
    """The job ends and runs again; sometimes only the checkpoint is left, not the journal."""
    world.kill(*PLACES)
    has_checkpoint = (world.folder.path / "checkpoint").exists()
    if has_checkpoint and chance.random() < 0.5:
        for path in world.folder.journal.glob("*"):
            path.unlink()
    world.attempt += 1
    for name in PLACES:
        world.start(name)


@pytest.mark.timeout(1800)
def test_a_job_is_requeued_with_its_journal_or_only_a_checkpoint(folder: RunFolder) -> None:
    _chaos(folder, 11, _requeue)


@pytest.mark.timeout(1800)
def test_a_node_is_lost_with_all_its_processes_and_its_memory(folder: RunFolder) -> None:
    _chaos(folder, 7, _lose_node)


@pytest.mark.timeout(1800)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_the_network_between_two_nodes_is_cut_for_5_s(folder: RunFolder) -> None:
    def cut(world: World, chance: random.Random) -> None:
        assert world.nodes is not None
        with world.nodes.cut(5.0):
            pass

    with two_nodes() as nodes:
        _chaos(folder, 8, cut, nodes)
