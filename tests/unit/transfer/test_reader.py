"""One reader, several transports: the same rows, the same errors, whichever way bytes come."""

import dataclasses
import gc
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from relax_hpc.config import RdmaUse, TransferConfig
from relax_hpc.control.identity import Identity
from relax_hpc.errors import DeadlineError, RelaxError, StaleEpochError, TransferError
from relax_hpc.runfolder import RunFolder
from relax_hpc.transfer import opener
from relax_hpc.transfer.agent import NodeAgent
from relax_hpc.transfer.arena import Arena, ArenaLimits, RpcGate
from relax_hpc.transfer.block import Entry, Rows, plan_block, write_block
from relax_hpc.transfer.extent import spill_folder, stamp_of
from relax_hpc.transfer.owner import Owner
from relax_hpc.transfer.rdma_server import NixlServer
from relax_hpc.transfer.reader import AccessBook, Reader
from relax_hpc.transfer.spill import SpillLimits, SpillWriter
from relax_hpc.transfer.tcp_server import DataServer
from relax_hpc.transfer.wire import BlockRef, DataAccess

Who = Callable[..., Identity]
Make = Callable[..., Reader]
TRANSPORTS = ("shm", "tcp", "nixl")
LIMITS = ArenaLimits(extent_bytes=16 << 20, max_bytes=64 << 20, low_water=1 << 20)
VERIFIED = TransferConfig(verify_shm=True)
VALUES: dict[str, Any] = {
    "tokens": np.arange(5000, dtype=np.int32),
    "reward": np.float32(1.5).reshape(()),
    "empty": np.zeros((0, 7), np.float16),
    "mask": np.array([[True, False], [False, True]]),
    "pixels": np.random.default_rng(0).random((3, 40, 50), np.float32),
    "image": b"\0\xff" * 700,
    "text": "z\u00fcrich",
    "vision": {"grid": np.array([1, 2, 3], np.int64), "inner": {"x": b"y"}, "none": {}},
}


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def agent(start_agent: Callable[..., NodeAgent]) -> NodeAgent:
    return start_agent()


@pytest.fixture
def arena(agent: NodeAgent, who: Who) -> Iterator[Arena]:
    arena = Arena(RpcGate(who()), Owner.of(who()), LIMITS)
    yield arena
    arena.close()


@pytest.fixture
def reader(who: Who) -> Iterator[Make]:
    readers = []

    servers = []

    def make(transport: str, config: TransferConfig = VERIFIED) -> Reader:
        node = "n1" if transport == "shm" else "n2"
        identity = who("train", node=node)
        if transport != "nixl":
            readers.append(Reader(identity, config))
            return readers[-1]
        server = NixlServer(identity.run.shm("n1") / "arenas", "n1")
        server.start()
        servers.append(server)

        book = AccessBook(identity)

        def access(node: str, deadline: float, refresh: bool) -> DataAccess:
            name, metadata = server.access()
            tcp = book(node, deadline, refresh)  # where RDMA does not get through
            return msgspec.structs.replace(tcp, nixl_agent=name, nixl_metadata=metadata)

        config = dataclasses.replace(config, rdma=RdmaUse.FORCE)
        readers.append(Reader(identity, config, access))
        return readers[-1]

    yield make
    for one in readers:
        one.close()
    for server in servers:
        server.close()


def put(arena: Arena, uid: str, num_samples: int = 2, **fields: Any) -> BlockRef:
    fields = fields or {"tokens": np.arange(100, dtype=np.int32)}
    return arena.put(
        [Entry(uid, s, name, value) for s in range(num_samples) for name, value in fields.items()],
        timeout_s=30,
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, np.ndarray):
        is_like = (one.dtype, one.shape) == (other.dtype, other.shape)
        return is_like and one.tobytes() == other.tobytes()
    return type(one) is type(other) and bool(one == other)


def flip(folder: RunFolder, ref: BlockRef, at: int) -> None:
    """Flip one bit of a committed block."""
    with (folder.shm("n1") / "arenas" / ref.extent).open("r+b") as file:
        file.seek(ref.offset + at)
        byte = file.read(1)[0]
        file.seek(ref.offset + at)
        file.write(bytes([byte ^ 16]))


# -- conformance ----------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_kind_of_value_arrives_bit_equal(arena: Arena, reader: Make, transport: str) -> None:
    ref = put(arena, "0.7.0", **VALUES)
    one = reader(transport)
    (rows,) = one.read([ref], deadline=soon())
    assert list(rows) == [("0.7.0", 0), ("0.7.0", 1)]
    assert all(same(row, VALUES) for row in rows.values())
    assert one.stats() == {f"{transport}_blocks": 1, f"{transport}_bytes": ref.nbytes}
    with pytest.raises(ValueError, match="read-only"):
        rows["0.7.0", 0]["tokens"][0] = 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_blocks_in_any_order(arena: Arena, reader: Make, transport: str) -> None:
    refs = [put(arena, f"{i}.0.0", tokens=np.full(i, i, np.int32)) for i in range(120)]
    wanted = np.random.default_rng(1).permutation(120).tolist()
    found = reader(transport).read([refs[i] for i in wanted], deadline=soon())
    for i, rows in zip(wanted, found, strict=True):
        assert same(rows[f"{i}.0.0", 1]["tokens"], np.full(i, i, np.int32))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_freed_recycled_and_impossible_references(
    arena: Arena, reader: Make, transport: str
) -> None:
    good, freed, recycled = (put(arena, uid) for uid in ("1.0.0", "2.0.0", "3.0.0"))
    one = reader(transport)
    one.read([good, freed, recycled], deadline=soon())
    arena.free([(r.extent, r.offset, r.epoch) for r in (freed, recycled)])
    while (newer := put(arena, "4.0.0")).offset != recycled.offset:
        pass
    change = msgspec.structs.replace
    refs = [
        good, freed, recycled, newer, change(good, extent=good.extent + "9"),
        change(good, offset=1 << 40), change(good, nbytes=1 << 40), change(good, digest=1),
    ]  # fmt: skip
    results = one.read_each(refs, deadline=soon())
    assert [type(r) for r in results[:5]] == [
        Rows, StaleEpochError, StaleEpochError, Rows, StaleEpochError
    ]  # fmt: skip
    assert all(type(r) is TransferError for r in results[5:])
    for ref, result in zip(refs, results, strict=True):
        if isinstance(result, RelaxError):
            assert ref.extent in str(result) and "node n1" in str(result)
    with pytest.raises(StaleEpochError):
        one.read(refs, deadline=soon())


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [1000, 700_000])
def test_one_flipped_bit_is_an_error_that_names_group_and_field(
    arena: Arena, reader: Make, folder: RunFolder, transport: str, size: int
) -> None:
    fields = {"tokens": np.arange(size, dtype=np.int32), "logprobs": np.zeros(size, np.float32)}
    refs = [put(arena, f"{i}.0.0", **fields) for i in range(3)]
    flip(folder, refs[1], refs[1].nbytes - 64 - size)  # in the last column
    one = reader(transport)
    results = one.read_each(refs, deadline=soon())
    assert isinstance(results[0], Rows) and isinstance(results[2], Rows)
    assert type(results[1]) is TransferError
    assert "field logprobs of group 1.0.0" in str(results[1]) and "is corrupt" in str(results[1])
    assert one.stats().get("read_again", 0) == (transport != "shm"), "once more, then given up"
    flip(folder, refs[0], 60)
    (result,) = one.read_each(refs[:1], deadline=soon())
    assert type(result) is TransferError and "header is corrupt" in str(result)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_views_stay_as_they_are_while_others_are_read(
    arena: Arena, reader: Make, transport: str
) -> None:
    refs = [put(arena, f"{i}.0.0", tokens=np.full(50_000, i, np.int32)) for i in range(6)]
    one = reader(transport)
    kept = one.read(refs[:1], deadline=soon())[0]["0.0.0", 1]["tokens"][100:200]
    for _ in range(5):
        for ref in refs[1:]:
            one.read([ref], deadline=soon())
    assert (kept == 0).all()


def test_received_memory_is_recycled(arena: Arena, reader: Make) -> None:
    refs = [put(arena, f"{i}.0.0", tokens=np.full(50_000, i, np.int32)) for i in range(4)]
    one = reader("tcp")
    for _ in range(20):
        rows = one.read(refs, deadline=soon())
        del rows
    gc.collect()
    stats = one._pool.stats()
    assert stats.num_made <= 3 and stats.num_recycled >= 17 and stats.used_bytes == 0


# -- transports of their own ----------------------------------------------------------------------


def test_a_block_that_was_hurt_on_the_way_is_read_again(
    arena: Arena, reader: Make, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = [put(arena, f"{i}.0.0", tokens=np.full(500_000, i, np.int32)) for i in range(3)]
    send, hurt = DataServer._send_range, [True]

    def flip_once(self: DataServer, *args: Any) -> None:
        is_first = hurt.pop() if hurt else False
        if is_first:
            flip(folder, refs[1], 1_000_000)
        send(self, *args)
        if is_first:
            time.sleep(0.2)  # what is in the socket is the file's own page
            flip(folder, refs[1], 1_000_000)

    monkeypatch.setattr(DataServer, "_send_range", flip_once)
    one = reader("tcp")
    found = one.read(refs, deadline=soon())
    assert [rows[f"{i}.0.0", 1]["tokens"].tolist() == [i] * 500_000 for i, rows in enumerate(found)]
    assert one.stats()["read_again"] == 1


@pytest.mark.parametrize("pieces", [1, 7, 64, 1000, 10**9])
def test_checksums_follow_pieces_of_any_size(pieces: int) -> None:
    plan = plan_block(
        [Entry("g", s, name, value) for s in (0, 1) for name, value in VALUES.items()]
    )
    memory = memoryview(bytearray(plan.nbytes))
    digest = write_block(plan, memory, 5)
    ref = BlockRef("n", "x", 4096, plan.nbytes, 5, digest)
    middle = bytes(memory).index(VALUES["pixels"].tobytes()) + 5000
    hashed = []

    def open_block(block: memoryview, ref: BlockRef, *, verify: bool, where: str) -> Any:
        hashed.append(not verify)
        return original(block, ref, verify=verify, where=where)

    original, opener.open_block = opener.open_block, open_block
    try:
        for is_hurt in (False, True):
            one = opener.BlockOpener([ref], "test")
            memory[middle] ^= is_hurt
            for ready in [*range(pieces, plan.nbytes, pieces), plan.nbytes]:
                one.progress(0, memory, ready)
            result = one.result(0, memory)
            assert isinstance(result, TransferError) == is_hurt == one.is_hurt(0)
    finally:
        opener.open_block = original
    assert hashed == [pieces < plan.nbytes, False], "good ones were hashed on the way"


def test_the_spill_is_read_from_a_shared_folder_and_through_the_agent(
    start_agent: Callable[..., NodeAgent], who: Who, reader: Make, tmp_path: Path
) -> None:
    for config in (VERIFIED, TransferConfig(spill_folder=str(tmp_path / "disk"), spill_mb=64)):
        agent = start_agent(who("dcs", incarnation=2 if config is VERIFIED else 3), config)
        place = spill_folder(who().run, "n1", config.spill_folder)
        limits = SpillLimits(max_bytes=64 << 20)
        writer = SpillWriter(place, "n1", "rollout0.0-1.1-abc", limits, stamp_of(Owner.of(who())))
        plan = plan_block([Entry("0.0.0", 0, "tokens", np.arange(100_000))])
        memory = memoryview(bytearray(plan.nbytes))
        digest = write_block(plan, memory, 3)
        refs = [writer.append(memory, epoch=3, digest=digest) for _ in range(3)]
        for transport, hides in (("shm", False), ("tcp", False), ("tcp", True)):
            one = reader(transport, config)
            if hides:
                one._sees_spill = lambda ref: False  # type: ignore[method-assign]
            for rows in one.read(refs, deadline=soon()):
                assert same(rows["0.0.0", 0]["tokens"], np.arange(100_000))
        agent.close(remove=False)
        shutil.rmtree(place)


def test_a_dead_node_does_not_hurt_the_others(
    arena: Arena, reader: Make, who: Who, start_agent: Callable[..., NodeAgent]
) -> None:
    ref = put(arena, "0.0.0")
    lost = msgspec.structs.replace(ref, node="n9")
    results = reader("tcp").read_each([lost, ref, lost], deadline=soon(1.0))
    assert isinstance(results[1], Rows)
    for i in (0, 2):
        assert isinstance(results[i], DeadlineError) and "n9" in str(results[i])


def test_a_restarted_agent_is_found_again(
    arena: Arena, reader: Make, who: Who, agent: NodeAgent, start_agent: Callable[..., NodeAgent]
) -> None:
    ref = put(arena, "0.0.0")
    one = reader("tcp")
    one.read([ref], deadline=soon())
    agent.close(remove=False)
    later = threading.Timer(0.3, lambda: start_agent(who("dcs", incarnation=2)))
    later.start()
    (rows,) = one.read([ref], deadline=soon())
    assert same(rows["0.0.0", 0]["tokens"], np.arange(100, dtype=np.int32))
    later.join()
