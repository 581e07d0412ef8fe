"""Node agent: reservations, adoption, sweeps, clean shutdown, folders of dead runs."""

import dataclasses
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from relax_hpc.config import RdmaUse, TransferConfig
from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import Empty, RpcClient, RpcServer
from relax_hpc.errors import ArenaFullError, StaleIncarnationError, TransferError
from relax_hpc.runfolder import RunFolder
from relax_hpc.transfer import agent as agent_module
from relax_hpc.transfer import leftovers, node_memory, wire
from relax_hpc.transfer.agent import NodeAgent
from relax_hpc.transfer.arena import Arena, ArenaLimits, RpcGate
from relax_hpc.transfer.block import open_block
from relax_hpc.transfer.extent import (
    ExtentMap,
    ReserveExtent,
    extents,
    make_extent,
    spill_folder,
    stamp_of,
)
from relax_hpc.transfer.leftovers import FolderOwner, FolderState, reap_dead_runs, scan
from relax_hpc.transfer.owner import Owner, temporary_name

from .arena_process import MB, fields
from .conftest import RULES

Who = Callable[..., Identity]
StartAgent = Callable[..., NodeAgent]
DEAD = Owner("run", 1, 2**22 + 1, 12345, "rollout", 0, 0, 1)
LIMITS = ArenaLimits(extent_bytes=MB, max_bytes=4 * MB, low_water=MB // 4)


def _wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline, "waited 60 s"
        time.sleep(0.02)


@pytest.fixture
def arenas(folder: RunFolder) -> Path:
    return folder.shm("n1") / "arenas"


@pytest.fixture
def make_arena(who: Who) -> Iterator[Callable[..., Arena]]:
    made: list[Arena] = []

    def build(limits: ArenaLimits = LIMITS, **changes: object) -> Arena:
        me = who(**changes)
        made.append(Arena(RpcGate(me), Owner.of(me), limits))
        return made[-1]

    yield build
    for arena in made:
        arena.close()


class _Controller:
    """A stub of the queue's controller: knows which extents are referenced."""

    def __init__(self, folder: RunFolder, identity: Identity) -> None:
        self.asked: list[list[str]] = []
        self.referenced: set[str] = set()
        self.server = RpcServer(folder, wire.SERVICE, identity)
        self.server.register("find_orphans", wire.FindOrphans, self._find)
        self.server.start_thread()

    async def _find(self, caller: object, request: wire.FindOrphans) -> wire.Orphans:
        self.asked.append(request.names)
        return wire.Orphans([name for name in request.names if name not in self.referenced])


@pytest.fixture
def controller(folder: RunFolder, who: Who) -> Iterator[_Controller]:
    stub = _Controller(folder, who("dcs"))
    yield stub
    stub.server.stop()


# ---------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------


def test_a_producer_gets_memory_and_other_nodes_an_address(
    who: Who, start_agent: StartAgent, make_arena, folder: RunFolder, arenas: Path
) -> None:
    start_agent()
    arena = make_arena()
    ref = arena.put(fields(3, 100), timeout_s=60)
    rows = open_block(ExtentMap(arenas).view(ref, "test"), ref, verify=True, where="test")
    assert (rows["0.3.0", 1]["tokens"] == 3).all() and ref.node == "n1"
    client = RpcClient(folder, wire.agent_service("n1"), who("train", node="n2"))
    access = client.call("data_access", Empty(), wire.DataAccess, timeout_s=20, why="test")
    socket.create_connection((access.host, access.port), timeout=20).close()
    client.close()


def test_a_node_gives_no_more_than_its_share(
    who: Who, start_agent: StartAgent, make_arena, arenas: Path
) -> None:
    """Over all producers of the node, those of an agent before it included."""
    first = start_agent(config=TransferConfig(node_shm_mb=3))
    make_arena().put(fields(1, 60_000), timeout_s=60)  # 2 MB: its extent has its own size
    with pytest.raises(ArenaFullError) as caught:
        make_arena(index=1).put(fields(1, 60_000), timeout_s=0.5)
    message = str(caught.value)
    assert "node n1 has no room for extent rollout1.0-1.1-" in message
    assert "of 3145728 bytes (transfer.node_shm_mb" in message and "relax-hpc doctor" in message
    first.close(remove=False)
    start_agent(who("dcs", incarnation=2), TransferConfig(node_shm_mb=3))
    with pytest.raises(ArenaFullError):
        make_arena(index=2).put(fields(1, 60_000), timeout_s=0.5)
    assert sum(path.stat().st_size for path in extents(arenas)) <= 3 * MB


def test_full_ram_and_a_full_cgroup_bound_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = node_memory.room(tmp_path, cgroups=tmp_path / "none")
    monkeypatch.setattr(node_memory, "_ram", lambda: (100 * MB, 10 * MB))
    seen = node_memory.room(tmp_path, cgroups=tmp_path / "none")
    assert seen.nbytes == 8 * MB < free.nbytes and "RAM" in seen.bound
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        files = {"memory.max": 5 * MB, "memory.current": 4 * MB}
        if controllers == "memory":
            files = {"memory.limit_in_bytes": 5 * MB, "memory.usage_in_bytes": 4 * MB}
        elif controllers:
            continue
        place = tmp_path / "cgroup" / controllers / path.lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (place / name).write_text(f"{value}\n", encoding="ascii")
        (place / "memory.stat").write_text("inactive_file 4096\nactive_file 0\nshmem 9\n")
    seen = node_memory.room(tmp_path, cgroups=tmp_path / "cgroup")
    assert seen.nbytes == MB + 4096 and "memory cgroup" in seen.bound


def test_who_does_not_live_here_gets_nothing(
    who: Who, start_agent: StartAgent, folder: RunFolder, arenas: Path
) -> None:
    start_agent()
    client = RpcClient(folder, wire.agent_service("n1"), who())
    for request, message in (
        (ReserveExtent("rollout0.0-1.1-0000000a.1", DEAD, MB), "does not live here"),
        (ReserveExtent("../../x", Owner.of(who()), MB), "cannot reserve extent"),
        (ReserveExtent("rollout0.0-1.1-0000000a.1", Owner.of(who()), -1), "cannot reserve extent"),
    ):
        with pytest.raises(TransferError, match=message):
            client.call("reserve_extent", request, Empty, timeout_s=20, why="test")
    assert not list(arenas.iterdir())
    client.close()


class _FakeNixl:
    fails = False

    def __init__(self, folder: Path, node: str) -> None:
        self.folder, self.node, self.is_closed = folder, node, False

    def start(self) -> None:
        if self.fails:
            raise TransferError("no device")

    def access(self) -> tuple[str, bytes]:
        return f"nixl-{self.node}", b"metadata"

    def close(self) -> None:
        self.is_closed = True


def test_rdma_is_served_where_it_works_and_refused_where_it_is_forced(
    who: Who, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "NixlServer", _FakeNixl)
    monkeypatch.setattr(agent_module.rdma, "is_asked_for", lambda use: (True, ""))

    def ask(incarnation: int) -> wire.DataAccess:
        agent = NodeAgent(who("dcs", incarnation=incarnation))
        agent.start()
        client = RpcClient(folder, wire.agent_service("n1"), who())
        access = client.call("data_access", Empty(), wire.DataAccess, timeout_s=20, why="test")
        client.close()
        agent.close(remove=False)
        assert agent._nixl is None or agent._nixl.is_closed
        return access

    access = ask(1)
    assert (access.nixl_agent, access.nixl_metadata) == ("nixl-n1", b"metadata")
    monkeypatch.setattr(_FakeNixl, "fails", True)
    assert ask(2).nixl_agent == "" and ask(3).port > 0
    forced = NodeAgent(who("dcs", incarnation=4), TransferConfig(rdma=RdmaUse.FORCE))
    with pytest.raises(TransferError, match="no device"):
        forced.start()
    forced.close(remove=True)


_AGENT = """
import os, signal, sys, time
from pathlib import Path
from relax_hpc.control.identity import Identity
from relax_hpc.runfolder import RunFolder
from relax_hpc.transfer import extent
from relax_hpc.transfer.agent import NodeAgent
run, node, incarnation, deadly = sys.argv[1:]
identity = Identity(run=RunFolder(Path(run)), role="dcs", node=node, address_prefix="127.",
                    incarnation=int(incarnation))
if deadly:
    def rename(self, target):
        os.kill(os.getpid(), signal.SIGKILL)
    Path.rename = rename
agent = NodeAgent(identity)
agent.start()
print("ready", flush=True)
time.sleep(600)
"""


def _agent_process(folder: RunFolder, incarnation: int = 1, node: str = "n1", deadly: str = ""):
    command = [sys.executable, "-c", _AGENT, str(folder.path), node, str(incarnation), deadly]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_a_killed_agent_loses_nothing(
    who: Who, controller: _Controller, start_agent: StartAgent, make_arena, folder, arenas: Path
) -> None:
    """Killed while idle and killed in the middle of a reservation; the next one adopts."""
    arena, maps = make_arena(), ExtentMap(arenas)
    with _agent_process(folder) as agent:
        ref = arena.put(fields(1, 1000), timeout_s=60)
        agent.kill()
    with _agent_process(folder, incarnation=2, deadly="yes") as agent:
        # 1.5 MB need an extent: the agent reserves it and is killed before it has its name.
        refs: list[wire.BlockRef] = []
        thread = threading.Thread(
            target=lambda: refs.append(arena.put(fields(2, 30_000), timeout_s=90))
        )
        thread.start()
        agent.wait(60)
    assert len(list(arenas.glob(".tmp-*"))) == 1, "half made"
    start_agent(who("dcs", incarnation=3))
    thread.join(90)
    assert refs, "the put that waited got its memory of the next agent"
    for one in (ref, refs[0]):
        open_block(maps.view(one, "test"), one, verify=True, where="test")
    _wait_until(lambda: not list(arenas.glob(".tmp-*")))
    assert all(path.exists() for path in extents(arenas))


# ---------------------------------------------------------------------------------------------
# Sweeps
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def no_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the test sweeps: the agent's own first sweep may come as late as it likes."""
    monkeypatch.setattr(NodeAgent, "_sweep_loop", lambda self: None)


@pytest.mark.usefixtures("no_sweeps")
def test_extents_of_the_dead_go_when_nobody_references_them(
    who: Who, controller: _Controller, start_agent: StartAgent, make_arena, folder, arenas: Path
) -> None:
    agent = start_agent()
    client = RpcClient(folder, wire.SERVICE, who("dcs"))
    arena = make_arena()
    arena.put(fields(1, 100), timeout_s=60)
    live = {path.name for path in extents(arenas)}
    for number in (1, 2):
        make_extent(arenas, ReserveExtent(f"rollout0.0-1.1-00000bad.{number}", DEAD, MB))
    controller.referenced = {"rollout0.0-1.1-00000bad.2"}
    (arenas / temporary_name(DEAD.pid, DEAD.start, "x")).write_bytes(b"")
    mine = arenas / temporary_name(os.getpid(), Owner.of(who()).start, "x")
    mine.write_bytes(b"")
    (arenas / "somebody elses").write_bytes(b"")
    assert agent.sweep(client) == 2
    left = {path.name for path in arenas.iterdir()}
    assert left == {*live, "rollout0.0-1.1-00000bad.2", mine.name, "somebody elses"}
    controller.referenced = set()
    assert agent.sweep(client) == 1, "trained meanwhile"
    assert agent.sweep(client) == 0
    assert not any(name in live for names in controller.asked for name in names)
    client.close()


@pytest.mark.usefixtures("no_sweeps")
def test_spill_segments_of_the_dead_are_swept_with_their_index(
    who: Who, controller: _Controller, start_agent: StartAgent, folder: RunFolder, tmp_path: Path
) -> None:
    config = TransferConfig(spill_mb=10, spill_folder=str(tmp_path / "disk"))
    agent = start_agent(config=config)
    spill = spill_folder(folder, "n1", config.spill_folder)
    assert spill == tmp_path / "disk" / folder.shm("n1").name
    stamps = {"00000bad.s1": DEAD, "00000bad.s2": DEAD, "00000a1e.s1": Owner.of(who())}
    for name, owner in stamps.items():
        (spill / f"rollout0.0-1.1-{name}").write_bytes(stamp_of(owner).ljust(4096, b"\0"))
        (spill / f"rollout0.0-1.1-{name}.index").write_bytes(b"")
    controller.referenced = {"rollout0.0-1.1-00000bad.s2"}
    client = RpcClient(folder, wire.SERVICE, who("dcs"))
    assert agent.sweep(client) == 1
    left = {path.name.removeprefix("rollout0.0-1.1-") for path in spill.glob("rollout*")}
    assert left == {"00000bad.s2", "00000bad.s2.index", "00000a1e.s1", "00000a1e.s1.index"}
    assert [one.state for one in scan(tmp_path / "disk")] == [FolderState.LIVE]
    client.close()
    agent.close(remove=True)
    assert not spill.exists(), "what was spilled outlives an orderly end"


def test_spill_of_an_earlier_attempt_is_removed(
    who: Who, start_agent: StartAgent, folder: RunFolder, tmp_path: Path
) -> None:
    """A requeued run generates again what was in flight; nobody reads the old segments."""
    config = TransferConfig(spill_mb=10, spill_folder=str(tmp_path / "disk"))
    start_agent(config=config).close(remove=False)
    old = spill_folder(folder, "n1", config.spill_folder) / "rollout0.0-1.1-00000a1e.s1"
    old.write_bytes(stamp_of(DEAD).ljust(4096, b"\0"))
    newer = NodeAgent(dataclasses.replace(who("dcs"), attempt=2), config)
    newer.start()
    try:
        assert not old.exists()
        assert old.parent.exists()
    finally:
        newer.close(remove=True)


def test_a_refused_reservation_calls_for_a_sweep(
    controller: _Controller, who: Who, make_arena, arenas: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead producer holds the node's memory; its successor gets it without waiting long."""
    monkeypatch.setattr(agent_module, "_SWEEP_S", 3600.0)
    agent = NodeAgent(who("dcs"), TransferConfig(node_shm_mb=3))
    swept: list[int] = []
    sweep = agent.sweep
    monkeypatch.setattr(agent, "sweep", lambda client: swept.append(sweep(client)))
    agent.start()
    _wait_until(lambda: len(swept) > 0)
    make_extent(arenas, ReserveExtent("rollout0.0-1.1-00000bad.1", DEAD, 2 * MB))
    assert make_arena().put(fields(1, 40_000), timeout_s=60).nbytes > MB
    agent.close(remove=True)


def test_a_new_attempt_cleans_and_an_old_one_is_refused(
    who: Who, controller: _Controller, folder: RunFolder, arenas: Path
) -> None:
    name = "rollout0.0-1.1-00000bad.1"
    controller.referenced = {name}
    first = NodeAgent(who("dcs"))
    first.start()
    make_extent(arenas, ReserveExtent(name, DEAD, MB))
    first.close(remove=False)
    second = NodeAgent(who("dcs", incarnation=2))
    second.start()
    assert [path.name for path in extents(arenas)] == [name], "adopted"
    second.close(remove=False)
    third = NodeAgent(who("dcs", attempt=2, incarnation=3))
    third.start()
    assert not list(arenas.iterdir())
    third.close(remove=False)
    with pytest.raises(StaleIncarnationError, match="belongs to attempt 2"):
        NodeAgent(who("dcs", incarnation=2)).start()
    third = NodeAgent(who("dcs", attempt=2, incarnation=4))
    third.start()
    third.close(remove=True)
    assert not folder.shm("n1").exists()


# ---------------------------------------------------------------------------------------------
# Folders of dead runs
# ---------------------------------------------------------------------------------------------


def test_only_folders_of_dead_runs_are_reaped(folder: RunFolder, who: Who, tmp_path: Path) -> None:
    """On a copy of the folder in a root of its own: other runs of this machine are not ours."""
    root = tmp_path / "shm"
    copy = root / folder.shm("n2").name
    foreign = root / f"relax-{os.getuid()}-no-owner"
    foreign.mkdir(parents=True)
    (root / f"relax-{os.getuid()}-link").symlink_to(tmp_path)
    with _agent_process(folder, node="n2") as agent:
        shutil.copytree(folder.shm("n2"), copy)
        assert reap_dead_runs(root, min_age_s=0) == [], "its agent lives"
        agent.kill()
    assert reap_dead_runs(root) == [], "its run may be restarting"
    live = make_extent(
        copy / "arenas", ReserveExtent("rollout0.0-1.1-0000000a.1", Owner.of(who()), MB)
    )
    states = {one.path: one.state for one in scan(root, min_age_s=0)}
    assert states == {copy: FolderState.LIVE, foreign: FolderState.FOREIGN}, "a writer lives"
    live.unlink()
    for change in ({"host": "another"}, {"pid_namespace": 1}):
        _rewrite_owner(copy, **change)
        assert reap_dead_runs(root, min_age_s=0) == [], "its processes cannot be seen from here"
    _rewrite_owner(copy, host=socket.gethostname(), pid_namespace=leftovers._pid_namespace())
    assert reap_dead_runs(root, min_age_s=0) == [copy]
    assert not copy.exists() and foreign.exists() and tmp_path.exists()


def _rewrite_owner(folder: Path, **changes: object) -> None:
    path = folder / "owner.json"
    owner = msgspec.json.decode(path.read_bytes(), type=FolderOwner)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(owner, **changes)))


def test_rules_are_taken_from_the_recipe() -> None:
    from relax_hpc.config import config_from_tree
    from relax_hpc.transfer.queue_rules import QueueRulesConfig

    tree = {
        "run": {"name": "x", "train_steps": 7, "seed": 3},
        "model": {"path": "m"},
        "data": {"train": "t.jsonl", "eval": "e.jsonl", "shuffle": False},
        "rollout": {"groups_per_step": 8, "group_size": 4, "max_response_tokens": 9,
                    "eval_interval": 5, "max_staleness": 2},
        "train": {"chunks_per_step": 2},
        "resources": {"ref": {}},
    }  # fmt: skip
    rules = QueueRulesConfig.from_config(config_from_tree(tree, "test"))
    assert rules == QueueRulesConfig(
        groups_per_step=8, group_size=4, max_staleness=2, chunks_per_step=2, train_steps=7,
        eval_interval=5, task_fields={"ref": "ref_logprobs"}, seed=3, is_shuffled=False,
    )  # fmt: skip
    assert rules.groups_per_chunk == 4 and RULES.eval_interval == 0
