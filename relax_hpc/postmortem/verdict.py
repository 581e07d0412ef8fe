"""The answer: what failed first, how sure that is, why, and what to do. Schema of `--json`."""

import enum

import msgspec

from relax_hpc.postmortem.evidence import Source


class Confidence(enum.StrEnum):
    """How sure a verdict is."""

    ESTABLISHED = "established"
    """The evidence says it by itself; no rival explanation fits."""
    LIKELY = "likely"
    """The best explanation; rivals are listed."""
    UNDETERMINED = "undetermined"
    """The data does not tell; `next_steps` says what to collect or switch on."""


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A rival explanation and why it ranks lower."""

    class_: str = msgspec.field(name="class")
    reason: str


class Finding(msgspec.Struct, kw_only=True):
    """One explanation that a rule proposes."""

    class_: str = msgspec.field(name="class")
    """Name in classes.py."""
    confidence: Confidence
    sentence: str
    """One sentence for the terminal and for `status`."""
    ranks: list[int] = []
    """Global ranks at fault (not reporters, not victims)."""
    nodes: list[str] = []
    links: list[str] = []
    """`node:hca <-> node:hca` or `a <-> b` as far as known."""
    evidence: list[Source] = []
    time: float | None = None


class Verdict(msgspec.Struct, kw_only=True):
    """What `relax-hpc postmortem --json` prints under "verdict"."""

    class_: str = msgspec.field(name="class")
    confidence: Confidence
    sentence: str
    ranks: list[int] = []
    nodes: list[str] = []
    links: list[str] = []
    evidence: list[Source] = []
    alternatives: list[Alternative] = []
    next_steps: list[str] = []


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """One event of one lane of the picture (HTML); see picture.py."""

    rank: int | None = None
    node: str = ""
    time: float | None = None
    """Unix time; None: the line had no stamp, its place among the others is the order."""
    kind: str
    """An EventKind."""
    label: str
    """`file:line text`, shortened."""


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """One arrow of the picture: global rank `rank` waited for `on`."""

    rank: int
    on: int
    why: str = ""
    """Operation, number, group."""


class Report(msgspec.Struct, kw_only=True):
    """The whole `--json` document."""

    schema: int = 1
    verdict: Verdict
    findings: list[Finding] = []
    """All proposals in order; the first became the verdict."""
    cascade: list[Finding] = []
    """Echoes of the first failure: what they are, so that nobody chases them."""
    num_files: int = 0
    num_lines: int = 0
    num_events: int = 0
    ranks_seen: list[int] = []
    marks: list[Mark] = []
    """What happened when and where, thinned out; empty unless someone draws it."""
    waits: list[Wait] = []
    notes: list[str] = []
    """Files that could not be read, truncated dumps, clock skew applied."""
