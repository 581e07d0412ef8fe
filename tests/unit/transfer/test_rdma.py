"""Reads by NIXL over UCX's TCP: a helper process that is killed, stopped, restarted."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from relax_hpc.config import RdmaUse
from relax_hpc.errors import DeadlineError, StaleEpochError, TransferError
from relax_hpc.transfer import nixl_agent, rdma, rdma_server
from relax_hpc.transfer.arena import Arena, ArenaLimits, LocalGate
from relax_hpc.transfer.block import Entry, Rows, open_block
from relax_hpc.transfer.owner import Owner, process_start
from relax_hpc.transfer.rdma import Access, NixlSource
from relax_hpc.transfer.rdma_server import NixlAccess, NixlServer
from relax_hpc.transfer.wire import BlockRef, DataAccess
from tests.stopping import stop

MB = 1 << 20
PATIENCE_S = 60.0
"""Against hanging only."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("arenas")


@pytest.fixture
def arena(folder: Path) -> Iterator[Arena]:
    owner = Owner("run", 1, os.getpid(), process_start(os.getpid()), role="rollout", incarnation=1)
    arena = Arena(LocalGate(folder, "n1"), owner, ArenaLimits(extent_bytes=4 * MB))
    yield arena
    arena.close()


@pytest.fixture(scope="module")
def shared_server(folder: Path) -> Iterator[NixlServer]:
    server = NixlServer(folder, "n1")
    server.start()
    yield server
    server.close()


@pytest.fixture
def server(shared_server: NixlServer) -> Iterator[NixlServer]:
    """One helper for most tests: they leave it running, maybe as another process."""
    yield shared_server
    end_stop(shared_server)


@pytest.fixture
def own_server(folder: Path) -> Iterator[NixlServer]:
    """For tests after which the helper may end."""
    server = NixlServer(folder, "n1")
    server.start()
    yield server
    end_stop(server)
    server.close()


@pytest.fixture
def source(server: NixlServer) -> Iterator[NixlSource]:
    source = NixlSource(access_of(server))
    yield source
    source.close()


def access_of(server: NixlServer, asked: "list[str] | None" = None) -> Access:
    def ask(node: str, deadline: float, refresh: bool) -> DataAccess:
        if asked is not None:
            asked.append(node)
        return DataAccess("127.0.0.1", 0, *server.access())

    return ask


def helper_pid(server: NixlServer) -> int:
    assert server._helper is not None
    return server._helper.process.pid


def end_stop(server: NixlServer) -> None:
    if server._helper is not None and server._helper.process.poll() is None:
        os.kill(helper_pid(server), signal.SIGCONT)


def put(arena: Arena, seed: int, num_values: int = 1000) -> BlockRef:
    values = np.random.default_rng(seed).integers(0, 1 << 30, num_values)
    entries = [Entry(f"0.{seed}.0", k, "tokens", values[k:]) for k in range(3)]
    return arena.put(entries, timeout_s=PATIENCE_S)


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def rows(block: object, ref: BlockRef) -> Rows:
    assert isinstance(block, memoryview), block
    return open_block(block, ref, verify=True, where="test")


def assert_is(block: object, ref: BlockRef, seed: int, num_values: int = 1000) -> None:
    values = np.random.default_rng(seed).integers(0, 1 << 30, num_values)
    found = rows(block, ref)
    for k in range(3):
        np.testing.assert_array_equal(found[f"0.{seed}.0", k]["tokens"], values[k:])


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    deadline = soon()
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def run_python(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip


# -- whether to use it ------------------------------------------------------------------------


def test_a_process_that_loads_nixl_stays_as_it_was() -> None:
    done = run_python(
        """
        import logging, os, signal, sys
        environment = dict(os.environ)
        def caught():  # signals 1 to 31; threads need one above
            mask = open("/proc/self/status").read().split("SigCgt:")[1].split()[0]
            return int(mask, 16) & 0x7fffffff
        before = caught()
        from relax_hpc.transfer import rdma
        assert rdma.is_asked_for(rdma.RdmaUse.FORCE) == (True, "")
        assert "nixl_cu12" not in sys.modules
        assert rdma.is_available() == (True, ""), rdma.is_available()
        assert "nixl_cu12" in sys.modules and "torch" not in sys.modules
        assert dict(os.environ) == environment
        assert caught() == before, (hex(caught()), hex(before))
        assert logging.raiseExceptions and not logging.getLogger("nixl").handlers
        """
    )
    # The exit code tells that no library crashed in its exit handler.
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_without_the_package_it_says_what_to_install() -> None:
    done = run_python(
        """
        import sys
        for name in ("nixl_cu12", "nixl_cu13", "nixl"):
            sys.modules[name] = None
        from relax_hpc.config import RdmaUse
        from relax_hpc.errors import TransferError
        from relax_hpc.transfer import rdma
        works, why = rdma.is_available()
        assert not works and "pip install --no-deps nixl-cu12" in why, why
        try:
            rdma.is_wanted(RdmaUse.FORCE)
        except TransferError as err:
            assert "force" in str(err) and "nixl-cu12" in str(err)
        else:
            raise SystemExit("force is ignored")
        """
    )
    assert done.returncode == 0, done.stderr


def test_only_hardware_or_force_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "is_available", lambda: (True, ""))
    monkeypatch.setattr(rdma, "rdma_devices", lambda: [])
    assert rdma.is_wanted(RdmaUse.AUTO)[0] is False
    assert rdma.is_wanted(RdmaUse.FORCE) == (True, "")
    monkeypatch.setattr(rdma, "rdma_devices", lambda: ["mlx5_0"])
    assert rdma.is_wanted(RdmaUse.AUTO) == (True, "")
    assert rdma.is_wanted(RdmaUse.OFF) == (False, "transfer.rdma is off")


def test_modules_of_absent_hardware_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_MODULES", raising=False)
    seen = {}
    for devices in ([], ["mlx5_0"], ["rdmap0s6"]):
        monkeypatch.setattr(nixl_agent, "rdma_devices", lambda devices=devices: devices)
        with nixl_agent._settings():
            seen[str(devices)] = (os.environ["UCX_MODULES"], nixl_agent._transports())
        assert "UCX_MODULES" not in os.environ
    assert list(seen.values()) == [("^ib", "tcp"), ("^efa", "ib"), ("all", "ib")]
    monkeypatch.setenv("UCX_MODULES", "cma")
    with nixl_agent._settings():
        assert os.environ["UCX_MODULES"] == "cma"  # the user's word
    assert os.environ["UCX_MODULES"] == "cma"


# -- reading ----------------------------------------------------------------------------------


def test_blocks_of_several_extents_in_one_read(arena: Arena, server: NixlServer) -> None:
    asked: list[str] = []
    source = NixlSource(access_of(server, asked))
    refs = [put(arena, seed, 10_000 * (1 + seed % 5)) for seed in range(40)]
    assert len({ref.extent for ref in refs}) > 1
    told: list[tuple[int, int]] = []
    blocks = source.read_blocks("n1", refs, soon(), lambda i, _, n: told.append((i, n)))
    for seed, (block, ref) in enumerate(zip(blocks, refs, strict=True)):
        assert_is(block, ref, seed, 10_000 * (1 + seed % 5))
    assert told == [(i, ref.nbytes) for i, ref in enumerate(refs)]
    # An extent that appeared after the node was asked.
    late = put(arena, 99, 600_000)
    assert late.extent not in {ref.extent for ref in refs}
    assert_is(source.read_blocks("n1", [late], soon())[0], late, 99, 600_000)
    assert source.stats()["blocks"] == 41
    assert_is(source.read_blocks("n1", refs[:1], soon())[0], refs[0], 0, 10_000)
    assert asked == ["n1", "n1"]  # at first, and for the extent that it did not know
    source.close()


def test_an_answer_from_just_before_the_extent_is_asked_again(
    arena: Arena, server: NixlServer
) -> None:
    source = NixlSource(access_of(server))
    first = put(arena, 0)
    source.read_blocks("n1", [first], soon())
    before = DataAccess("127.0.0.1", 0, *server.access())
    late = put(arena, 1, 600_000)
    answers = [before, before]  # reader.AccessBook gives what it knows for a moment
    fresh = access_of(server)
    source._access = lambda *question: answers.pop() if answers else fresh(*question)
    assert_is(source.read_blocks("n1", [late], soon())[0], late, 1, 600_000)
    source.close()


def test_batches_are_bounded(
    arena: Arena, source: NixlSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma, "_MAX_BATCH_BYTES", 50_000)
    refs = [put(arena, seed) for seed in range(9)]
    for seed, block in enumerate(source.read_blocks("n1", refs, soon())):
        assert_is(block, refs[seed], seed)


def test_bad_references_hurt_no_other(arena: Arena, source: NixlSource) -> None:
    good, freed = put(arena, 0), put(arena, 1)
    arena.free([(freed.extent, freed.offset, freed.epoch)])

    def changed(**values: Any) -> BlockRef:
        fields = {name: getattr(good, name) for name in BlockRef.__struct_fields__}
        return BlockRef(**{**fields, **values})

    refs = [
        good, freed, changed(epoch=good.epoch + 5), changed(extent="rollout0.0-1.9-feed.0"),
        changed(offset=1 << 40), changed(offset=0), changed(nbytes=8), changed(tier="spill"), good,
    ]  # fmt: skip
    found = source.read_blocks("n1", refs, soon())
    kinds = [type(result) for result in found]
    assert kinds == [
        memoryview, StaleEpochError, StaleEpochError, StaleEpochError,
        TransferError, TransferError, TransferError, TransferError, memoryview,
    ]  # fmt: skip
    assert_is(found[0], good, 0)
    assert_is(found[8], good, 0)
    for problem in found[1:8]:
        assert "n1" in str(problem)


def test_an_extent_that_is_not_registered_is_not_called_gone(
    arena: Arena, server: NixlServer
) -> None:
    def ask(node: str, deadline: float, refresh: bool) -> DataAccess:
        name, metadata = server.access()
        told = msgspec.msgpack.decode(metadata, type=NixlAccess)
        lacking = NixlAccess(told.metadata, {}, is_complete=False)
        return DataAccess("127.0.0.1", 0, name, msgspec.msgpack.encode(lacking))

    source = NixlSource(ask)
    ref = put(arena, 0)
    with pytest.raises(TransferError, match="does not reach extents") as caught:
        source.read_blocks("n1", [ref], soon())
    assert not isinstance(caught.value, StaleEpochError)
    source.close()


def test_a_block_that_is_recycled_during_the_read_is_stale(
    arena: Arena, source: NixlSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, other = put(arena, 0), put(arena, 1)
    move = source._move
    moves = []

    def recycle_between(*arguments: Any) -> None:
        move(*arguments)
        if not moves:
            arena.free([(ref.extent, ref.offset, ref.epoch)])
            again = put(arena, 2)
            assert (again.extent, again.offset) == (ref.extent, ref.offset)
        moves.append(arguments)

    monkeypatch.setattr(source, "_move", recycle_between)
    stale, good = source.read_blocks("n1", [ref, other], soon())
    assert isinstance(stale, StaleEpochError)
    assert "while NIXL read it" in str(stale)
    assert_is(good, other, 1)


def test_buffers_come_back_and_dropped_ones_are_deregistered(
    arena: Arena, source: NixlSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    deregistered = []
    deregister = source._agent.deregister
    monkeypatch.setattr(
        source._agent, "deregister", lambda one: (deregistered.append(one), deregister(one))
    )
    ref = put(arena, 0)
    kept = source.read_blocks("n1", [ref], soon())[0]
    for _ in range(5):
        source.read_blocks("n1", [ref], soon())
    assert source._pool.stats().num_made == 2  # one is kept, the other goes round
    assert_is(kept, ref, 0)
    source._pool._max_idle = 0
    del kept
    source.read_blocks("n1", [ref], soon())
    wait_until(lambda: source._pool.stats().used_bytes == 0, "all views are gone")
    source._tidy()
    assert (len(deregistered), len(source._registered)) == (2, 0)


def test_memory_of_a_removed_extent_is_freed_and_late_reads_find_nothing(
    arena: Arena, source: NixlSource, server: NixlServer, folder: Path
) -> None:
    restarts = server.num_restarts
    ref, other = put(arena, 0), put(arena, 1, 600_000)
    assert ref.extent != other.extent
    source.read_blocks("n1", [ref, other], soon())
    (folder / ref.extent).unlink()
    server.access()
    maps = Path(f"/proc/{helper_pid(server)}/maps").read_text()
    assert ref.extent not in maps
    assert other.extent in maps
    # The source still knows the old address, and UCX over TCP reads any address.
    late, good = source.read_blocks("n1", [ref, other], soon())
    assert isinstance(late, StaleEpochError)
    assert_is(good, other, 1, 600_000)
    # One that asks now hears that there is no such extent.
    with source._lock:
        source._peers.clear()
    late, good = source.read_blocks("n1", [ref, other], soon())
    assert isinstance(late, StaleEpochError)
    assert "no such extent" in str(late)
    assert_is(good, other, 1, 600_000)
    assert server.num_restarts == restarts


# -- failures ---------------------------------------------------------------------------------


def test_a_stopped_target_ends_at_the_deadline_and_keeps_the_buffer(
    arena: Arena, source: NixlSource, server: NixlServer
) -> None:
    ref = put(arena, 0, 400_000)
    assert_is(source.read_blocks("n1", [ref], soon())[0], ref, 0, 400_000)
    stop(helper_pid(server))
    with pytest.raises(DeadlineError, match="node n1 by NIXL"):
        source.read_blocks("n1", [ref], time.monotonic() + 0.5)
    stats = source.stats()
    assert (stats["timeouts"], stats["quarantined"]) == (1, 1)
    # The node is left to TCP meanwhile, at once.
    with pytest.raises(TransferError, match="have not ended yet"):
        source.read_blocks("n1", [ref], soon())
    # Nobody gets the buffer that is still written to; the late bytes land there.
    buffer = source._stuck[0].buffer
    buffer[:] = bytes(len(buffer))
    other = source._pool.take(len(buffer))
    other[:] = b"x" * len(other)
    end_stop(server)
    wait_until(lambda: source.stats()["quarantined"] == 0, "the late transfer ends")
    assert_is(buffer[: ref.nbytes], ref, 0, 400_000)
    assert bytes(other) == b"x" * len(other)
    assert_is(source.read_blocks("n1", [ref], soon())[0], ref, 0, 400_000)


def test_a_hanging_helper_does_not_keep_its_address_back(
    arena: Arena, server: NixlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = server.access()
    told = msgspec.msgpack.decode(before[1], type=NixlAccess)
    old = NixlAccess(told.metadata, told.extents, is_complete=False)
    last = (before[0], msgspec.msgpack.encode(old))
    restarts = server.num_restarts
    stop(helper_pid(server))
    late = put(arena, 0, 600_000)
    assert told.is_complete
    assert server.access() == last  # the TCP address travels in the same answer
    assert server.access() == last
    end_stop(server)

    def knows() -> bool:
        told = msgspec.msgpack.decode(server.access()[1], type=NixlAccess)
        return late.extent in told.extents

    wait_until(knows, "it goes on")
    assert server.num_restarts == restarts
    monkeypatch.setattr(rdma_server, "_LOST_S", 0.0)
    stopped = helper_pid(server)
    stop(stopped)
    assert server.access() == ("", b"")
    wait_until(lambda: process_start(stopped) == 0, "it is ended")
    server._retry_at = 1.0
    assert server.access()[0] not in ("", before[0])


def test_a_stall_is_told_while_there_is_time_for_tcp(
    arena: Arena, source: NixlSource, server: NixlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = put(arena, 0)
    source.read_blocks("n1", [ref], soon())
    monkeypatch.setattr(rdma, "_STALL_S", 0.3)
    stop(helper_pid(server))
    with pytest.raises(TransferError, match="TCP is the way now"):
        source.read_blocks("n1", [ref], soon())
    end_stop(server)
    wait_until(lambda: source.stats()["quarantined"] == 0, "the late transfer ends")


def test_a_killed_target_is_started_again_and_read_from(
    arena: Arena, source: NixlSource, server: NixlServer
) -> None:
    restarts = server.num_restarts
    ref = put(arena, 0, 400_000)
    for round_ in range(3):
        assert_is(source.read_blocks("n1", [ref], soon())[0], ref, 0, 400_000)
        os.kill(helper_pid(server), signal.SIGKILL)

        def is_up(round_: int = round_) -> bool:
            server._retry_at = min(server._retry_at, 1.0)  # no pause between restarts
            return server.access()[0] != "" and server.num_restarts == restarts + round_ + 1

        wait_until(is_up, "the helper comes back")
    assert_is(source.read_blocks("n1", [ref], soon())[0], ref, 0, 400_000)
    assert source.stats()["peers_lost"] == 3
    assert server.num_restarts == restarts + 3


def test_a_target_that_dies_in_mid_transfer_is_a_transfer_error(
    arena: Arena, own_server: NixlServer
) -> None:
    source = NixlSource(access_of(own_server))
    ref = put(arena, 0, 400_000)
    source.read_blocks("n1", [ref], soon())
    stop(helper_pid(own_server))
    with pytest.raises(DeadlineError):
        source.read_blocks("n1", [ref], time.monotonic() + 0.5)
    os.kill(helper_pid(own_server), signal.SIGKILL)
    # Known to have ended, but the buffer waits some seconds more for late packets.
    wait_until(lambda: source._stuck[0].free_at != 0.0 or not source.stats(), "it is lost")
    assert source.stats()["quarantined"] == 1
    with pytest.raises(TransferError, match="n1"):
        source.read_blocks("n1", [ref], time.monotonic() + 5)
    assert own_server.access() == ("", b"")  # starts again after a pause
    for stuck in source._stuck:
        stuck.free_at = 1.0
    assert source.stats()["quarantined"] == 0
    source.close()


def test_a_killed_reader_hurts_nobody(arena: Arena, own_server: NixlServer) -> None:
    source = NixlSource(access_of(own_server))
    ref = put(arena, 0, 400_000)
    name, metadata = own_server.access()
    code = """
    import sys, time
    from relax_hpc.transfer.rdma import Access, NixlSource
    from relax_hpc.transfer.wire import BlockRef, DataAccess
    name, metadata, extent, *numbers = sys.argv[1:]
    access = DataAccess("", 0, name, bytes.fromhex(metadata))
    source = NixlSource(lambda node, deadline, refresh: access)
    ref = BlockRef("n1", extent, *map(int, numbers))
    print("reading", flush=True)
    while True:
        source.read_blocks("n1", [ref] * 20, time.monotonic() + 60)
    """
    place = [ref.extent, *(str(n) for n in (ref.offset, ref.nbytes, ref.epoch, ref.digest))]
    for _ in range(2):
        reader = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), name, metadata.hex(), *place],
            stdout=subprocess.PIPE,
        )  # fmt: skip
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"reading\n"
        time.sleep(0.3)
        reader.kill()
        reader.wait()
    assert_is(source.read_blocks("n1", [ref], soon())[0], ref, 0, 400_000)
    source.close()


def test_a_process_with_a_hanging_transfer_ends_well(arena: Arena, own_server: NixlServer) -> None:
    ref = put(arena, 0, 400_000)
    name, metadata = own_server.access()
    code = """
    import os, signal, sys, time
    from relax_hpc.errors import DeadlineError
    from relax_hpc.transfer.rdma import Access, NixlSource
    from relax_hpc.transfer.wire import BlockRef, DataAccess
    name, metadata, pid, extent, *numbers = sys.argv[1:]
    access = DataAccess("", 0, name, bytes.fromhex(metadata))
    source = NixlSource(lambda node, deadline, refresh: access)
    ref = BlockRef("n1", extent, *map(int, numbers))
    source.read_blocks("n1", [ref], time.monotonic() + 60)
    os.kill(int(pid), signal.SIGSTOP)
    time.sleep(0.5)
    try:
        source.read_blocks("n1", [ref], time.monotonic() + 0.3)
    except DeadlineError:
        source.close()
        del source
        print("hangs")
    """
    numbers = [str(n) for n in (ref.offset, ref.nbytes, ref.epoch, ref.digest)]
    pid = str(helper_pid(own_server))
    done = run_python(code, name, metadata.hex(), pid, ref.extent, *numbers)
    end_stop(own_server)
    assert done.returncode == 0, done.stderr
    assert "hangs" in done.stdout


def test_the_helper_ends_with_its_agent_and_only_then(folder: Path) -> None:
    code = """
    import pathlib, sys
    from relax_hpc.transfer.rdma_server import NixlServer
    server = NixlServer(pathlib.Path(sys.argv[1]), "n1")
    server.start()
    print(server._helper.process.pid, flush=True)
    sys.stdin.read()
    """
    agent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert agent.stdout is not None
    pid = int(agent.stdout.readline())
    start = process_start(pid)
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):  # Slurm signals whole steps
        os.kill(pid, number)
    time.sleep(0.2)
    assert process_start(pid) == start
    agent.kill()
    agent.wait()
    wait_until(lambda: process_start(pid) != start, "the helper ends")


def test_a_helper_that_cannot_start_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UCX_TLS", "nonsense")
    server = NixlServer(folder, "n1")
    with pytest.raises(TransferError, match="did not start"):
        server.start()
    assert "cannot start with UCX" in capfd.readouterr().err
    assert server.access() == ("", b"")
    server.close()


def test_nodes_without_nixl_and_garbage_are_left_to_tcp(arena: Arena) -> None:
    ref = put(arena, 0)
    answers = [
        DataAccess("127.0.0.1", 1),
        DataAccess("127.0.0.1", 1, "agent", b"\xc1garbage"),
        DataAccess("127.0.0.1", 1, "agent", msgspec.msgpack.encode(NixlAccess(b"garbage", {}))),
    ]
    for answer in answers:
        source = NixlSource(lambda node, deadline, refresh, answer=answer: answer)
        with pytest.raises(TransferError):
            source.read_blocks("n1", [ref], soon())
        source.close()
