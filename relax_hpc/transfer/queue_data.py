"""State of the queue controller as plain data, and the events that change it.

The state is the snapshot at the head of a journal plus the events after it. Events carry decisions
(which prompts, which groups in which chunk), so applying them needs no clock and no randomness.
"""

import enum

import msgspec

from relax_hpc.transfer.ledger import LedgerData, Partial, Ticket
from relax_hpc.transfer.wire import BlockRef, GroupInfo, Histograms, Rows, Slot, StepSummary

RowKeys = tuple[str, list[int]]
"""Rows of one group: (uid, sample indices)."""
FreeBlock = tuple[str, int, int]
"""(extent, offset, epoch)"""


class Phase(enum.StrEnum):
    """Where a group in flight is."""

    GENERATING = "generating"
    WAITING = "waiting"
    """Put; a task's field is still missing."""
    READY = "ready"
    ASSIGNED = "assigned"


class Group(msgspec.Struct, kw_only=True, gc=False):
    """One group in flight."""

    ticket: Ticket
    engine_version: int
    deadline: int
    role: str
    index: int
    incarnation: int
    """Who generates it."""
    phase: Phase = Phase.GENERATING
    rows: Rows | None = None
    """None until it is put."""
    blocks: list[BlockRef] = msgspec.field(default_factory=list)
    oldest_version: int = -1
    newest_version: int = -1
    num_tokens: int = 0
    put_at: float = 0.0
    """Seconds since 1970."""
    missing: dict[str, list[int]] = msgspec.field(default_factory=dict)
    """Samples that lack a task's field, by task."""
    leased: dict[str, dict[str, list[int]]] = msgspec.field(default_factory=dict)
    """Those of `missing` that a client works on: task -> client -> samples."""
    ready_order: int = 0
    lost_after: int = -1
    """Of its tokens those of newer versions may come from a lost branch; -1: none was lost."""
    partial: Partial | None = None


class Chunk(msgspec.Struct):
    """One decided chunk of the current step."""

    picked: list[str]
    """Group uids in the order they were picked; "" where one was lost and not yet replaced."""
    shares: list[list[str]]
    """The same by dp rank."""
    holes: list[int] = msgspec.field(default_factory=list)
    """dp ranks that lost a group (corrupt payload) and wait for another one."""


class Grant(msgspec.Struct):
    """The last grant to one client, repeated when the client asks again with the same key."""

    key: str
    slots: list[Slot] = msgspec.field(default_factory=list)
    rows: list[RowKeys] = msgspec.field(default_factory=list)


class QueueData(msgspec.Struct):
    """Everything that a restarted controller must know."""

    attempt: int = 0
    version: int = 0
    ledger: LedgerData = msgspec.field(default_factory=LedgerData)
    groups: dict[str, Group] = msgspec.field(default_factory=dict)
    chunks: list[Chunk] = msgspec.field(default_factory=list)
    num_assigned: int = 0
    """Groups in `chunks`."""
    ready_count: int = 0
    callers: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)
    """role/index -> newest (attempt, incarnation)."""
    admissions: dict[str, Grant] = msgspec.field(default_factory=dict)
    takes: dict[str, Grant] = msgspec.field(default_factory=dict)
    train_key: str = ""
    train_incarnation: int = 0
    """The incarnation of role train that called begin_train last; 0: none, or it is known dead."""
    eval_claims: dict[int, str] = msgspec.field(default_factory=dict)
    evals_finished: list[int] = msgspec.field(default_factory=list)
    free: dict[str, set[FreeBlock]] = msgspec.field(default_factory=dict)
    """Blocks that nobody reads again, by arena, until their producer acknowledged them."""
    histograms: Histograms = msgspec.field(default_factory=Histograms)
    last_summary: StepSummary | None = None


class Event(msgspec.Struct, tag_field="event"):
    """Base of all events."""


class AttemptBegun(Event, tag="attempt"):
    """The job runs again: payload of the attempt before is gone."""

    attempt: int


class CallerSeen(Event, tag="caller"):
    """A (role, index) came back with a newer incarnation."""

    role: str
    index: int
    attempt: int
    incarnation: int


class ProducerLost(Event, tag="lost"):
    """The supervisor knows that an incarnation is dead."""

    role: str
    index: int
    incarnation: int


class DatasetOpened(Event, tag="dataset"):
    """The data set of the run."""

    num_prompts: int
    fingerprint: str
    is_change_allowed: bool = False


class Admitted(Event, tag="admit"):
    """Slots were granted."""

    client: str
    key: str
    role: str
    index: int
    incarnation: int
    engine_version: int
    deadline: int
    tickets: list[Ticket]
    num_again: int
    deadlines: dict[str, int] = msgspec.field(default_factory=dict)
    """By uid: saved tokens are given back, and this smaller deadline counts."""


class GroupsPut(Event, tag="puts", gc=False):
    """Groups are complete as far as their engine is concerned; one event for a whole message."""

    groups: list[GroupInfo]
    at: float


class GroupPut(Event, tag="put", gc=False):
    """One group; only in journals of earlier versions."""

    uid: str
    block: BlockRef
    rows: Rows
    oldest_version: int
    newest_version: int
    at: float


class FieldsPut(Event, tag="fields"):
    """One more field."""

    name: str
    rows: list[RowKeys]
    block: BlockRef


class PartialSaved(Event, tag="partial"):
    """Tokens of a group that is still being generated."""

    uid: str
    partial: Partial


class GroupDropped(Event, tag="drop"):
    """A group was given up by its engine."""

    uid: str
    reason: str
    response_tokens: list[int] = msgspec.field(default_factory=list)


class DispatchedAgain(Event, tag="again"):
    """Prompts of groups go back to the ledger."""

    uids: list[str]
    reason: str
    response_tokens: list[int] = msgspec.field(default_factory=list)


class RowsTaken(Event, tag="take"):
    """Rows were leased."""

    task: str
    client: str
    key: str
    rows: list[RowKeys]


class ChunkDecided(Event, tag="chunk"):
    """A chunk of the current step."""

    picked: list[str]
    shares: list[list[str]]


class HoleFilled(Event, tag="hole"):
    """A rejected group of a chunk was replaced."""

    chunk: int
    dp_rank: int
    uid: str


class TrainBegun(Event, tag="begin"):
    """The train step (re)started."""

    key: str
    incarnation: int
    step: int


class LedgerRestored(Event, tag="restore"):
    """The ledger of a checkpoint replaces ours: the journal was missing or older."""

    step: int
    ledger: LedgerData


class StepCompleted(Event, tag="step"):
    """An optimizer step was done."""

    step: int
    summary: StepSummary


class ExtentsRemoved(Event, tag="removed"):
    """Extents of dead producers: nobody is left to free single blocks of them."""

    names: list[str]


class EvalClaimed(Event, tag="claim"):
    """An engine evaluates a version."""

    version: int
    client: str


class EvalFinished(Event, tag="evaluated"):
    """The evaluation of a version is written."""

    version: int


AnyEvent = (
    AttemptBegun
    | CallerSeen
    | ProducerLost
    | DatasetOpened
    | Admitted
    | GroupsPut
    | GroupPut
    | FieldsPut
    | PartialSaved
    | GroupDropped
    | DispatchedAgain
    | RowsTaken
    | ChunkDecided
    | HoleFilled
    | TrainBegun
    | LedgerRestored
    | StepCompleted
    | ExtentsRemoved
    | EvalClaimed
    | EvalFinished
)
