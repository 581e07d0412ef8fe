"""Messages of the services transfer and agent-NODE. Metadata only, payload is in segments."""

import dataclasses

import msgspec

SERVICE = "transfer"


def agent_service(node: str) -> str:
    """Name of the node agent's service."""
    return f"agent-{node}"


class Segment(msgspec.Struct, frozen=True):
    """Where a piece of payload lies: a file in the shared memory of one node."""

    node: str
    name: str
    nbytes: int
    digest: str
    """xxh3-64 of the header, which holds the checksum of every field."""


class BlockRef(msgspec.Struct, frozen=True, array_like=True):
    """Where a block of payload lies: part of an extent in the shared memory of one node."""

    node: str
    extent: str
    """File name in the node's `arenas` folder, or in its spill folder."""
    offset: int
    nbytes: int
    epoch: int
    """Never used twice in an arena: a reader that finds another one came too late."""
    digest: int
    """xxh3-64 of the block's header, which holds the checksum of every column."""
    tier: str = "shm"
    """shm or spill."""


class DataAccess(msgspec.Struct, frozen=True):
    """How other nodes read this node's blocks and files."""

    host: str
    port: int
    nixl_agent: str = ""
    """Name of the node's NIXL agent; empty: only TCP."""
    nixl_metadata: bytes = b""


class RowInfo(msgspec.Struct, frozen=True, array_like=True):
    """What the controller knows about one sample."""

    sample_index: int
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: str


class GroupRows(msgspec.Struct, frozen=True):
    """Rows of one group, and the segments that hold their fields."""

    uid: str
    group_size: int
    rows: list[RowInfo]
    segments: list[Segment]


class OpenDataset(msgspec.Struct, frozen=True):
    """Tell (or confirm) the data set."""

    num_prompts: int
    fingerprint: str


class Admit(msgspec.Struct, frozen=True):
    """Ask for prompt slots; `key` is kept until a reply arrives, so that no grant is lost."""

    key: str
    engine_version: int
    max_groups: int
    wait_s: float


class Slot(msgspec.Struct, frozen=True):
    """A PromptSlot on the wire."""

    uid: str
    prompt_index: int
    epoch: int
    deadline_version: int


class Admitted(msgspec.Struct, frozen=True):
    """Slots, or none at the end of the wait."""

    slots: list[Slot]
    done: bool


class PutGroup(msgspec.Struct, frozen=True):
    """A finished group: its segment is already committed."""

    uid: str
    segment: Segment
    rows: list[RowInfo]
    oldest_version: int
    """Smallest token version of the group; -1 when it has no response token."""


class PutFields(msgspec.Struct, frozen=True):
    """One more field for rows: (group uid, sample index)."""

    name: str
    rows: list[tuple[str, int]]
    segment: Segment


class Stored(msgspec.Struct, frozen=True):
    """Answer to a put."""

    is_kept: bool
    """The controller references the segment; else the writer removes it."""
    is_wanted: bool
    """False: the group was dispatched again or trained meanwhile."""


class EndGroup(msgspec.Struct, frozen=True):
    """Drop, return or reject a group."""

    uid: str
    reason: str


class TakeRows(msgspec.Struct, frozen=True):
    """Lease rows of a task; `key` as in Admit."""

    task: str
    key: str
    max_rows: int
    wait_s: float


class TakenRows(msgspec.Struct, frozen=True):
    """Leased rows by group."""

    groups: list[GroupRows]


class TakeChunk(msgspec.Struct, frozen=True):
    """Ask for the share of one data parallel rank of one chunk."""

    step: int
    index: int
    dp_rank: int
    dp_size: int
    wait_s: float


class TakenChunk(msgspec.Struct, frozen=True):
    """The share; None at the end of the wait."""

    groups: list[GroupRows] | None


class BeginTrain(msgspec.Struct, frozen=True):
    """The train step (re)starts at `step`; `key` makes a repeated message harmless."""

    key: str
    step: int


class CompleteStep(msgspec.Struct, frozen=True):
    """The optimizer step was done."""

    step: int


class Version(msgspec.Struct, frozen=True):
    """A policy version (evaluations)."""

    version: int


class Answer(msgspec.Struct, frozen=True):
    """Yes or no."""

    ok: bool


class Versions(msgspec.Struct, frozen=True):
    """Policy versions."""

    versions: list[int]


class Producer(msgspec.Struct, frozen=True):
    """A start of a role that is known to be dead."""

    role: str
    index: int
    incarnation: int


class CollectGarbage(msgspec.Struct, frozen=True):
    """A node agent acknowledges removed files and asks for more (long-poll)."""

    node: str
    removed: list[str]
    wait_s: float


class Garbage(msgspec.Struct, frozen=True):
    """Files of a node that nobody will read again."""

    names: list[str]


class FindOrphans(msgspec.Struct, frozen=True):
    """Files of a node whose writer is dead: which of them does nobody reference?"""

    node: str
    names: list[str]


class ReadPart(msgspec.Struct, frozen=True):
    """Read a part of a file in a node's shared memory."""

    area: str
    """Folder inside the run's shared memory folder: segments or weights."""
    name: str
    offset: int
    max_bytes: int


class Part(msgspec.Struct, frozen=True):
    """Bytes of a file; `total` is the file's size, -1 when it does not exist."""

    data: bytes
    total: int


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer step consumed."""

    step: int
    num_groups: int
    num_samples: int
    num_tokens: int
    """Prompt and response tokens."""
    staleness_mean: float
    """Train version minus the oldest token version of each group, in train steps."""
    staleness_max: int


class QueueStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The queue at one moment. Counts are groups."""

    version: int
    """Policy version = optimizer steps done."""
    train_steps: int
    done: bool
    capacity: int
    """Groups that may be in flight: (max_staleness + 1) x groups_per_step, less near the end."""
    in_flight: int
    """Admitted and not yet trained: generating + waiting + ready + assigned."""
    generating: int
    waiting: int
    """Put, but a field of ref or logprob is still missing."""
    ready: int
    assigned: int
    """In chunks of the current step."""
    trained_groups: int
    dropped: dict[str, int]
    """By reason, over the run."""
    redispatched: dict[str, int]
    """By reason, over the run."""
    to_dispatch: int
    """Prompts that wait for their second dispatch."""
    epoch: int
    evals_pending: list[int]
    evals_finished: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentPlace:
    """A path and what it should hold, for error messages."""

    segment: Segment
    reader_node: str

    def __str__(self) -> str:
        s = self.segment
        return f"segment {s.name} of node {s.node} (read on {self.reader_node})"
