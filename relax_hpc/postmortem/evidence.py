"""What parsers find and what the diagnosis works on: events with their provenance. Torch-free.

    files -> collect (lines) -> parse/* (events) -> timeline -> diagnose (findings) -> verdict

An event is one statement of one process or daemon. Numbers keep the meaning of their source:
`rank` is global, `group_rank` counts inside a process group, `seq` belongs to one process group.
"""

import enum

import msgspec


class Source(msgspec.Struct, frozen=True):
    """Where an event was read: file, line (1-based; 0 = binary), text as it stands there."""

    file: str
    line: int
    text: str


class EventKind(enum.StrEnum):
    """What an event states. The diagnosis looks at these, never at text."""

    COLLECTIVE_TIMEOUT = "collective_timeout"
    """This rank waited too long in a collective (NCCL watchdog, gloo)."""
    WORK_STATUS = "work_status"
    """Counters of a process group: last enqueued / started / completed."""
    DUMP_SIGNAL = "dump_signal"
    """Another rank (attrs["from_rank"]) asked for a dump: that one timed out first."""
    HEARTBEAT = "heartbeat"
    """The watchdog thread itself was stuck (heartbeat monitor)."""
    COLLECTIVE_MISMATCH = "collective_mismatch"
    """Ranks disagree about op, shape or type (desync report, DETAIL fingerprints)."""
    RANK_ABSENT = "rank_absent"
    """A report names ranks that did not come (desync, store barrier, RAS)."""
    PEER_LOST = "peer_lost"
    """A connection was closed or reset by attrs["peer"]."""
    NET_ERROR = "net_error"
    """InfiniBand or socket completion error, attrs: status, peer, hca, gid."""
    LINK_EVENT = "link_event"
    """Port down, fatal async event, link flap, NVLink error."""
    GPU_FAULT = "gpu_fault"
    """Xid, ECC, fallen off the bus, device handle lost; attrs["xid"], attrs["gpu"]."""
    CUDA_ERROR = "cuda_error"
    """Error of the process's own kernels (illegal or misaligned address, assert)."""
    OUT_OF_MEMORY = "out_of_memory"
    """attrs["where"] = "host" or "cuda"."""
    EXCEPTION = "exception"
    """A Python traceback ended; attrs: type, message, frames (innermost last)."""
    PROCESS_EXIT = "process_exit"
    """A task ended; attrs: exit_code or signal."""
    SCHEDULER = "scheduler"
    """Slurm ended, requeued, preempted or refused something; attrs["reason"]."""
    LAUNCHER_ERROR = "launcher_error"
    """Rendezvous, environment, binding, device ordinal, duplicate GPU: set-up, not run time."""
    STORAGE = "storage"
    """File system stall or error."""
    PHASE = "phase"
    """The program says what it does (checkpoint, evaluation, rollout, training finished)."""
    RAS = "ras"
    """A line of NCCL's RAS report about a communicator."""
    CONFIG_NOTE = "config_note"
    """A setting that matters for the diagnosis (flight recorder off, time-out value)."""


class Group(msgspec.Struct, frozen=True):
    """A process group as messages name it; any part may be unknown (empty)."""

    uid: str = ""
    """PG GUID, or the communicator's commHash/commId."""
    name: str = ""
    """Description: default_pg, PIPELINE_MODEL_PARALLEL_GROUP, ..."""
    ranks: tuple[int, ...] = ()
    """Global ranks of the members, if known."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One statement. Unknown is None (or empty), never 0 or -1."""

    kind: EventKind
    source: Source
    time: float | None = None
    """Unix time as stamped by its node; None if the line has no stamp."""
    rank: int | None = None
    """Global rank."""
    group_rank: int | None = None
    node: str = ""
    pid: int | None = None
    group: Group | None = None
    seq: int | None = None
    """Sequence number in the group."""
    op: str = ""
    """Lower case, without backend: all_reduce, broadcast, coalesced, send, recv, ..."""
    enqueued: int | None = None
    started: int | None = None
    completed: int | None = None
    num_in: int | None = None
    num_out: int | None = None
    duration_s: float | None = None
    """"ran for"."""
    timeout_s: float | None = None
    attrs: dict[str, str | int | float | tuple[int, ...]] = {}
