"""A bad link between two processes: a TCP proxy that delays, stalls, corrupts, resets and counts.

with Proxy(("127.0.0.1", port), delay_s=0.02) as proxy:
    client.connect(proxy.address)
    proxy.at(100_000, "reset")     # when so many bytes have come from the server
    proxy.at(200_000, process.kill)
"""

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable

FAULTS = ("corrupt", "reset", "stall", "truncate", "drop", "duplicate", "reorder")
_PIECE = 1 << 14
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close(2) sends RST
Piece = tuple[float, bytes]


class Proxy:
    """Forwards connections to a server; faults hit the direction from the server."""

    def __init__(self, target: tuple[str, int], delay_s: float = 0.0) -> None:
        self.target, self.delay_s = target, delay_s
        self._lock = threading.Lock()
        self._plan: list[tuple[int, str | Callable[[], object]]] = []
        self._pairs: list[_Pair] = []
        self._is_closed = False
        self.num_connections = 0
        self.bytes_down = 0
        """That came from the server."""
        self.done: list[str] = []
        """Faults that were made."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address: tuple[str, int] = ("127.0.0.1", self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.break_all()
        self._thread.join(10)

    def at(self, num_bytes: int, action: str | Callable[[], object]) -> None:
        """Plan a fault (or a call) for when so many bytes more have come."""
        with self._lock:
            self._plan.append((self.bytes_down + num_bytes, action))
            self._plan.sort(key=lambda item: item[0])

    def break_all(self) -> None:
        """Reset every connection."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.reset()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            try:
                server = socket.create_connection(self.target, 5)
            except OSError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                client.close()
                continue
            server.settimeout(None)
            pair = _Pair(self, client, server)
            with self._lock:
                self._pairs.append(pair)
                is_closed = self._is_closed
            if is_closed:
                pair.reset()
            pair.start()

    def _count(self, nbytes: int) -> list[str | Callable[[], object]]:
        with self._lock:
            self.bytes_down += nbytes
            due = [action for at, action in self._plan if at <= self.bytes_down]
            self._plan = self._plan[len(due) :]
            return due


class _Pair:
    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy, self._client, self._server = proxy, client, server
        for sock in (client, server):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        for source, sink, is_down in (
            (self._client, self._server, False),
            (self._server, self._client, True),
        ):
            pieces: queue.Queue[Piece | None] = queue.Queue(256)
            for target, arguments in (
                (self._read, (source, pieces, is_down)),
                (self._write, (sink, pieces)),
            ):
                threading.Thread(target=target, args=arguments, daemon=True).start()

    def reset(self) -> None:
        for sock in (self._client, self._server):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                sock.shutdown(socket.SHUT_RDWR)
                sock.close()

    def _read(self, source: socket.socket, pieces: "queue.Queue[Piece | None]", down: bool) -> None:
        state = _State()
        try:
            while data := source.recv(_PIECE):
                out = [data]
                for action in self._proxy._count(len(data)) if down else ():
                    if callable(action):
                        action()
                        continue
                    self._proxy.done.append(action)
                    out = state.hurt(action, data)
                    if action == "reset":
                        self.reset()
                if state.held and not state.is_fresh:
                    out, state.held = [*out, state.held], b""
                state.is_fresh = False
                for piece in out if not state.is_stalled else ():
                    pieces.put((time.monotonic() + self._proxy.delay_s, piece))
                if state.is_over:
                    break
        except OSError:
            pass
        pieces.put(None)

    def _write(self, sink: socket.socket, pieces: "queue.Queue[Piece | None]") -> None:
        try:
            while (item := pieces.get()) is not None:
                at, data = item
                time.sleep(max(at - time.monotonic(), 0.0))
                sink.sendall(data)
        except OSError:
            self.reset()
            while pieces.get() is not None:  # so that the reader is not held up
                pass
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


class _State:
    """Of one direction of a connection."""

    def __init__(self) -> None:
        self.held = b""
        self.is_fresh = self.is_stalled = self.is_over = False

    def hurt(self, action: str, data: bytes) -> list[bytes]:
        if action == "corrupt":
            at = len(data) // 2
            return [data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]]
        if action == "truncate":
            self.is_over = True
            return [data[: len(data) // 2]]
        if action == "drop":
            return []
        if action == "duplicate":
            return [data, data]
        if action == "reorder":
            self.held, self.is_fresh = data, True
            return []
        self.is_stalled = action == "stall"
        self.is_over = action == "reset"
        return [] if self.is_stalled or self.is_over else [data]
