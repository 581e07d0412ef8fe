"""Reads over TCP: one round for many blocks, stripes, stale blocks, broken and silent servers."""

import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relax_hpc.errors import DeadlineError, RelaxError, StaleEpochError, TransferError
from relax_hpc.transfer import tcp
from relax_hpc.transfer.buffers import BufferPool
from relax_hpc.transfer.read_plan import ReadPlan
from relax_hpc.transfer.tcp import DataClient
from relax_hpc.transfer.tcp_server import DataServer
from relax_hpc.transfer.wire import BlockRef, DataAccess
from tests.stopping import stop

from .data_server_process import KEY, ServerProcess, write_blocks

IPS = ("127.0.0.1", "::1")


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def images(folder: Path, refs: list[BlockRef]) -> list[bytes]:
    files = {ref.extent: (folder / ref.extent).read_bytes() for ref in refs}
    return [files[ref.extent][ref.offset : ref.offset + ref.nbytes] for ref in refs]


def same(folder: Path, refs: list[BlockRef], results: list[memoryview | RelaxError]) -> bool:
    return list(results) == images(folder, refs)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "arenas"


@pytest.fixture(params=IPS)
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[DataServer]:
    areas = {"arenas": folder, "weights": folder.parent / "weights", "spill": folder / "spilled"}
    server = DataServer(areas, KEY, request.param)
    server.start()
    yield server
    server.stop()
    assert server.stats()["connections"] == 0


@pytest.fixture
def client(server: DataServer) -> Iterator[Callable[..., DataClient]]:
    clients = []

    def make(streams: int = 1, key: bytes = KEY) -> DataClient:
        access = DataAccess(*server.address)
        clients.append(DataClient(key, lambda *_: access, BufferPool(), streams=streams))
        return clients[-1]

    yield make
    for one in clients:
        one.close()


Make = Callable[..., DataClient]


# -- what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [0, 64, 40_000])
def test_many_small_blocks_travel_in_one_request(
    folder: Path, server: DataServer, client: Make, gap: int
) -> None:
    refs = write_blocks(
        folder, "x", [random.Random(1).randrange(4, 3000) for _ in range(150)], gap=gap
    )
    refs += write_blocks(folder, "y", [1000] * 50, gap=gap)
    random.Random(2).shuffle(refs)
    refs.append(refs[7])
    results = client().read_blocks("n1", refs, soon())
    assert same(folder, refs, results)
    assert server.stats()["requests"] == 1
    sent, needed = server.stats()["sent_bytes"], sum(ref.nbytes for ref in refs)
    assert sent < needed + 200 * (64 + (gap if gap < 16 << 10 else 0)), "no gaps are sent"


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_large_reads_are_striped_and_reported_in_order(
    folder: Path, server: DataServer, client: Make, streams: int
) -> None:
    refs = write_blocks(folder, "x", [4 << 20, 1000, 5 << 20, 5])
    seen: list[tuple[int, int]] = []
    wrong: list[object] = []
    expected = images(folder, refs)

    def progress(index: int, block: memoryview, ready: int) -> None:
        seen.append((index, ready))
        if block[:ready] != memoryview(expected[index])[:ready]:
            wrong.append((index, ready))

    reader = client(streams)
    results = reader.read_blocks("n1", refs, soon(), progress)
    assert same(folder, refs, results) and not wrong
    assert seen == sorted(seen) and (len(seen) > 8 or streams > 1)
    assert {(i, ref.nbytes) for i, ref in enumerate(refs)} <= set(seen)
    assert server.stats()["requests"] == streams
    reader.read_blocks("n1", refs, soon())
    assert server.stats()["requests"] == 2 * streams
    assert server.stats()["connections"] <= streams, "connections are used again"


def test_reads_of_more_than_a_buffer_are_cut(
    folder: Path, client: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_MAX_BATCH_BYTES", 10_000)
    monkeypatch.setattr(tcp, "_MAX_BATCH_BLOCKS", 3)
    refs = write_blocks(folder, "x", [100, 100, 100, 100, 6000, 3000, 40_000, 100])
    told: list[int] = []
    results = client().read_blocks("n1", refs, soon(), lambda i, block, ready: told.append(i))
    assert same(folder, refs, results)
    assert list(dict.fromkeys(told)) == list(range(8))


def test_nothing_is_nothing(folder: Path, client: Make) -> None:
    assert client().read_blocks("n1", [], soon()) == []


def test_a_plan_covers_every_byte_once() -> None:
    """Property: stripes of all streams together are the runs; each block's checks are asked."""
    rng = random.Random(3)
    for _ in range(20):
        refs, offset = [], 4096
        for i in range(rng.randrange(1, 40)):
            nbytes = rng.randrange(1, 3 << 20) if rng.random() < 0.2 else rng.randrange(1, 9000)
            refs.append(BlockRef("n", rng.choice("ab"), offset, nbytes, i + 1, 0))
            offset += -(-nbytes // 64) * 64 + 64 * rng.randrange(0, 400)
        rng.shuffle(refs)
        plan = ReadPlan.of_blocks(refs)
        shares = plan.shares(rng.choice((1, 3, 4)))
        pieces = sorted(piece for share in shares for piece in share)
        assert pieces[0][0] == 0 and pieces[-1][1] == plan.nbytes
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
        place: dict[tuple[str, int], int] = {}
        for share in shares:
            at = [start + k for start, end in share for k in range(0, end - start, 64)]
            got = [
                (plan.files[f][1], offset + k)
                for f, offset, nbytes in plan.ranges(share)
                for k in range(0, nbytes, 64)
            ]
            place.update(dict(zip(got, at, strict=True)))
            for i in set(range(len(refs))) - set(plan.touched(share)):
                span = plan.spans[i]
                assert all(e <= span.start or span.start + span.nbytes <= s for s, e in share)
        for ref, span in zip(refs, plan.spans, strict=True):
            for k in range(0, ref.nbytes, 64):
                assert place[ref.extent, ref.offset + k] == span.start + k


@pytest.mark.parametrize("nbytes", [0, 1, 64, 1000, 3_000_001])
def test_whole_files(tmp_path: Path, folder: Path, client: Make, nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    place = tmp_path / "weights" / "i1-v3"
    place.mkdir(parents=True)
    (place / "rank-0").write_bytes(data)
    assert bytes(client(4).read_file("n1", "weights", "i1-v3/rank-0", soon())) == data


def test_only_plain_files_of_the_areas_can_be_read(
    tmp_path: Path, folder: Path, client: Make
) -> None:
    folder.mkdir()
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / ".tmp-1-1-x").write_bytes(b"unfinished")
    (folder / "link").symlink_to("/etc/hostname")
    (folder / "sub" / "deep" / "x").write_bytes(b"too deep")
    (tmp_path / "owner.json").write_bytes(b"{}")
    reader = client()
    for area, name in (
        ("arenas", "../owner.json"), ("arenas", ".tmp-1-1-x"), ("arenas", "link"),
        ("arenas", "sub"), ("arenas", "/etc/hostname"), ("arenas", "sub/deep/x"),
        ("arenas", "nothing"), ("arenas", ""), ("arenas", "a\0b"),
        ("secret", "x"), ("arenas", "sub/../../owner.json"),
    ):  # fmt: skip
        with pytest.raises(TransferError, match="does not exist"):
            reader.read_file("n1", area, name, soon())


# -- blocks that are gone -------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 4])
def test_what_is_wrong_with_one_block_hurts_no_other(
    folder: Path, client: Make, streams: int
) -> None:
    refs = write_blocks(folder, "x", [100, 3 << 20, 100, 3 << 20, 500, 600])
    asked = list(refs)
    change = msgspec.structs.replace
    asked[1] = change(refs[1], epoch=99)
    asked[2] = change(refs[2], extent="removed")
    asked[4] = change(refs[4], nbytes=1 << 40)
    asked[5] = change(refs[5], offset=1 << 40)
    results = client(streams).read_blocks("n1", asked, soon())
    assert same(folder, [refs[0], refs[3]], [results[0], results[3]])
    assert isinstance(results[1], StaleEpochError) and "epoch is no longer 99" in str(results[1])
    assert isinstance(results[2], StaleEpochError) and "removed+" in str(results[2])
    for i in (4, 5):
        assert isinstance(results[i], TransferError) and "do not lie in its file" in str(results[i])


@pytest.mark.parametrize("streams", [1, 4])
def test_a_block_that_is_recycled_while_it_is_sent_is_stale(
    folder: Path, client: Make, monkeypatch: pytest.MonkeyPatch, streams: int
) -> None:
    refs = write_blocks(folder, "x", [3 << 20, 3 << 20])
    send = DataServer._send_range
    lock = threading.Lock()

    def recycle(self: DataServer, *args: object) -> None:
        send(self, *args)  # type: ignore[arg-type]
        with lock, (folder / "x").open("r+b") as file:
            file.seek(refs[1].offset + 8)
            file.write((77).to_bytes(8, "little"))

    monkeypatch.setattr(DataServer, "_send_range", recycle)
    first, second = client(streams).read_blocks("n1", refs, soon())
    assert isinstance(first, memoryview) and same(folder, refs[:1], [first])
    assert isinstance(second, StaleEpochError)


# -- servers that stop, die, cut ------------------------------------------------------------------


@pytest.fixture
def process(folder: Path) -> Iterator[ServerProcess]:
    folder.mkdir()
    process = ServerProcess(folder)
    yield process
    process.kill()


@pytest.mark.parametrize("streams", [1, 4])
def test_a_killed_and_restarted_server_is_read_to_the_end(
    folder: Path, process: ServerProcess, streams: int
) -> None:
    refs = write_blocks(folder, "x", [16 << 20, 500, 8 << 20])
    client = DataClient(KEY, process.access, BufferPool(), streams=streams)
    once = threading.Lock()

    def kill(index: int, block: memoryview, ready: int) -> None:
        if once.acquire(blocking=False):
            assert ready < 32 << 20
            process.kill()
            process.restart()

    assert same(folder, refs, client.read_blocks("n1", refs, soon(), kill))
    assert process.num_asked > streams, "the new address was asked for"
    client.close()


def test_a_server_that_stays_dead_is_a_deadline_error(folder: Path, process: ServerProcess) -> None:
    refs = write_blocks(folder, "x", [1000])
    client = DataClient(KEY, process.access, BufferPool())
    assert same(folder, refs, client.read_blocks("n1", refs, soon()))
    process.process.kill()
    process.process.wait()
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"block x\+4096 of node n1: not read within .*refused"):
        client.read_blocks("n1", refs, soon(0.7))
    assert time.monotonic() - started < 10
    client.close()


@pytest.mark.parametrize("streams", [1, 4])
def test_a_stopped_server_is_a_deadline_error_that_names_it(
    folder: Path, process: ServerProcess, streams: int
) -> None:
    # More for each stream than the kernel's buffers of both ends hold.
    refs = write_blocks(folder, "x", [64 << 20])
    client = DataClient(KEY, process.access, BufferPool(), streams=streams)

    def halt(index: int, block: memoryview, ready: int) -> None:
        stop(process.process.pid)

    size = -(-refs[0].nbytes // 64) * 64
    expected = rf"block x\+4096 of node n1: .* \d+ of {size} bytes came from 127.0.0.1"
    with pytest.raises(DeadlineError, match=expected):
        client.read_blocks("n1", refs, soon(1.0), halt)
    # A stream whose part had arrived before the stop is used again: no handshake then.
    with pytest.raises(DeadlineError, match=r"no byte of (handshake|reply)"):
        client.read_blocks("n1", refs, soon(2.0))
    os.kill(process.process.pid, signal.SIGCONT)
    assert same(folder, refs, client.read_blocks("n1", refs, soon())), "no late byte of the first"
    client.close()


class Proxy:
    """Forwards connections to a server, and cuts the answers where it is told to."""

    def __init__(self, target: tuple[str, int], next_cut: Callable[[], int]) -> None:
        self._target, self._next_cut = target, next_cut
        self.num_cut = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.access = DataAccess(*self._listener.getsockname())
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._forward, args=(near,), daemon=True).start()

    def _forward(self, near: socket.socket) -> None:
        with near, socket.create_connection(self._target) as far:
            threading.Thread(target=_copy, args=(near, far, 1 << 60), daemon=True).start()
            if _copy(far, near, self._next_cut()):
                self.num_cut += 1
            for end in (near, far):
                end.shutdown(socket.SHUT_RDWR)


def _copy(source: socket.socket, target: socket.socket, limit: int) -> bool:
    """Copy; True if the limit was reached."""
    try:
        while limit and (data := source.recv(min(limit, 1 << 16))):
            target.sendall(data)
            limit -= len(data)
    except OSError:
        return False
    return limit == 0


@pytest.mark.parametrize("streams", [1, 4])
def test_connections_that_break_anywhere_are_mended(
    folder: Path, process: ServerProcess, streams: int
) -> None:
    refs = write_blocks(folder, "x", [5 << 20, 100, 100, 2 << 20])
    total = sum(ref.nbytes for ref in refs)
    rng = random.Random(streams)
    proxy = Proxy((process.ip, process.port), lambda: rng.choice((30, 90, rng.randrange(total))))
    for _ in range(4):
        client = DataClient(KEY, lambda *_: proxy.access, BufferPool(), streams=streams)
        assert same(folder, refs, client.read_blocks("n1", refs, soon()))
        client.close()
    assert proxy.num_cut >= 4
    proxy.close()


def test_a_server_that_sends_drop_by_drop_meets_the_deadline(folder: Path) -> None:
    """Bytes keep coming, so no wait for one is ever long."""
    refs = write_blocks(folder, "x", [100_000])
    server = DataServer({"arenas": folder}, KEY, "127.0.0.1")
    server.start()

    def drip(connection: Any, file: int, offset: int, nbytes: int) -> None:
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
        for _ in range(nbytes):
            connection.socket.sendall(b"x")
            time.sleep(0.01)

    server._send_range = drip  # type: ignore[method-assign]
    client = DataClient(KEY, lambda *_: DataAccess(*server.address), BufferPool())
    started = time.monotonic()
    with pytest.raises(DeadlineError, match="not read within"):
        client.read_blocks("n1", refs, soon(2.0))
    assert time.monotonic() - started < 20
    client.close()
    server.stop()


def test_reads_of_many_threads_do_not_mix(folder: Path, server: DataServer, client: Make) -> None:
    refs = write_blocks(folder, "x", [200_000] * 40)
    reader, errors = client(2), []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(15):
            wanted = rng.sample(refs, 8)
            if not same(folder, wanted, reader.read_blocks("n1", wanted, soon())):
                errors.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
