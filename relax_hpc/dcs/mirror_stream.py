"""The receiving side of weights across clusters: connections that break and are made anew.

    Download.run     streams threads share the chunks that are missing
      stream         connect, handshake, ask for up to `window` chunks ahead, receive, check, spool;
                     whatever breaks: what was not received goes back to the others, connect again
    all of them      end when the source has the version no more, or no chunk came for patience_s

Sizes are checked before memory is allocated for them.
"""

import collections
import hashlib
import logging
import socket
import threading
import time
from collections.abc import Sequence

import xxhash

from relax_hpc.dcs.mirror_chunks import Segment, max_encoded_bytes
from relax_hpc.dcs.mirror_spool import Spool
from relax_hpc.dcs.mirror_wire import (
    MAX_CHUNK_HEAD_BYTES,
    MAX_OFFER_BYTES,
    Ask,
    Chunk,
    Offer,
    Open,
    Wanted,
)
from relax_hpc.dcs.store import VersionId
from relax_hpc.errors import DeadlineError
from relax_hpc.log import kv
from relax_hpc.transfer.frames import Channel, FrameError, PeerClosedError, WrongKeyError, greet

_log = logging.getLogger(__name__)

Address = tuple[str, int]

_CONNECT_S = 5.0
_STALL_S = 10.0
"""Without a byte for so long, a connection is given up and made anew."""
_TICK_S = 0.2
"""How late the end of a wait may be seen."""
_MAX_PAUSE_S = 2.0
WINDOW = 8
"""Chunks that a stream asks for ahead: at 20 ms a round trip, 8 of 50 kB fill 160 Mbit/s."""


class Cancelled(Exception):
    """Another stream of the same download failed."""


class Gone(Exception):
    """The source has the version, or its base, no more."""


class Patience:
    """What is waited for, since when nothing came, and how long that may last. Thread-safe."""

    def __init__(self, address: Address, what: str, patience_s: float) -> None:
        self.address, self.what, self._patience_s = address, what, patience_s
        self.cancelled = threading.Event()
        self._lock = threading.Lock()
        self._since = time.monotonic()
        self.num_bytes = 0
        """Received and verified."""
        self.num_raw_bytes = 0
        """Received, also what was lost with a connection."""
        self.resumed_bytes = 0
        """There before."""
        self.total = ""

    def came(self, nbytes: int) -> None:
        """Something came: the patience begins anew."""
        with self._lock:
            self._since = time.monotonic()
            self.num_bytes += nbytes

    def came_raw(self, nbytes: int) -> None:
        """Bytes came that are not verified yet."""
        with self._lock:
            self.num_raw_bytes += nbytes

    def left_s(self) -> float:
        """Seconds until `check` raises."""
        with self._lock:
            return max(self._since + self._patience_s - time.monotonic(), 0.0)

    def check(self, note: object) -> None:
        """Raise if the wait is over.

        Raises:
            Cancelled: another stream has failed.
            DeadlineError: nothing came for too long.
        """
        if self.cancelled.is_set():
            raise Cancelled
        if self.left_s() == 0.0:
            host, port = self.address
            here = self.resumed_bytes + self.num_bytes
            raise DeadlineError(
                f"{self.what} from the mirror source {host}:{port}: nothing came for "
                f"{self._patience_s:g} s; {here} bytes are here{self.total}; last: {note}. Is the "
                "source down, or the link cut? What came is kept, a new start goes on there"
            )

    def pause(self, failures: int, note: object) -> None:
        """Wait a moment, longer each time."""
        self.cancelled.wait(min(0.05 * 2 ** min(failures, 6), _MAX_PAUSE_S, self.left_s()))
        self.check(note)


class Link:
    """A connection to the source that has proved the key. Used by one thread at a time."""

    def __init__(self, sock: socket.socket, patience: Patience) -> None:
        self._socket = sock
        self.patience = patience
        self.stall_s = _STALL_S
        self.channel: Channel

    @classmethod
    def open(cls, key: bytes, patience: Patience) -> "Link":
        """Connect and do the handshake."""
        left_s = max(patience.left_s(), 0.001)
        sock = socket.create_connection(patience.address, min(left_s, _CONNECT_S))
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = cls(sock, patience)
            link.channel = greet(sock, link.receive, key)
        except BaseException:
            sock.close()
            raise
        return link

    def receive(self, nbytes: int, what: str) -> bytes:
        """Receive exactly nbytes of a message."""
        data = bytearray(nbytes)
        self.receive_into(memoryview(data), what)
        return bytes(data)

    def receive_into(self, view: memoryview, what: str) -> int:
        """Fill the view; returns its length.

        Raises:
            OSError: the connection ended, or stood still too long.
            Cancelled, DeadlineError: see Patience.
        """
        seen, since = 0, time.monotonic()
        self._socket.settimeout(_TICK_S)
        while seen < len(view):
            # Also while bytes come: they may be too few for a chunk, and no end of them.
            self.patience.check(f"{seen} of {len(view)} bytes of {what}")
            try:
                count = self._socket.recv_into(view[seen:])
            except TimeoutError:
                stood_s = time.monotonic() - since
                note = f"no byte of {what} for {stood_s:.1f} s"
                self.patience.check(note)
                if stood_s > self.stall_s:
                    raise TimeoutError(note) from None
                continue
            if count == 0:
                raise PeerClosedError(what, seen)
            seen, since = seen + count, time.monotonic()
        return seen

    def ask(self, ask: Ask) -> None:
        """Send a request: it is small, and waits for room no longer than a stalled read."""
        self._socket.settimeout(_STALL_S)
        self.channel.send(ask)

    def open_version(self, request: Open) -> Offer:
        """Ask for a version; the source answers within request.wait_s and a moment."""
        self.stall_s = _STALL_S + request.wait_s
        self.ask(Ask(open=request))
        return self.channel.receive(Offer, MAX_OFFER_BYTES)

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


class Download:
    """Fetches the chunks of one offer that the spool does not have.

    Args:
        key: the mirrors' key.
        patience: of this download.
        spool: of the offer.
        chunks: all of the version.
        offer: version and base to ask for.
        streams: connections.
    """

    def __init__(
        self,
        key: bytes,
        patience: Patience,
        spool: Spool,
        chunks: Sequence[Sequence[Segment]],
        offer: tuple[VersionId, VersionId | None],
        streams: int,
    ) -> None:
        self._key, self._patience, self._spool, self._chunks = key, patience, spool, chunks
        self._version, self._base = offer
        self._num_streams = streams
        self._changed = threading.Condition()
        self._todo = collections.deque(spool.missing())
        self._num_left = len(self._todo)
        self._errors: list[BaseException] = []
        self.num_breaks = 0

    def run(self) -> None:
        """Fetch them all; by then every stream has ended.

        Raises:
            Gone: open again.
            DeadlineError: nothing came for too long; names host, version and bytes.
            WrongKeyError: whoever answers there does not know the key.
            WeightSyncError: the spool cannot be written.
        """
        count = min(self._num_streams, self._num_left)
        threads = [
            threading.Thread(target=self._work, name="mirror-stream", daemon=True)
            for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()  # each looks at its patience with every tick
        if self._errors:
            raise next((e for e in self._errors if not isinstance(e, Cancelled)), self._errors[0])

    def _work(self) -> None:
        try:
            self._fetch_until_all_are_here()
        except BaseException as err:  # noqa: BLE001 - raised again by run
            self._patience.cancelled.set()
            with self._changed:
                self._errors.append(err)
                self._changed.notify_all()

    def _fetch_until_all_are_here(self) -> None:
        failures, wrong_keys = 0, 0
        while not self._is_done():
            before, note = self._num_left, ""
            try:
                self._fetch_by_one_link()
            except WrongKeyError as err:
                wrong_keys += 1
                if wrong_keys == 3:  # once may be a byte that was hurt on the way
                    raise
                note = str(err)
            except (OSError, FrameError) as err:
                note = str(err)
            else:
                continue
            failures = failures + 1 if self._num_left == before else 1
            with self._changed:
                self.num_breaks += 1
            _log.info("mirror stream goes on %s", kv(what=self._patience.what, after=note))
            self._patience.pause(failures, note)

    def _fetch_by_one_link(self) -> None:
        link = Link.open(self._key, self._patience)
        asked: collections.deque[int] = collections.deque()
        try:
            while True:
                while len(asked) < WINDOW:
                    number = self._take(is_waiting=not asked)
                    if number is None:
                        break
                    asked.append(number)
                    link.ask(Ask(chunk=Wanted(number, self._version, self._base)))
                if not asked:
                    return
                self._receive(link, asked[0])
                asked.popleft()
        finally:
            link.close()
            self._give_back(asked)

    def _receive(self, link: Link, number: int) -> None:
        head = link.channel.receive(Chunk, MAX_CHUNK_HEAD_BYTES)
        if head.number != number:
            raise FrameError("bad_reply", f"chunk {head.number} came, {number} was asked for")
        if head.nbytes == -1:
            raise Gone
        most = max_encoded_bytes(self._chunks[number])
        if not 0 <= head.nbytes <= most:
            raise FrameError("oversized", f"chunk {number} of {head.nbytes} bytes: at most {most}")
        data = bytearray(head.nbytes)
        view = memoryview(data)
        for start in range(0, len(view), 1 << 16):
            part = view[start : start + (1 << 16)]
            self._patience.came_raw(link.receive_into(part, f"chunk {number}"))
        is_good = hashlib.sha256(data).digest() == head.sha256
        if not is_good or xxhash.xxh3_64_intdigest(data) != head.checksum:
            raise FrameError("bad_payload", f"chunk {number} was changed on the way")
        self._spool.add(number, head.checksum, data)
        self._patience.came(head.nbytes)
        with self._changed:
            self._num_left -= 1
            self._changed.notify_all()

    def _is_done(self) -> bool:
        with self._changed:
            return self._num_left == 0

    def _take(self, *, is_waiting: bool) -> int | None:
        """Take a chunk; None: all are here, or (not waiting) others have asked for the rest."""
        with self._changed:
            while is_waiting and not self._todo and self._num_left:
                self._patience.check("other streams receive the last chunks")
                self._changed.wait(_TICK_S)
            return self._todo.popleft() if self._todo else None

    def _give_back(self, asked: collections.deque[int]) -> None:
        with self._changed:
            self._todo.extendleft(reversed(asked))
            self._changed.notify_all()
