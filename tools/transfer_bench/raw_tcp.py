"""One end of a plain TCP transfer, as iperf3 does it: what the network path can do at best.

The sender sends one warm buffer over and over, the receiver reads into one small buffer and looks
at nothing. `python -m transfer_bench.raw_tcp send|receive ADDRESS`
"""

import contextlib
import socket
import sys
import threading
import time

from transfer_bench.side import Answer, serve

_PIECE = 1 << 20
_DEADLINE_S = 60.0


class Sender:
    """Sends as many bytes as each connection asks for."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0), backlog=64)
        threading.Thread(target=self._accept, daemon=True).start()

    def ready(self) -> Answer:
        return {"port": self._listener.getsockname()[1]}

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._send, args=(connection,), daemon=True).start()

    def _send(self, connection: socket.socket) -> None:
        piece = memoryview(bytes(_PIECE))
        with connection:
            connection.settimeout(_DEADLINE_S)
            while wanted := int.from_bytes(connection.recv(8), "little"):
                while wanted > 0:
                    wanted -= connection.send(piece[: min(wanted, _PIECE)])


class Receiver:
    """Asks the sender for bytes over one or more connections at a time."""

    def __init__(self) -> None:
        self._connections: list[socket.socket] = []

    def connect(self, address: str, port: int, streams: int) -> Answer:
        while len(self._connections) < streams:
            self._connections.append(socket.create_connection((address, port), _DEADLINE_S))
        return {}

    def receive(self, nbytes: int, streams: int) -> Answer:
        """Receive nbytes over so many streams; returns get_s."""
        share = nbytes // streams
        begun = time.monotonic()
        threads = [
            threading.Thread(target=_receive, args=(connection, share))
            for connection in self._connections[:streams]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"get_s": time.monotonic() - begun}


def _receive(connection: socket.socket, nbytes: int) -> None:
    buffer = bytearray(_PIECE)
    connection.sendall(nbytes.to_bytes(8, "little"))
    while nbytes > 0:
        count = connection.recv_into(buffer, min(nbytes, _PIECE))
        if count == 0:
            raise ConnectionError(f"the sender left with {nbytes} bytes to come")
        nbytes -= count


def main() -> None:
    """Serve until the end of the input."""
    if sys.argv[1] == "send":
        serve({"ready": Sender(sys.argv[2]).ready})
    else:
        receiver = Receiver()
        serve({"connect": receiver.connect, "receive": receiver.receive})


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
