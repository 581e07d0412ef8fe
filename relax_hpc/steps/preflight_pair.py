"""The way between two nodes over TCP: latency and bandwidth, without MPI.

leader                                 answers
  connect, token            ------->   keeps the connection until it is asked for this token
  PING                      ------->   PING                     the shortest round trip counts
  DATA length, bytes        ------->   DATA                     the fastest transfer counts
  END                       ------->   closes
"""

import contextlib
import hmac
import socket
import struct
import time
from collections.abc import Iterator

from relax_hpc.topology.node_report import TOKEN_BYTES, Measured, PairTold

PAIR_TIMEOUT_S = 6.0
"""For a partner to come, and for any one answer."""
_PING, _DATA, _END = b"p", b"d", b"e"
_LENGTH = struct.Struct("<I")
_NUM_PINGS = 100
_PINGS_S = 0.5
"""Fewer pings on a slow way, but never fewer than 3."""
_TRANSFER_BYTES = 8 << 20
_TRANSFERS_S = 1.0
_NUM_TRANSFERS = 6


class PairListener:
    """The port where a node waits for its partners. One thread."""

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0), backlog=16)
        self._early: list[tuple[bytes, socket.socket]] = []

    @property
    def port(self) -> int:
        """The port that the kernel gave."""
        return int(self._socket.getsockname()[1])

    def accept(self, token: bytes) -> socket.socket:
        """Wait for the partner with this token; others (of a later round) are kept.

        Raises:
            TimeoutError: it did not come.
        """
        deadline = time.monotonic() + PAIR_TIMEOUT_S
        while True:
            for known, connection in self._early:
                if hmac.compare_digest(known, token):
                    self._early.remove((known, connection))
                    return connection
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            connection, _ = self._socket.accept()
            connection.settimeout(2.0)
            try:
                self._early.append((receive(connection, TOKEN_BYTES), connection))
            except OSError:  # not a partner
                connection.close()
            if time.monotonic() > deadline:
                raise TimeoutError("the partner did not connect")

    def close(self) -> None:
        """Close the port and what was never asked for."""
        for _, connection in self._early:
            connection.close()
        self._socket.close()


@contextlib.contextmanager
def connected(pair: PairTold, listener: PairListener) -> Iterator[socket.socket]:
    """Open the connection of a pair, from either side."""
    if pair.is_leader:
        connection = socket.create_connection((pair.address, pair.port), timeout=PAIR_TIMEOUT_S)
        connection.sendall(pair.token)
    else:
        connection = listener.accept(pair.token)
    with connection:
        connection.settimeout(PAIR_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield connection


def measure_pair(
    rank: int, round_number: int, pair: PairTold, listener: PairListener
) -> Measured | None:
    """Measure the way to a partner (leader), or answer it. The answering side tells only faults."""
    try:
        with connected(pair, listener) as connection:
            if not pair.is_leader:
                answer(connection)
                return None
            latency = _shortest_ping_us(connection)
            speed = _fastest_transfer(connection)
            connection.sendall(_END)
    except OSError as err:
        fault = f"{type(err).__name__}: {err}"
        return Measured(rank=rank, peer=pair.rank, round_number=round_number, fault=fault)
    return Measured(
        rank=rank,
        peer=pair.rank,
        round_number=round_number,
        latency_us=latency,
        gbytes_per_s=speed,
    )


def _shortest_ping_us(connection: socket.socket) -> float:
    shortest = float("inf")
    began = time.perf_counter()
    for number in range(_NUM_PINGS):
        before = time.perf_counter()
        connection.sendall(_PING)
        receive(connection, 1)
        now = time.perf_counter()
        shortest = min(shortest, now - before)
        if number >= 2 and now - began > _PINGS_S:
            break
    return shortest * 1e6 / 2


def _fastest_transfer(connection: socket.socket) -> float:
    """Return GB/s."""
    data = bytes(_TRANSFER_BYTES)
    fastest = 0.0
    began = time.perf_counter()
    for _ in range(_NUM_TRANSFERS):
        before = time.perf_counter()
        connection.sendall(_DATA + _LENGTH.pack(len(data)))
        connection.sendall(data)
        receive(connection, 1)
        now = time.perf_counter()
        fastest = max(fastest, len(data) / (now - before) / 1e9)
        if now - began > _TRANSFERS_S:
            break
    return fastest


def answer(connection: socket.socket) -> None:
    """Answer a leader until it says END.

    Raises:
        OSError: it went away, or says something else.
    """
    room = bytearray(_TRANSFER_BYTES)
    while True:
        word = receive(connection, 1)
        if word == _PING:
            connection.sendall(_PING)
        elif word == _DATA:
            (length,) = _LENGTH.unpack(receive(connection, _LENGTH.size))
            if length > len(room):
                raise OSError(f"the partner announces {length} bytes")
            _receive_into(connection, memoryview(room)[:length])
            connection.sendall(_DATA)
        elif word == _END:
            return
        else:
            raise OSError(f"the partner says {word!r}")


def receive(connection: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes.

    Raises:
        OSError: the other end closed, or was silent for the connection's timeout.
    """
    data = bytearray(size)
    _receive_into(connection, memoryview(data))
    return bytes(data)


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionResetError("the partner closed the connection")
        view = view[count:]
