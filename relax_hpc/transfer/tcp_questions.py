"""Questions to a service of another node's data server: many answers, over several connections.

    caller: Questions(links, node, ...).ask_all(place)
      stream 0 .. n-1    each: next question -> Ask, Told, payload into its buffer -> xxh3 compared
                         -> place(number, payload) -> the deadline moves

An answer that was hurt on the way, or whose connection broke, is asked for again, until nothing
whole has come for `stall_s`. What a service refuses ends everything at once.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

import xxhash

from relax_hpc.errors import TransferError
from relax_hpc.transfer.frames import MAX_REPLY_BYTES, Ask, FrameError, Told
from relax_hpc.transfer.tcp_stream import Attempts, Cancelled, Link, Links, Refused, Wait

Place = Callable[[int, memoryview], None]
"""(number of the question, its payload): called by several threads, once for each question. The
payload is valid during the call only."""

_CHUNK_BYTES = 1 << 20


class RefusedError(TransferError):
    """A service said that it cannot answer, and why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """What one answer takes."""

    service: str
    nbytes: int
    """Of the payload that must come."""
    body: Callable[[], bytes]
    """Makes the body when its turn has come."""


class Questions(Wait):
    """All questions to one node; share `cancelled` to end those to several nodes together.

    Args:
        links: connections.
        node: who is asked.
        what: for messages: whose bytes these are.
        questions: in the order in which they are asked.
        stall_s: longest time without one more whole answer.
        cancelled: set by anybody to end it.
    """

    def __init__(
        self,
        links: Links,
        node: str,
        what: str,
        questions: Sequence[Question],
        *,
        stall_s: float,
        cancelled: threading.Event,
    ) -> None:
        nbytes = sum(question.nbytes for question in questions)
        super().__init__(node, what, nbytes, time.monotonic() + stall_s)
        self.cancelled = cancelled
        self.payload_bytes = 0
        """That came, also those that were hurt."""
        self._links, self._questions, self._stall_s = links, questions, stall_s
        self._lock = threading.Lock()
        self._next = 0
        self._errors: list[BaseException] = []

    def ask_all(self, place: Place, streams: int) -> None:
        """Ask everything; returns when all payload was placed.

        Raises:
            RefusedError: the service cannot answer.
            DeadlineError: no whole answer for `stall_s`; says how many bytes had come.
            WrongKeyError: whoever listens there is not of this run.
            Cancelled: somebody set `cancelled`.
        """
        count = max(1, min(streams, len(self._questions)))
        threads = [
            threading.Thread(target=self._work, args=(place,), name="data-questions", daemon=True)
            for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()  # each looks at its deadline and at `cancelled` every tick
        if self._errors:
            real = (err for err in self._errors if not isinstance(err, Cancelled))
            raise next(real, self._errors[0])

    def _work(self, place: Place) -> None:
        attempts = Attempts(self._links, self)
        buffer = memoryview(bytearray(max((q.nbytes for q in self._questions), default=0)))
        try:
            while (number := self._take()) is not None:
                question = self._questions[number]
                payload = buffer[: question.nbytes]
                ask = Ask(question.service, question.body())
                attempts.run(lambda link: self._exchange(link, ask, payload), lambda: 0)  # noqa: B023
                place(number, payload)
                self._advance(question.nbytes)
        except Refused as err:
            self._fail(RefusedError(f"{self.what}: {err}"))
        except BaseException as err:  # noqa: BLE001 - raised again by ask_all
            self._fail(err)

    def _take(self) -> int | None:
        with self._lock:
            self._next += 1
            return self._next - 1 if self._next <= len(self._questions) else None

    def _advance(self, nbytes: int) -> None:
        with self._lock:
            self.num_received += nbytes
            self.started = time.monotonic()
            self.deadline = self.started + self._stall_s

    def _fail(self, err: BaseException) -> None:
        self._errors.append(err)
        self.cancelled.set()

    def _exchange(self, link: Link, ask: Ask, payload: memoryview) -> None:
        link.channel.send(ask)
        told = link.channel.receive(Told, MAX_REPLY_BYTES)
        if told.refusal:
            raise Refused(told.refusal)
        if told.nbytes != payload.nbytes:
            raise FrameError(
                "bad_reply", f"{told.nbytes} bytes were sent, {payload.nbytes} were asked for"
            )
        start = 0
        while start < payload.nbytes:
            start += link.receive_some(payload[start : start + _CHUNK_BYTES], "payload")
        with self._lock:
            self.payload_bytes += payload.nbytes
        seen = xxhash.xxh3_64_intdigest(payload)
        if seen != told.checksum:
            raise FrameError(
                "hurt",
                f"{payload.nbytes} bytes were hurt on the way: checksum {seen:016x}, sent with "
                f"{told.checksum:016x}",
            )
