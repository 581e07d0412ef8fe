"""Messages among all trainer and engine ranks: NCCL between GPUs, gloo between CPUs.

Trainer and engines are worlds of their own in torch.distributed; this group stands beside both. It
is made from a store alone, so that it can be thrown away when a rank dies and made again under
another name, without touching the trainer's own groups.
"""

import contextlib
import datetime
import os
import threading
import time
import typing
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed

from relax_hpc.errors import WeightSyncError

DEADLINE_S: typing.Final = 30.0
"""Longest wait without progress."""
_TAG, _UNUSED_TAG = 0, 1
_AT_ONCE = datetime.timedelta(milliseconds=1)
_POLL_S = 0.0005  # of a GPU event: a thread that blocks in CUDA could not give up
_SETTINGS = ("NCCL_CUMEM_ENABLE", "NCCL_PROTO", "NCCL_ALGO")
"""Must be equal on both ends: with different ones NCCL hangs or fails without saying so."""


class Message(typing.NamedTuple):
    """One tensor for or from a rank of the group."""

    rank: int
    data: torch.Tensor
    """Contiguous, on the group's device."""


class Pending(typing.Protocol):
    """A message on its way."""

    def wait(self, seconds: float) -> None:
        """Wait for its end; RuntimeError when the other end is gone, TimeoutError when it waits."""
        ...


# Untyped: torch.distributed names these classes in no stub, and half of torch.cuda has no types.
dist: typing.Any = torch.distributed
_cuda: typing.Any = torch.cuda
_Start = Callable[[list[torch.Tensor], int, int], typing.Any]


class WeightGroup:
    """All ranks of a weight sync, and nothing but messages between two of them.

    Group rank = trainer rank, or number of trainer ranks + engine rank. One thread at a time.
    """

    def __init__(
        self,
        store: typing.Any,
        rank: int,
        size: int,
        *,
        name: str,
        device: torch.device | str = "cpu",
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Join; returns when all `size` ranks are there.

        Args:
            store: Of torch.distributed, the same for all ranks (TCPStore across nodes).
            rank: Of this process, 0 .. size - 1.
            size: Number of trainer and engine ranks.
            name: Of this group; another one each time a group is made again.
            device: Where messages lie: "cpu" = gloo, a GPU = NCCL.
            deadline_s: For each wait in here.

        Raises:
            WeightSyncError: a rank is missing (named), the name was used before, or settings that
                must be equal differ.
        """
        self.rank, self.size, self.name = rank, size, name
        self.device = torch.device(device)
        self.is_broken = False
        self._deadline_s = deadline_s
        self._store = dist.PrefixStore(f"weights/{name}", store)
        if self._store.add(f"joined/{rank}", 1) != 1:
            raise WeightSyncError(
                f"weight group {name}: rank {rank} joined it before; a group that is made again "
                "needs a new name"
            )
        self.agree("settings", _settings(self.device))
        self._backend = self._connect()

    def agree(self, what: str, value: str) -> None:
        """Compare a text with all other ranks.

        Raises:
            WeightSyncError: a rank that did not come in time, or one that says something else.
        """
        self._store.set(f"{what}/{self.rank}", value)
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        try:
            self._store.wait(keys, datetime.timedelta(seconds=self._deadline_s))
        except RuntimeError as err:  # DistStoreError: its text does not say which key
            raise WeightSyncError(
                f"weight group {self.name}: rank {self.rank} waited {self._deadline_s:g} s for "
                f"{what} of ranks {self._missing(keys)}; are they alive, with the same store?"
            ) from err
        if self._store.has_extended_api():
            values = self._store.multi_get(keys)
        else:
            values = [self._store.get(key) for key in keys]
        for rank, other in enumerate(values):
            if (seen := other.decode()) != value:
                raise WeightSyncError(
                    f"weight group {self.name}: {what} differ: rank {self.rank} has {value}, "
                    f"rank {rank} has {seen}"
                )

    def send(self, messages: Sequence[Message]) -> list[Pending]:
        """Start sending; one Pending for each message."""
        return self._post(messages, self._backend.send)

    def receive(self, messages: Sequence[Message]) -> list[Pending]:
        """Start receiving into the tensors; one Pending for each message."""
        return self._post(messages, self._backend.recv)

    def abort(self) -> None:
        """Close all connections, also with messages on their way: the other ranks get an error.

        For good: the group is broken. Calling it again does nothing.
        """
        if self.is_broken:
            return
        self.is_broken = True
        if self.device.type == "cpu":
            self._close_connections()
        else:
            self._backend.abort()

    def _close_connections(self) -> None:
        """Let a wait time out: then gloo closes all connections; its own abort() closes none."""
        nothing = torch.empty(1, dtype=torch.uint8)
        for rank in range(self.size):
            if rank == self.rank:
                continue
            try:
                self._backend.recv([nothing], rank, _UNUSED_TAG).wait(_AT_ONCE)
            except RuntimeError as err:
                if "Timed out" in str(err):
                    return  # else this one was closed already

    def _missing(self, keys: Sequence[str]) -> str:
        try:
            absent = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
        except RuntimeError as err:
            return f"unknown (the store is gone: {err})"
        return ", ".join(absent)

    def _post(self, messages: Sequence[Message], start: _Start) -> list[Pending]:
        if self.is_broken or not messages:
            return [_FailedPending(RuntimeError(f"group {self.name} is broken")) for _ in messages]
        if self.device.type == "cpu":
            return [_start_on_host(start, message) for message in messages]
        # One group call: NCCL runs all messages of a batch at once, on the one communicator.
        self._backend._start_coalescing()
        for message in messages:
            start([message.data], message.rank, _TAG)
        work = self._backend._end_coalescing()
        pending = _DevicePending(work)
        return [pending] * len(messages)

    def _connect(self) -> typing.Any:
        """Connect with all ranks, in a thread: NCCL has no deadline for it."""
        made: list[typing.Any] = []
        errors: list[RuntimeError] = []

        def connect() -> None:
            try:
                made.append(self._new_backend())
            except RuntimeError as err:
                errors.append(err)

        thread = threading.Thread(target=connect, name="weight-group", daemon=True)
        thread.start()
        thread.join(self._deadline_s)
        if not made:
            cause = errors[0] if errors else None
            raise WeightSyncError(
                f"weight group {self.name}: rank {self.rank} could not connect with the other "
                f"{self.size - 1} ranks in {self._deadline_s:g} s ({cause or 'no answer'}); "
                "check the network interfaces (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
            ) from cause
        return made[0]

    def _new_backend(self) -> typing.Any:
        limit = datetime.timedelta(seconds=self._deadline_s)
        if self.device.type == "cpu":
            return dist.ProcessGroupGloo(self._store, self.rank, self.size, limit)
        with _own_error_handling(), torch.cuda.device(self.device):
            options = dist.ProcessGroupNCCL.Options()
            backend = dist.ProcessGroupNCCL(self._store, self.rank, self.size, options)
            # The communicator is made by the first operation, which all ranks must take part in.
            ones = torch.ones(1, device=self.device)
            backend.allreduce([ones]).wait()
            torch.cuda.current_stream().synchronize()
        return backend


def _start_on_host(start: _Start, message: Message) -> Pending:
    try:
        return _HostPending(start([message.data], message.rank, _TAG))
    except RuntimeError as err:  # this peer is gone; the other messages can still go
        return _FailedPending(err)


class _FailedPending:
    """A message that could not even start."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, seconds: float) -> None:
        del seconds
        raise self._error


class _HostPending:
    """gloo. A wait that times out closes all connections of this rank: see ShardSender."""

    def __init__(self, work: typing.Any) -> None:
        self._work = work

    def wait(self, seconds: float) -> None:
        started = time.monotonic()
        try:
            self._work.wait(datetime.timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError as err:
            if "Timed out" in str(err) and time.monotonic() - started >= seconds:
                raise TimeoutError(f"no progress for {seconds:.1f} s") from err
            raise


class _DevicePending:
    """NCCL: the batch's end as an event on the current stream."""

    def __init__(self, work: typing.Any) -> None:
        work.wait()  # lets the stream wait, not this thread
        self._event = _cuda.Event()
        self._event.record()

    def wait(self, seconds: float) -> None:
        wait_for_event(self._event, seconds)


def new_event() -> typing.Any:
    """Make a GPU event."""
    return _cuda.Event()


def wait_for_event(event: typing.Any, seconds: float) -> None:
    """Wait for a GPU event; TimeoutError when it does not come."""
    until = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > until:
            raise TimeoutError(f"no progress for {seconds:.1f} s")
        time.sleep(_POLL_S)


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Make a stream of its own the current one, behind what is queued; on CPUs nothing."""
    if device.type == "cpu":
        yield
        return
    with torch.cuda.device(device):
        before = torch.cuda.current_stream()
        stream = _cuda.Stream()
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            yield
        before.wait_stream(stream)


@contextlib.contextmanager
def _own_error_handling() -> Iterator[None]:
    """Keep NCCL's watchdog from ending this process when a peer dies: the waits here notice it."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _settings(device: torch.device) -> str:
    if device.type == "cpu":
        return "gloo"
    version = ".".join(map(str, _cuda.nccl.version()))
    values = [f"{name}={os.environ.get(name, '')}" for name in _SETTINGS]
    return " ".join([f"nccl {version}", *values])
