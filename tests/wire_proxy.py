"""A wire between a reader and a data server that counts, and does to the answers what it is told.

    with WireProxy(server.address, hurt) as wire:
        ... read from wire.address ...

`hurt(at, data)` gets the place of `data` in all that was answered so far, over all connections, and
returns what goes on (bytes of any length), or None to break this connection there.
"""

import contextlib
import socket
import threading
from collections.abc import Callable

Hurt = Callable[[int, bytes], "bytes | None"]


class WireProxy:
    """Forwards connections; `num_answered` and `num_asked` count the bytes of both directions."""

    def __init__(self, target: tuple[str, int], hurt: Hurt = lambda at, data: data) -> None:
        self._target, self._hurt = target, hurt
        self._lock = threading.Lock()
        self.num_answered = self.num_asked = self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> "WireProxy":
        return self

    def __exit__(self, *_: object) -> None:
        """End all connections and threads."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(30)
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            self.num_connections += 1
            self._sockets += [near, far]
            for work in (self._answers, self._questions):
                thread = threading.Thread(target=work, args=(far, near), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _answers(self, far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(1 << 16):
                with self._lock:
                    at, self.num_answered = self.num_answered, self.num_answered + len(data)
                    hurt = self._hurt(at, data)
                if hurt is None:
                    break
                near.sendall(hurt)
        for end in (near, far):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _questions(self, far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(1 << 16):
                with self._lock:
                    self.num_asked += len(data)
                far.sendall(data)
        with contextlib.suppress(OSError):
            far.shutdown(socket.SHUT_RDWR)
