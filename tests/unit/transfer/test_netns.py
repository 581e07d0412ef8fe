"""Reads between two network namespaces: IPv4, IPv6, and a cable that is cut in the middle."""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_hpc.errors import DeadlineError
from relax_hpc.transfer.buffers import BufferPool
from relax_hpc.transfer.tcp import DataClient, Progress
from relax_hpc.transfer.wire import BlockRef
from tests.netns import TwoNodes, two_nodes, why_not

from .data_server_process import KEY, ServerProcess, write_blocks

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with two_nodes() as nodes:
        yield nodes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "arenas").mkdir()
    return tmp_path / "arenas"


@pytest.fixture(params=["ipv4", "ipv6"])
def server(
    request: pytest.FixtureRequest, nodes: TwoNodes, folder: Path
) -> Iterator[ServerProcess]:
    ip = getattr(nodes, request.param)[0]
    server = ServerProcess(folder, ip, lambda *args, **options: nodes.start(0, *args, **options))
    yield server
    server.kill()


def read(
    nodes: TwoNodes,
    client: DataClient,
    refs: list[BlockRef],
    seconds: float = 90.0,
    progress: Progress | None = None,
) -> list[memoryview]:
    deadline = time.monotonic() + seconds
    found = nodes.call(1, lambda: client.read_blocks("n1", refs, deadline, progress))
    assert all(isinstance(block, memoryview) for block in found), found
    return found  # type: ignore[return-value]


def images(folder: Path, refs: list[BlockRef]) -> list[bytes]:
    files = {ref.extent: (folder / ref.extent).read_bytes() for ref in refs}
    return [files[ref.extent][ref.offset : ref.offset + ref.nbytes] for ref in refs]


@pytest.mark.parametrize("streams", [1, 4])
def test_blocks_travel_between_nodes(
    nodes: TwoNodes, folder: Path, server: ServerProcess, streams: int
) -> None:
    refs = write_blocks(folder, "x", [500, 5 << 20, 70_000, 12])
    client = DataClient(KEY, server.access, BufferPool(), streams=streams)
    assert read(nodes, client, refs) == images(folder, refs)
    client.close()


@pytest.mark.parametrize("streams", [1, 4])
def test_a_cable_that_is_cut_for_a_moment_costs_time_only(
    nodes: TwoNodes, folder: Path, server: ServerProcess, streams: int
) -> None:
    cut_at_random_times(nodes, folder, server, streams, times=1, seconds=1.0)


@pytest.mark.long
@pytest.mark.parametrize("streams", [1, 4])
def test_cables_that_are_cut_for_5_s_at_20_random_times(
    nodes: TwoNodes, folder: Path, server: ServerProcess, streams: int
) -> None:
    cut_at_random_times(nodes, folder, server, streams, times=20, seconds=5.0)


def cut_at_random_times(
    nodes: TwoNodes, folder: Path, server: ServerProcess, streams: int, times: int, seconds: float
) -> None:
    refs = write_blocks(folder, "x", [16 << 20, 800, 4 << 20])
    expected = images(folder, refs)
    client = DataClient(KEY, server.access, BufferPool(), streams=streams)
    rng = random.Random(streams)
    for _ in range(times):
        cut = Cut(nodes, seconds, at=rng.randrange(1, 24 << 20))
        assert read(nodes, client, refs, progress=cut) == expected
        assert cut.timer is not None
        cut.timer.join()
    client.close()


class Cut:
    """A progress callback that cuts the cable once, when so many bytes have come."""

    def __init__(self, nodes: TwoNodes, seconds: float, at: int) -> None:
        self._nodes, self._seconds, self._at = nodes, seconds, at
        self.timer: threading.Timer | None = None

    def __call__(self, index: int, block: memoryview, ready: int) -> None:
        if self.timer is None and (index > 0 or ready >= self._at):
            self._nodes.down()
            self.timer = threading.Timer(self._seconds, self._nodes.up)
            self.timer.start()


def test_a_cable_that_stays_cut_is_a_deadline_error(
    nodes: TwoNodes, folder: Path, server: ServerProcess
) -> None:
    refs = write_blocks(folder, "x", [8 << 20])
    client = DataClient(KEY, server.access, BufferPool(), streams=4)
    new = DataClient(KEY, server.access, BufferPool(), streams=1)
    read(nodes, client, refs)
    with nodes.cut():
        with pytest.raises(DeadlineError, match=r"x\+4096 of node n1: .* network cut"):
            read(nodes, client, refs, 1.0)
        with pytest.raises(DeadlineError, match=r"unreachable|No route|timed out"):
            read(nodes, new, refs, 0.5)
    assert read(nodes, client, refs) == read(nodes, new, refs) == images(folder, refs)
    client.close()
    new.close()


def test_a_server_that_is_killed_while_the_cable_is_cut(
    nodes: TwoNodes, folder: Path, server: ServerProcess
) -> None:
    """No word of its death arrives: a new address and a silent old one."""
    refs = write_blocks(folder, "x", [16 << 20])
    client = DataClient(KEY, server.access, BufferPool(), streams=2)
    once = threading.Lock()

    def kill(index: int, block: memoryview, ready: int) -> None:
        if once.acquire(blocking=False):
            with nodes.cut():
                server.kill()
                time.sleep(0.3)
            server.restart()

    assert read(nodes, client, refs, progress=kill) == images(folder, refs)
    client.close()


def test_nothing_is_left_of_the_namespaces() -> None:
    with two_nodes() as two:
        process = two.start(1, ["sleep", "600"])
        names = two.names
        assert process.poll() is None
        assert all(Path("/run/netns", name).exists() for name in names)
    assert process.returncode is not None and process.returncode < 0
    assert not any(Path("/run/netns", name).exists() for name in names)
    with pytest.raises(ZeroDivisionError), two_nodes() as two:
        two.call(0, lambda: 1 / 0)
    assert not any(Path("/run/netns", name).exists() for name in two.names)
