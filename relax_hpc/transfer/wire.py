"""Messages of the services transfer and agent-NODE. Metadata only, payload is in blocks.

Rows of a group travel as columns: one list per property, not one struct per row. What there is much
of is not tracked by the garbage collector (gc=False): it can be part of no cycle.
"""

import dataclasses

import msgspec

SERVICE = "transfer"


def agent_service(node: str) -> str:
    """Name of the node agent's service."""
    return f"agent-{node}"


class BlockRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
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


class Rows(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the controller knows about samples of one group: columns of equal length."""

    num_prompt_tokens: list[int]
    num_tokens: list[int]
    finish_reasons: list[str]

    def __len__(self) -> int:
        return len(self.num_tokens)

    def pick(self, places: list[int]) -> "Rows":
        """Only these rows, in this order."""
        return Rows(
            [self.num_prompt_tokens[i] for i in places],
            [self.num_tokens[i] for i in places],
            [self.finish_reasons[i] for i in places],
        )


class GroupRows(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rows of one group, and the blocks that hold their fields."""

    uid: str
    group_size: int
    samples: list[int]
    """Sample index of each row."""
    rows: Rows
    blocks: list[int]
    """Places in the list of blocks of its message: groups share blocks."""


class OpenDataset(msgspec.Struct, frozen=True):
    """Tell (or confirm) the data set."""

    num_prompts: int
    fingerprint: str
    allow_changed: bool = False
    """Go on with another data set than the run began with: its next epoch begins now."""


class Admit(msgspec.Struct, frozen=True):
    """Ask for prompt slots; `key` is kept until a reply arrives, so that no grant is lost."""

    key: str
    engine_version: int
    max_groups: int
    wait_s: float


class Slot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A PromptSlot on the wire."""

    uid: str
    prompt_index: int
    epoch: int
    deadline_version: int
    partial: BlockRef | None = None
    """Tokens that an earlier dispatch of this prompt had generated (`SavePartial`)."""


class Admitted(msgspec.Struct, frozen=True):
    """Slots, or none at the end of the wait."""

    slots: list[Slot]
    done: bool


class GroupInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A finished group: its block is already committed. Row i is sample i."""

    uid: str
    block: BlockRef
    rows: Rows
    oldest_version: int
    """Smallest token version of the group; -1 when it has no response token."""
    newest_version: int = -1
    """Largest token version of the group; -1: not told."""


class PutGroups(msgspec.Struct, frozen=True):
    """Finished groups; each is accepted or refused on its own."""

    groups: list[GroupInfo]


class PutFields(msgspec.Struct, frozen=True):
    """One more field for rows: (group uid, sample indices)."""

    name: str
    rows: list[tuple[str, list[int]]]
    block: BlockRef


class SavePartial(msgspec.Struct, frozen=True):
    """Tokens of a group that is not finished; replaces what was saved for it before."""

    uid: str
    block: BlockRef
    oldest_version: int
    newest_version: int


class Stored(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Answer to a put."""

    is_kept: bool
    """The controller references the block; else the writer frees it."""
    is_wanted: bool
    """False: the group was dispatched again or trained meanwhile."""


class StoredGroups(msgspec.Struct, frozen=True):
    """Answer to PutGroups, in its order."""

    results: list[Stored]


class EndGroup(msgspec.Struct, frozen=True):
    """Drop, return or reject a group."""

    uid: str
    reason: str
    response_tokens: list[int] = msgspec.field(default_factory=list)
    """Lengths of its samples as far as they were generated, for the histograms of dropped ones."""


class TakeRows(msgspec.Struct, frozen=True):
    """Lease rows of a task; `key` as in Admit."""

    task: str
    key: str
    max_rows: int
    wait_s: float


class TakenRows(msgspec.Struct, frozen=True):
    """Leased rows by group."""

    groups: list[GroupRows]
    blocks: list[BlockRef] = msgspec.field(default_factory=list)
    """Each block of them once."""


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
    blocks: list[BlockRef] = msgspec.field(default_factory=list)


class LedgerCut(msgspec.Struct, frozen=True):
    """The ledger as of one policy version, to be stored with the checkpoint of that version."""

    step: int
    data: bytes
    digest: str
    """xxh3-128 of `data`."""


class CutLedger(msgspec.Struct, frozen=True):
    """Ask for the cut of a policy version <= the current one."""

    step: int


class BeginTrain(msgspec.Struct, frozen=True):
    """The train step (re)starts at `step`; `key` makes a repeated message harmless."""

    key: str
    step: int
    cut: LedgerCut | None = None
    """From the loaded checkpoint; used when the journal is missing or older."""


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


class CollectFree(msgspec.Struct, frozen=True):
    """A producer asks which blocks of its arena nobody will read again (long-poll)."""

    arena: str
    acked: list[tuple[str, int, int]]
    """What it freed since: (extent, offset, epoch), not told again."""
    wait_s: float


class Freed(msgspec.Struct, frozen=True):
    """Blocks that are free: (extent, offset, epoch)."""

    blocks: list[tuple[str, int, int]]


class FindOrphans(msgspec.Struct, frozen=True):
    """Extents of a node whose writer is dead: which of them does nobody reference?"""

    node: str
    names: list[str]


class Orphans(msgspec.Struct, frozen=True):
    """Extents to remove; the controller forgot what was free inside them."""

    names: list[str]


Histogram = dict[int, int]
"""Samples by bucket. Lengths: `length_bucket`; staleness: train steps."""


def length_bucket(num_tokens: int) -> int:
    """Bucket b holds lengths in [2^(b-1), 2^b); 0 is a bucket of its own."""
    return num_tokens.bit_length()


def arena_of(extent: str) -> str:
    """Arena that an extent belongs to: its name without the number."""
    return extent.rpartition(".")[0]


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
    response_lengths: Histogram = msgspec.field(default_factory=dict)
    staleness: Histogram = msgspec.field(default_factory=dict)
    uids: list[str] = msgspec.field(default_factory=list)
    """Groups in the order they were picked, chunk by chunk, before they were divided."""


class Histograms(msgspec.Struct, kw_only=True):
    """Samples over the run, by response length; shows whether long ones are lost on the way."""

    generated: Histogram = msgspec.field(default_factory=dict)
    trained: Histogram = msgspec.field(default_factory=dict)
    dropped: dict[str, Histogram] = msgspec.field(default_factory=dict)
    """By reason; also what was generated and then dispatched again."""
    staleness: Histogram = msgspec.field(default_factory=dict)
    """Trained samples, by train version minus oldest token version."""


class TaskStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that lack the field of one task."""

    waiting: int
    """Nobody has taken them yet."""
    leased: int
    oldest_s: float
    """Age of the oldest of both, since its put; 0 when there is none."""
    is_stuck: bool
    """`oldest_s` is beyond the limit: look into the log of that step."""


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
    histograms: Histograms = msgspec.field(default_factory=Histograms)
    tasks: dict[str, TaskStatus] = msgspec.field(default_factory=dict)
    """Forward-only tasks, and `train`: ready groups that no chunk took."""
    num_free: int = 0
    """Blocks that are free and not yet acknowledged by their producer."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockPlace:
    """A block and who reads it, for error messages."""

    ref: BlockRef
    reader_node: str

    def __str__(self) -> str:
        r = self.ref
        where = f"{r.nbytes} bytes at {r.offset} of {r.tier} extent {r.extent}, epoch {r.epoch}"
        return f"block of {where}, node {r.node} (read on {self.reader_node})"
