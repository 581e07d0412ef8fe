"""State of the queue controller as plain data, and the events that change it.

The state is the snapshot at the head of a journal plus the events after it. Events carry decisions
(which prompts, which groups in which chunk), so applying them needs no clock and no randomness.
"""

import enum

import msgspec

from relax_hpc.transfer.ledger import LedgerData, Ticket
from relax_hpc.transfer.wire import RowInfo, Segment, Slot, StepSummary


class Phase(enum.StrEnum):
    """Where a group in flight is."""

    GENERATING = "generating"
    WAITING = "waiting"
    """Put; a task's field is still missing."""
    READY = "ready"
    ASSIGNED = "assigned"


class Group(msgspec.Struct, kw_only=True):
    """One group in flight."""

    ticket: Ticket
    engine_version: int
    deadline: int
    role: str
    index: int
    incarnation: int
    """Who generates it."""
    phase: Phase = Phase.GENERATING
    rows: list[RowInfo] = msgspec.field(default_factory=list)
    segments: list[Segment] = msgspec.field(default_factory=list)
    oldest_version: int = -1
    num_tokens: int = 0
    missing: dict[str, set[int]] = msgspec.field(default_factory=dict)
    """Sample indices that lack a field, by field name."""
    ready_order: int = 0


class Chunk(msgspec.Struct):
    """One decided chunk of the current step."""

    shares: list[list[str]]
    """Group uids by dp rank."""
    holes: list[int] = msgspec.field(default_factory=list)
    """dp ranks that lost a group (corrupt payload) and wait for another one."""


class Grant(msgspec.Struct):
    """The last grant to one client, repeated when the client asks again with the same key."""

    key: str
    slots: list[Slot] = msgspec.field(default_factory=list)
    rows: list[tuple[str, int]] = msgspec.field(default_factory=list)


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
    leases: dict[str, str] = msgspec.field(default_factory=dict)
    """"TASK UID SAMPLE" -> client, see `lease_key`."""
    train_key: str = ""
    train_incarnation: int = 0
    """The incarnation of role train that called begin_train last; 0: none, or it is known dead."""
    eval_claims: dict[int, str] = msgspec.field(default_factory=dict)
    evals_finished: list[int] = msgspec.field(default_factory=list)
    garbage: dict[str, set[str]] = msgspec.field(default_factory=dict)
    last_summary: StepSummary | None = None


def lease_key(task: str, uid: str, sample_index: int) -> str:
    """Key of a leased row."""
    return f"{task} {uid} {sample_index}"


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


class GroupPut(Event, tag="put"):
    """A group is complete as far as its engine is concerned."""

    uid: str
    segment: Segment
    rows: list[RowInfo]
    oldest_version: int


class FieldsPut(Event, tag="fields"):
    """One more field."""

    name: str
    rows: list[tuple[str, int]]
    segment: Segment


class GroupDropped(Event, tag="drop"):
    """A group was given up by its engine."""

    uid: str
    reason: str


class DispatchedAgain(Event, tag="again"):
    """Prompts of groups go back to the ledger."""

    uids: list[str]
    reason: str


class RowsTaken(Event, tag="take"):
    """Rows were leased."""

    task: str
    client: str
    key: str
    rows: list[tuple[str, int]]


class ChunkDecided(Event, tag="chunk"):
    """A chunk of the current step."""

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


class StepCompleted(Event, tag="step"):
    """An optimizer step was done."""

    step: int
    summary: StepSummary


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
    | GroupPut
    | FieldsPut
    | GroupDropped
    | DispatchedAgain
    | RowsTaken
    | ChunkDecided
    | HoleFilled
    | TrainBegun
    | StepCompleted
    | EvalClaimed
    | EvalFinished
)
