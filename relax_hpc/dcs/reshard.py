"""A plan carried out between ranks: trainer shards to engine shards, nothing gathered.

    train step        ShardSender                      ShardReceiver            engine
    snapshot(v) ---> waits for a free buffer (credit)
                     copies parameters into it
    optimizer <----- returns: that was the stall
                     thread: checksum, header, bytes -> receive(v): headers,
                     the buffer is free again            bytes, checksums
                                                         all right: copies ---> tensors of v

consumes: the sender this rank's parameters, the receiver one message stream per trainer rank.
waits for: `snapshot` a buffer whose sends are done; the thread every receiver; `receive` every
sender. Unblocked by: the other end, its death (the connection breaks), or the deadline: no wait
goes on for longer than `deadline_s` without progress.
After any failure the group is broken for good and closed, so that the other ranks notice, too; all
ranks make a new WeightGroup under another name and call `rebuild`.
"""

import collections
import threading
import typing
from collections.abc import Iterable, Mapping, Sequence

import torch

from relax_hpc.dcs.layout import Box
from relax_hpc.dcs.packing import Bundle, incoming, outgoing, plan_digest
from relax_hpc.dcs.plan import Plan
from relax_hpc.dcs.staging import Binding, Held, Staging, checksum
from relax_hpc.dcs.weight_group import (
    DEADLINE_S,
    Message,
    Pending,
    WeightGroup,
    new_event,
    side_stream,
    wait_for_event,
)
from relax_hpc.errors import WeightSyncError

_MAGIC = 0x52454C58  # no other traffic begins like this
_CHUNK_BYTES = 2**26  # progress is counted in these


class Header(typing.NamedTuple):
    """What a receiver checks before and after the bytes: int64 words."""

    magic: int
    version: int
    digest: int
    """Of the plan: the upper 63 bits."""
    nbytes: int
    checksum: int


class ShardSender:
    """Sends a trainer rank's part of each version. One caller's thread."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        group: WeightGroup,
        held: Iterable[Held],
        *,
        num_buffers: int = 2,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Allocate buffers and check with all ranks that the plan is the same.

        Args:
            plan: The same on all ranks.
            rank: Trainer rank of this process.
            group: Of all ranks, trainer first.
            held: Boxes of this rank and the live views of its parameters, which stay where they
                are; copies of other ranks' boxes (tied output layer, replicas) belong to them.
            num_buffers: Versions that may be on their way at once.
            deadline_s: Longest wait without progress.

        Raises:
            WeightSyncError: another rank has another plan, or `held` lacks a box.
        """
        self.plan, self.rank, self.deadline_s = plan, rank, deadline_s
        self.sent_bytes = 0
        """Payload of all versions, as handed to the network."""
        self._held = list(held)
        self._num_buffers = num_buffers
        self._bundles = outgoing(plan, rank)
        self._changed = threading.Condition()
        self._start(group)

    @property
    def is_broken(self) -> bool:
        """True after a failure: nothing can be sent until `rebuild`."""
        return self._failure is not None or self._group.is_broken

    def snapshot(self, version: int) -> None:
        """Copy the parameters and return; they are sent while the caller goes on.

        On a GPU the copy is queued on the current stream: later writes there come after it.

        Raises:
            WeightSyncError: an earlier version could not be sent, or no buffer became free.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._free, self.deadline_s)
            self._raise_failure()
            if not self._free:
                raise WeightSyncError(
                    f"weights version {version}: trainer rank {self.rank} waited "
                    f"{self.deadline_s:g} s for a free buffer; {self._flow} is still being sent"
                )
            buffer = self._free.popleft()
        buffer.fill(version)
        with self._changed:
            self._queue.append(buffer)
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all snapshots are sent; WeightSyncError if one could not be."""
        with self._changed:
            while not self._failure and len(self._free) < self._num_buffers:
                before = self.sent_bytes, len(self._free)
                is_moving = self._changed.wait(self.deadline_s + 5.0)  # the thread's own first
                if not is_moving and before == (self.sent_bytes, len(self._free)):
                    break
            self._raise_failure()
            if len(self._free) < self._num_buffers:
                raise WeightSyncError(f"trainer rank {self.rank}: {self._flow} does not end")

    def send(self, version: int) -> None:
        """Snapshot and wait until all receivers have it."""
        self.snapshot(version)
        self.drain()

    def rebuild(self, group: WeightGroup) -> None:
        """Go on with a new group of the same plan. Versions that were on their way are dropped."""
        self.close()
        self._start(group)

    def close(self) -> None:
        """End the thread; the group is closed if it still had something to send."""
        with self._changed:
            is_idle = len(self._free) == self._num_buffers
            self._is_closing = True
            self._changed.notify_all()
        if not is_idle:
            self._group.abort()
        self._thread.join(self.deadline_s)

    def _start(self, group: WeightGroup) -> None:
        self._digest = _check_group(self.plan, group, self.rank)
        self._group = group
        self._failure: WeightSyncError | None = None
        self._is_closing = False
        self._flow = _Flow("nothing", 0, self.deadline_s)
        # New buffers, also after a failure: whatever still reads the old ones keeps those alive.
        self._free: collections.deque[_Buffer] = collections.deque(
            _Buffer(self._bundles, self._held, group.device, self.rank)
            for _ in range(self._num_buffers)
        )
        self._queue: collections.deque[_Buffer] = collections.deque()
        self._thread = threading.Thread(target=self._run, name="weight-sender", daemon=True)
        self._thread.start()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise WeightSyncError(str(self._failure)) from self._failure

    def _run(self) -> None:
        with side_stream(self._group.device):
            while (buffer := self._next()) is not None:
                try:
                    self._transmit(buffer)
                except (WeightSyncError, RuntimeError, TimeoutError) as err:
                    self._fail(err)
                    return
                with self._changed:
                    self._free.append(buffer)
                    self._changed.notify_all()

    def _next(self) -> "_Buffer | None":
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            return self._queue.popleft() if self._queue and not self._is_closing else None

    def _fail(self, err: Exception) -> None:
        self._group.abort()
        with self._changed:
            text = str(err) if isinstance(err, WeightSyncError) else f"{self._flow}: {err}"
            self._failure = WeightSyncError(text)
            self._failure.__cause__ = err
            self._changed.notify_all()

    def _transmit(self, buffer: "_Buffer") -> None:
        """Post everything to everybody, then wait: one dead receiver does not hold up the rest."""
        version, first = buffer.version, self.plan.num_sources
        flow = self._flow = _Flow(f"trainer rank {self.rank} to engine", version, self.deadline_s)
        buffer.wait(self.deadline_s)
        heads, bodies = [], []
        for bundle, data in zip(self._bundles, buffer.staging.data, strict=True):
            header = Header(_MAGIC, version, self._digest, bundle.nbytes, checksum(data))
            words = torch.tensor(header, dtype=torch.int64).to(self._group.device)
            for peer in bundle.peers:
                flow.expect(peer, bundle.nbytes)
                heads.append((peer, words))
                bodies += [(peer, chunk) for chunk in _chunks(data)]
        peers = [peer for peer, _ in heads + bodies]
        pending = self._group.send([Message(first + peer, data) for peer, data in heads])
        pending += self._group.send([Message(first + peer, data) for peer, data in bodies])
        sizes = [0] * len(heads) + [data.numel() for _, data in bodies]
        flow.wait_all(list(zip(peers, pending, sizes, strict=True)), self._count)
        flow.check()

    def _count(self, nbytes: int) -> None:
        with self._changed:
            self.sent_bytes += nbytes
            self._changed.notify_all()


class ShardReceiver:
    """Receives an engine rank's tensors. Not thread-safe."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        group: WeightGroup,
        *,
        into: Mapping[Box, torch.Tensor] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Allocate a buffer and check with all ranks that the plan is the same.

        Args:
            plan: The same on all ranks.
            rank: Engine rank of this process.
            group: Of all ranks, trainer first.
            into: The engine's own tensors (any strides) of all boxes of this rank; None: new ones.
            deadline_s: Longest wait without progress.

        Raises:
            WeightSyncError: another rank has another plan, the plan gives this rank nothing or not
                all, or `into` lacks a box.
        """
        self.plan, self.rank, self.deadline_s = plan, rank, deadline_s
        self.version: int | None = None
        """Of what the tensors hold; None before the first."""
        self._fetched: int | None = None
        self._bundles = incoming(plan, rank)
        total = sum(bundle.nbytes for bundle in self._bundles)
        if total != (needed := int(plan.engine.rank_bytes[rank])) or not total:
            raise WeightSyncError(
                f"weight plan gives engine rank {rank} {total} bytes, it needs {needed} and more "
                "than none"
            )
        self._tensors = dict(into) if into is not None else _new_tensors(plan, rank, group.device)
        self._start(group)

    @property
    def is_broken(self) -> bool:
        """True after a failure: nothing can be received until `rebuild`."""
        return self._group.is_broken

    def receive(self, version: int, *, begin_s: float | None = None) -> Mapping[Box, torch.Tensor]:
        """Receive one version: `fetch`, then `apply`. Call it when the version is on its way."""
        self.fetch(version, begin_s=begin_s)
        return self.apply()

    def fetch(self, version: int, *, begin_s: float | None = None) -> None:
        """Receive and verify one version, beside the tensors of the last one.

        Args:
            version: Expected; another one is an error.
            begin_s: Longest wait for the senders to begin; None: the deadline.

        Raises:
            WeightSyncError: a sender is gone or silent, or sent another version, another plan or
                damaged bytes. The tensors are untouched, the group is broken.
        """
        self._fetched = None
        flow = _Flow(f"engine rank {self.rank} from trainer", version, self.deadline_s)
        try:
            with side_stream(self._group.device):
                headers = self._headers(flow, self.deadline_s if begin_s is None else begin_s)
                self._bodies(flow, headers)
        except (WeightSyncError, RuntimeError) as err:
            self._group.abort()
            text = str(err) if isinstance(err, WeightSyncError) else f"{flow}: {err}"
            raise WeightSyncError(text) from err
        self._fetched = version

    def apply(self) -> Mapping[Box, torch.Tensor]:
        """Make the fetched version visible in the tensors; on a GPU on the current stream.

        An engine of several ranks calls it on each when `fetch` came through on all of them.

        Returns:
            The tensor of every box of this rank, the same objects each time.
        """
        if self._fetched is None:
            raise WeightSyncError(f"engine rank {self.rank}: no verified version to apply")
        self._binding.empty()
        self.version, self._fetched = self._fetched, None
        return self._tensors

    def rebuild(self, group: WeightGroup) -> None:
        """Go on with a new group of the same plan; the tensors keep the last whole version."""
        self._group.abort()
        self._start(group)

    def close(self) -> None:
        """Leave the group."""
        self._group.abort()

    def _start(self, group: WeightGroup) -> None:
        self._digest = _check_group(self.plan, group, self.plan.num_sources + self.rank)
        self._group = group
        self._fetched = None
        device = next(iter(self._tensors.values())).device
        is_pinned = device.type != group.device.type
        self._staging = Staging(self._bundles, group.device, is_pinned=is_pinned)
        where = f"engine rank {self.rank}"
        self._binding = self._staging.binding(self._tensors.items(), where)

    def _headers(self, flow: "_Flow", begin_s: float) -> list[Header]:
        num_words = len(Header._fields)
        shape = (len(self._bundles), num_words)
        words = torch.zeros(shape, dtype=torch.int64, device=self._group.device)
        messages = []
        for bundle, row in zip(self._bundles, words, strict=True):
            flow.expect(bundle.peers[0], bundle.nbytes)
            messages.append(Message(bundle.peers[0], row))
        for message, pending in zip(messages, self._group.receive(messages), strict=True):
            flow.wait(message.rank, pending, 0, begin_s)
            flow.check()
        headers = [Header(*row) for row in words.tolist()]
        for bundle, header in zip(self._bundles, headers, strict=True):
            expected = Header(_MAGIC, flow.version, self._digest, bundle.nbytes, header.checksum)
            if header != expected:
                raise WeightSyncError(_differs(flow, bundle.peers[0], header, expected))
        return headers

    def _bodies(self, flow: "_Flow", headers: Sequence[Header]) -> None:
        chunks = [_chunks(data) for data in self._staging.data]
        peers = [bundle.peers[0] for bundle in self._bundles]
        messages = [
            Message(peer, chunk)
            for peer, of_peer in zip(peers, chunks, strict=True)
            for chunk in of_peer
        ]
        waiting = iter(self._group.receive(messages))
        of_peers = zip(peers, chunks, self._staging.data, headers, strict=True)
        for peer, of_peer, data, header in of_peers:
            for chunk in of_peer:
                flow.wait(peer, next(waiting), chunk.numel(), self.deadline_s)
                flow.check()
            if (seen := checksum(data)) != header.checksum:
                raise WeightSyncError(
                    f"{flow} rank {peer}: checksum {seen:#x} of the bytes, {header.checksum:#x} "
                    "was sent; nothing of it is used"
                )


class _Buffer:
    """A staging buffer of the sender, with the version in it."""

    def __init__(
        self, bundles: Sequence[Bundle], held: Sequence[Held], device: torch.device, rank: int
    ) -> None:
        is_cuda = any(view.is_cuda for _, view in held)
        self.staging = Staging(bundles, device, is_pinned=is_cuda and device.type == "cpu")
        self.version = -1
        self._binding: Binding = self.staging.binding(held, f"trainer rank {rank}")
        self._copied = new_event() if is_cuda else None

    def fill(self, version: int) -> None:
        self.version = version
        self._binding.fill()
        if self._copied is not None:
            self._copied.record()

    def wait(self, seconds: float) -> None:
        """Wait for the copies: on a GPU they are queued behind the caller's kernels."""
        if self._copied is None:
            return
        if self.staging.data and self.staging.data[0].is_cuda:
            torch.cuda.current_stream().wait_event(self._copied)
        else:
            wait_for_event(self._copied, seconds)


class _Flow:
    """Waits for the messages of one version and knows how far each peer is."""

    def __init__(self, who: str, version: int, deadline_s: float) -> None:
        self.version = version
        self._who, self._deadline_s = who, deadline_s
        self._total: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self._faults: dict[int, str] = {}
        self._cause: Exception | None = None
        self._is_late = False

    def __str__(self) -> str:
        done, total = sum(self._done.values()), sum(self._total.values())
        return f"weights version {self.version} ({done} of {total} bytes): {self._who}"

    def expect(self, peer: int, nbytes: int) -> None:
        self._total[peer], self._done[peer] = nbytes, 0

    def wait(self, peer: int, pending: Pending, nbytes: int, seconds: float) -> bool:
        """False when the message did not come through; `check` raises then."""
        try:
            pending.wait(0.0 if self._is_late else seconds)
        except (RuntimeError, TimeoutError) as err:
            reason = "not done either" if self._is_late else _first_line(err)
            self._is_late |= isinstance(err, TimeoutError)
            done = f"{self._done[peer]} of {self._total[peer]} bytes done"
            self._faults.setdefault(peer, f"rank {peer} after {done}: {reason}")
            self._cause = self._cause or err
            return False
        self._done[peer] += nbytes
        return True

    def wait_all(
        self,
        messages: Sequence[tuple[int, Pending, int]],
        count: typing.Callable[[int], None],
    ) -> None:
        """Wait for (peer, message, bytes) in turn, also behind one that failed."""
        for peer, pending, nbytes in messages:
            if self.wait(peer, pending, nbytes, self._deadline_s):
                count(nbytes)

    def check(self) -> None:
        if self._faults:
            faults = "; ".join(self._faults.values())
            raise WeightSyncError(
                f"{self} {faults}. The group is broken: see why these ranks are gone or silent, "
                "then make a new one and rebuild"
            ) from self._cause


def _check_group(plan: Plan, group: WeightGroup, rank: int) -> int:
    """Check size, rank and plan of all ranks; returns the plan's digest."""
    size = plan.num_sources + plan.engine.num_ranks
    if (group.size, group.rank) != (size, rank):
        raise WeightSyncError(
            f"weight group {group.name}: rank {group.rank} of {group.size}; the plan has {size} "
            f"ranks, and this one is {rank}"
        )
    digest = plan_digest(plan) >> 1
    group.agree("plan digest", f"{digest:016x}")
    return digest


def _differs(flow: _Flow, peer: int, seen: Header, expected: Header) -> str:
    pairs = zip(Header._fields, seen, expected, strict=True)
    faults = ", ".join(f"{name} {a:#x} instead of {b:#x}" for name, a, b in pairs if a != b)
    return f"{flow} rank {peer}: the header has {faults}; nothing of it is used"


def _chunks(data: torch.Tensor) -> list[torch.Tensor]:
    return [data[first : first + _CHUNK_BYTES] for first in range(0, len(data), _CHUNK_BYTES)]


def _first_line(err: Exception) -> str:
    return str(err).partition("\n")[0]


def _new_tensors(plan: Plan, rank: int, device: torch.device) -> dict[Box, torch.Tensor]:
    dtypes = {spec.name: getattr(torch, spec.dtype) for spec in plan.engine.specs}
    boxes = plan.engine.boxes_of(rank)
    return {box: torch.empty(box.shape, dtype=dtypes[box.name], device=device) for box in boxes}
