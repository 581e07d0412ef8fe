"""Questions to a service: whole answers, broken and hurt wires, refusals, silence."""

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from relax_hpc.errors import DeadlineError, TransferError
from relax_hpc.transfer.buffers import BufferPool
from relax_hpc.transfer.frames import WrongKeyError
from relax_hpc.transfer.tcp import DataClient
from relax_hpc.transfer.tcp_questions import Question, RefusedError
from relax_hpc.transfer.tcp_server import DataServer
from relax_hpc.transfer.tcp_stream import Cancelled
from relax_hpc.transfer.wire import DataAccess
from tests.stopping import stop
from tests.wire_proxy import WireProxy

from .data_server_process import KEY

DATA = random.Random(0).randbytes(8 << 20)
RANGES = [(at, min(300_000, len(DATA) - at)) for at in range(0, len(DATA), 300_000)] + [(0, 0)]


def serve_range(body: bytes) -> memoryview:
    start, nbytes = msgspec.msgpack.decode(body, type=tuple[int, int])
    if start < 0:
        raise TransferError("there is nothing before the start")
    return memoryview(DATA)[start : start + nbytes]


@pytest.fixture
def server() -> Iterator[DataServer]:
    server = DataServer({}, KEY, "127.0.0.1")
    server.register("range", serve_range)
    server.start()
    yield server
    server.stop()
    assert server.stats()["connections"] == 0


Ask = Callable[..., tuple[bytes, int]]


@pytest.fixture
def ask() -> Iterator[Ask]:
    """Ask for ranges; returns what was placed, and how much payload came."""
    clients = []

    def run(
        address: tuple[str, int],
        ranges: list[tuple[int, int]] = RANGES,
        *,
        key: bytes = KEY,
        streams: int = 4,
        stall_s: float = 30.0,
        cancelled: threading.Event | None = None,
    ) -> tuple[bytes, int]:
        client = DataClient(key, lambda *_: DataAccess(*address), BufferPool(), streams=streams)
        clients.append(client)
        found: dict[int, bytes] = {}

        def place(number: int, payload: memoryview) -> None:
            assert number not in found
            found[number] = bytes(payload)

        questions = [
            Question("range", nbytes, lambda r=(at, nbytes): msgspec.msgpack.encode(r))  # type: ignore[misc]
            for at, nbytes in ranges
        ]
        came = client.ask(
            "n1", "ranges of n1", questions, place,
            stall_s=stall_s, cancelled=cancelled or threading.Event(),
        )  # fmt: skip
        return b"".join(found[i] for i in range(len(ranges))), came

    yield run
    for client in clients:
        client.close()


@pytest.mark.parametrize("streams", [1, 4])
def test_all_answers_come_and_nothing_more(server: DataServer, ask: Ask, streams: int) -> None:
    assert ask(server.address, streams=streams) == (DATA, len(DATA))
    assert server.stats()["sent_bytes"] == len(DATA)
    assert server.stats()["requests"] == len(RANGES)
    assert ask(server.address, []) == (b"", 0)


def test_a_wire_that_breaks_again_and_again(server: DataServer, ask: Ask) -> None:
    rng, lock = random.Random(1), threading.Lock()

    def hurt(at: int, data: bytes) -> bytes | None:
        with lock:
            return None if rng.random() < 0.05 else data

    with WireProxy(server.address, hurt) as wire:
        found, came = ask(wire.address)
        assert found == DATA and came == len(DATA)
        assert wire.num_connections > 4


def test_what_was_hurt_on_the_way_is_asked_for_again(server: DataServer, ask: Ask) -> None:
    flipped = []

    def hurt(at: int, data: bytes) -> bytes:
        if at > 1_000_000 * (1 + len(flipped)) and len(flipped) < 3 and len(data) > 60_000:
            flipped.append(at)
            return data[:30_000] + bytes([data[30_000] ^ 4]) + data[30_001:]
        return data

    with WireProxy(server.address, hurt) as wire:
        found, came = ask(wire.address)
    assert found == DATA and len(flipped) == 3
    assert came > len(DATA)


def test_a_wire_that_hurts_everything_ends_at_the_deadline(server: DataServer, ask: Ask) -> None:
    def hurt(at: int, data: bytes) -> bytes:
        return data if len(data) < 10_000 else data[:5000] + bytes([data[5000] ^ 4]) + data[5001:]

    with (
        WireProxy(server.address, hurt) as wire,
        pytest.raises(DeadlineError, match=r"ranges of n1: .* 0 of 300000 bytes"),
    ):
        ask(wire.address, RANGES[:1], stall_s=1.0)


def test_a_refusal_ends_it_with_its_reason(server: DataServer, ask: Ask) -> None:
    with pytest.raises(RefusedError, match="ranges of n1: there is nothing before the start"):
        ask(server.address, [*RANGES, (-1, 5)])


def test_an_answer_of_another_length_is_never_placed(server: DataServer, ask: Ask) -> None:
    with pytest.raises(DeadlineError, match="0 of 20 bytes"):
        ask(server.address, [(len(DATA) - 10, 20)], stall_s=1.0)


def test_a_wrong_key_is_told_at_once(server: DataServer, ask: Ask) -> None:
    with pytest.raises(WrongKeyError, match="did not prove this run's key"):
        ask(server.address, key=b"q" * 32)
    assert "sent_bytes" not in server.stats()


def test_cancelled_by_somebody_else(server: DataServer, ask: Ask) -> None:
    cancelled = threading.Event()

    def hurt(at: int, data: bytes) -> bytes:
        if at > 1_000_000:
            cancelled.set()
        return data

    with WireProxy(server.address, hurt) as wire, pytest.raises(Cancelled):
        ask(wire.address, cancelled=cancelled)


PROGRAM = """
import sys
from relax_hpc.transfer.tcp_server import DataServer
server = DataServer({}, bytes(range(32)), "127.0.0.1")
server.register("range", lambda body: memoryview(bytes(300_000)))
print(server.start()[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_server_that_is_silent_in_the_middle(ask: Ask, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdin is not None
        address = ("127.0.0.1", int(process.stdout.readline()))

        def hurt(at: int, data: bytes) -> bytes:
            if at > 2_000_000:
                if number == signal.SIGSTOP:
                    stop(process.pid)
                else:
                    process.kill()
            return data

        ranges = [(0, 300_000)] * 100
        with WireProxy(address, hurt) as wire, pytest.raises(DeadlineError) as failure:
            ask(wire.address, ranges, stall_s=3.0)
        assert " of 30000000 bytes came" in str(failure.value)
        assert " 0 of 30000000" not in str(failure.value)
    finally:
        process.kill()
        process.wait(30)
        for stream in (process.stdin, process.stdout):
            stream.close()  # type: ignore[union-attr]
