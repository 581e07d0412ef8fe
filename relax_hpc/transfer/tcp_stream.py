"""One read over TCP: its connections, and the streams that share it.

Links keeps connections that proved the run's key. Attempts does an exchange over one of them, and
over a new one when it breaks, until the read's deadline. A Stream fetches its share of a ReadPlan
into the read's buffer so; `run_together` runs several and follows what has come without a gap.
"""

import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from relax_hpc.errors import DeadlineError
from relax_hpc.log import kv
from relax_hpc.transfer.frames import (
    MAX_REPLY_BYTES,
    Channel,
    FrameError,
    PeerClosedError,
    Reply,
    Request,
    Trailer,
    WrongKeyError,
    greet,
)
from relax_hpc.transfer.read_plan import Interval, ReadPlan
from relax_hpc.transfer.wire import DataAccess

logger = logging.getLogger(__name__)

Access = Callable[[str, float, bool], DataAccess]
"""(node, deadline, refresh) -> where its data server is; refresh: what was known did not work."""
Address = tuple[str, int]
Advance = Callable[[int], None]
"""Told that all bytes of the buffer before this one have come (of one stream: its own)."""
Answer = tuple[Reply, list[int]]
"""The reply, and the blocks that are stale now."""

Item = TypeVar("Item")

_CHUNK_BYTES = 512 << 10
"""One recv: short enough that its checksum finds it in the cache."""
_TICK_S = 0.1
"""How late a deadline may be seen."""
_STALL_S = 10.0
"""Without a byte for so long, a connection is given up and made anew."""
_CONNECT_S = 5.0
_REFRESH_S = 5.0
_MAX_PAUSE_S = 0.5
_TIMEVAL = struct.Struct("@ll")


class Cancelled(Exception):
    """Another stream of the same read failed."""


class Refused(Exception):
    """The server has not all that was asked for; nothing was sent."""


class Wait:
    """What bounds the waiting of one read; shared by its streams."""

    def __init__(self, node: str, what: str, nbytes: int, deadline: float) -> None:
        self.node, self.what, self.nbytes = node, what, nbytes
        self.deadline, self.started = deadline, time.monotonic()
        self.cancelled = threading.Event()
        self.num_received = 0  # added to by several threads: only for messages

    def check(self, address: object, note: object) -> None:
        """Raise if the read is over."""
        if self.cancelled.is_set():
            raise Cancelled
        now = time.monotonic()
        if now >= self.deadline:
            raise DeadlineError(
                f"{self.what}: not read within {now - self.started:.1f} s: {self.num_received} of "
                f"{self.nbytes} bytes came from {address}; last: {note}; is the dcs task of "
                f"node {self.node} stopped or the network cut? See its log"
            )


class Read(Wait):
    """A read of ranges into one buffer."""

    def __init__(
        self, node: str, what: str, plan: ReadPlan, buffer: memoryview, deadline: float
    ) -> None:
        super().__init__(node, what, plan.nbytes, deadline)
        self.plan, self.buffer = plan, buffer


class Links:
    """Connections of one process to data servers. Thread-safe."""

    def __init__(self, key: bytes, access: Access, max_idle: int) -> None:
        self._key, self._access, self._max_idle = key, access, max_idle
        self._lock = threading.Lock()
        self._idle: dict[Address, list[Link]] = {}

    def address(self, node: str, deadline: float, *, refresh: bool) -> Address:
        """Return where a node's server is."""
        access = self._access(node, deadline, refresh)
        return access.host, access.port

    def take(self, address: Address, wait: Wait) -> "Link":
        """Return a connection: an idle one that is alive, or a new one."""
        while True:
            with self._lock:
                idle = self._idle.get(address)
                link = idle.pop() if idle else None
            if link is None:
                return Link.open(address, self._key, wait)
            if link.is_alive():
                link.wait = wait
                return link
            link.close()

    def keep(self, address: Address, link: "Link") -> None:
        """Take a connection back whose last answer was read to its end."""
        link.wait = None
        with self._lock:
            idle = self._idle.setdefault(address, [])
            if len(idle) < self._max_idle:
                idle.append(link)
                return
        link.close()

    def forget(self, address: Address) -> None:
        """Close the idle connections of an address that does not answer."""
        with self._lock:
            idle = self._idle.pop(address, [])
        for link in idle:
            link.close()

    def close(self) -> None:
        """Close all idle ones; those in use are closed when they come back to nobody."""
        with self._lock:
            links = [link for idle in self._idle.values() for link in idle]
            self._idle.clear()
            self._max_idle = 0
        for link in links:
            link.close()


class Link:
    """A connection that has proved the key. Used by one thread at a time."""

    def __init__(self, sock: socket.socket, address: Address, wait: Wait) -> None:
        self._socket, self._address = sock, address
        self.wait: Wait | None = wait
        self.channel: Channel

    @classmethod
    def open(cls, address: Address, key: bytes, wait: Wait) -> "Link":
        """Connect and do the handshake."""
        left_s = max(wait.deadline - time.monotonic(), 0.001)
        sock = socket.create_connection(address, min(left_s, _CONNECT_S))
        try:
            sock.setblocking(True)
            # The kernel wakes us to look at the deadline: no poll(2) before each recv(2).
            tick = _TIMEVAL.pack(0, int(1e6 * _TICK_S))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(_STALL_S), 0))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = cls(sock, address, wait)
            link.channel = greet(sock, link.receive, key)
        except BaseException:
            sock.close()
            raise
        return link

    def is_alive(self) -> bool:
        """False if the server has closed it, or says something unasked."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def receive(self, nbytes: int, what: str) -> bytes:
        """Receive exactly nbytes of a message."""
        data = bytearray(nbytes)
        view, seen = memoryview(data), 0
        while seen < nbytes:
            seen += self.receive_some(view[seen:], what)
        return bytes(data)

    def receive_some(self, view: memoryview, what: str) -> int:
        """Receive at least one byte.

        Raises:
            OSError: the connection ended, or stood still too long.
            DeadlineError: of the read.
        """
        assert self.wait is not None
        self.wait.check(_text(self._address), f"receiving {what}")
        since = 0.0
        while True:
            try:
                count = self._socket.recv_into(view)
            except BlockingIOError:
                now = time.monotonic()
                since = since or now - _TICK_S
                note = f"no byte of {what} for {now - since:.1f} s"
                self.wait.check(_text(self._address), note)
                if now - since > _STALL_S:
                    raise TimeoutError(note) from None
                continue
            if count == 0:
                raise PeerClosedError(what, 0)
            return count

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


class Attempts:
    """Exchanges over one connection, and over a new one when that breaks, until the wait is over.

    Used by one thread.
    """

    def __init__(self, links: Links, wait: Wait) -> None:
        self._links, self._wait = links, wait
        self._address: Address | None = None
        self._note: object = "no address yet"

    def run(self, exchange: Callable[[Link], Item], first: Callable[[], int]) -> Item:
        """Do one exchange; `first` says how far it came: progress means a fresh start.

        Raises:
            Refused: by `exchange`; the connection is good.
            DeadlineError: of the wait.
            WrongKeyError: whoever listens at the published address is not of this run.
        """
        failures, reached = 0, first()
        while True:
            try:
                return self._attempt(failures > 0, exchange)
            except WrongKeyError as err:
                if failures > 0:
                    raise
                self._note = err
            except (OSError, FrameError) as err:
                self._note = err
            failures = failures + 1 if first() == reached else 1
            reached = first()
            if self._address is not None:
                self._links.forget(self._address)
            logger.info("read goes on %s", kv(what=self._wait.what, after=self._note))
            self._pause(failures)

    def _pause(self, failures: int) -> None:
        """Wait a moment longer each time: a restarted agent takes some."""
        left_s = max(self._wait.deadline - time.monotonic(), 0.0)
        self._wait.cancelled.wait(min(0.01 * 2 ** min(failures, 6), _MAX_PAUSE_S, left_s))
        self._wait.check(_text(self._address), self._note)

    def _attempt(self, is_retry: bool, exchange: Callable[[Link], Item]) -> Item:
        self._find(is_retry)
        assert self._address is not None
        self._wait.check(_text(self._address), self._note)  # it may have taken a while
        link = self._links.take(self._address, self._wait)
        try:
            answer = exchange(link)
        except Refused:
            self._links.keep(self._address, link)
            raise
        except BaseException:
            link.close()
            raise
        self._links.keep(self._address, link)
        return answer

    def _find(self, is_retry: bool) -> None:
        """Look the address up; the control plane may be cut off too, then the old one must do."""
        has_old = is_retry and self._address is not None
        while True:
            deadline = min(self._wait.deadline, time.monotonic() + _REFRESH_S)
            try:
                self._address = self._links.address(self._wait.node, deadline, refresh=is_retry)
            except DeadlineError as err:
                self._note = err
                self._wait.check(_text(self._address), err)  # also whether it was cancelled
                if not has_old:
                    continue
            return


class Stream:
    """The share of one connection in a read."""

    def __init__(
        self, links: Links, read: Read, intervals: Sequence[Interval], blocks: list[int]
    ) -> None:
        self._read, self._blocks = read, blocks
        self._left = list(intervals)
        self._checks = read.plan.checks(blocks)
        self._attempts = Attempts(links, read)

    def run(self, advance: Advance) -> Answer:
        """Receive all; `advance(end)` follows in the buffer. Returns the blocks that are stale now.

        Raises:
            Refused: a block or file is not there; nothing was received.
            DeadlineError, WrongKeyError: see `Attempts.run`.
        """
        return self._attempts.run(lambda link: self._exchange(link, advance), lambda: self.first)

    @property
    def first(self) -> int:
        """Place in the buffer of the first byte that it has not received yet."""
        return self._left[0][0] if self._left else self._read.plan.nbytes

    def _exchange(self, link: Link, advance: Advance) -> Answer:
        plan = self._read.plan
        ranges = plan.ranges(self._left)
        link.channel.send(Request(plan.files, ranges, self._checks))
        reply = link.channel.receive(Reply, MAX_REPLY_BYTES)
        if not ranges:
            return reply, [self._blocks[i] for i in reply.stale]
        if not reply.is_good:
            raise Refused
        while self._left:
            self._receive_interval(link, advance)
        trailer = link.channel.receive(Trailer, MAX_REPLY_BYTES)
        return reply, [self._blocks[i] for i in trailer.stale]

    def _receive_interval(self, link: Link, advance: Advance) -> None:
        buffer = self._read.buffer
        start, end = self._left[0]
        while start < end:
            count = link.receive_some(buffer[start : min(start + _CHUNK_BYTES, end)], "payload")
            start += count
            self._read.num_received += count
            self._left[0] = (start, end)
            if start < end:
                advance(start)
        del self._left[0]
        advance(self.first)


def run_together(read: Read, streams: Sequence[Stream], advance: Advance) -> list[Answer]:
    """Run each stream in a thread; call `advance` here, up to what has come without a gap.

    Raises:
        What the first stream that failed raised; by then all have ended.
    """
    team = _Team(read, streams)
    threads = [
        threading.Thread(target=team.work, args=(k,), name="data-stream", daemon=True)
        for k in range(len(streams))
    ]
    for thread in threads:
        thread.start()
    try:
        is_over = False
        while not is_over:
            upto, is_over = team.wait()
            advance(upto)
    finally:
        read.cancelled.set()
        for thread in threads:
            thread.join()  # they look at the flag with every piece and every tick
    if team.errors:
        raise next((e for e in team.errors if not isinstance(e, Cancelled)), team.errors[0])
    return team.answers


class _Team:
    """What the threads of one read tell each other."""

    def __init__(self, read: Read, streams: Sequence[Stream]) -> None:
        self._read, self._streams = read, streams
        self._changed = threading.Condition()
        self._reached = [stream.first for stream in streams]
        self._upto = 0
        self.answers: list[Answer] = []
        self.errors: list[BaseException] = []

    @property
    def _is_over(self) -> bool:
        return len(self.answers) + len(self.errors) == len(self._streams)

    def work(self, k: int) -> None:
        """Run one stream to its end (in its thread)."""
        try:
            answer = self._streams[k].run(lambda end: self._mark(k, end))
        except BaseException as err:  # noqa: BLE001 - raised again by run_together
            self._read.cancelled.set()
            self._end(self.errors, err)
        else:
            self._end(self.answers, answer)

    def wait(self) -> tuple[int, bool]:
        """Wait for more bytes without a gap, or for the end; returns up to where, whether over."""
        with self._changed:
            self._changed.wait_for(lambda: min(self._reached) > self._upto or self._is_over)
            self._upto = min(self._reached)
            return self._upto, self._is_over

    def _mark(self, k: int, end: int) -> None:
        with self._changed:
            self._reached[k] = end
            self._changed.notify()

    def _end(self, kind: list[Item], item: Item) -> None:
        with self._changed:
            kind.append(item)
            self._changed.notify()


def _text(address: Address | None) -> str:
    return "no address" if address is None else f"{address[0]}:{address[1]}"
