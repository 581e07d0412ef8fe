"""What a rule hands to the judge."""

from collections.abc import Sequence

import msgspec

from relax_hpc.postmortem.evidence import Event, Source
from relax_hpc.postmortem.verdict import Alternative, Confidence, Finding

ESTABLISHED, LIKELY, UNDETERMINED = (
    Confidence.ESTABLISHED,
    Confidence.LIKELY,
    Confidence.UNDETERMINED,
)
MAX_EVIDENCE = 12


class Proposal(msgspec.Struct):
    """A finding, its place in the order of rules, and what speaks for rivals."""

    order: int
    """Smaller wins. The tens: hardware 10, kernels 20, memory 30, set-up 40,
    exceptions 45, network 50, processes 60, collectives 70, scheduler 15 or 80."""
    finding: Finding
    alternatives: list[Alternative] = []


def propose(  # noqa: PLR0913 - a finding has that many parts, all by keyword
    order: int,
    name: str,
    confidence: Confidence,
    sentence: str,
    *,
    events: Sequence[Event] = (),
    ranks: Sequence[int] = (),
    nodes: Sequence[str] = (),
    links: Sequence[str] = (),
    alternatives: Sequence[tuple[str, str]] = (),
) -> Proposal:
    """Build a proposal; evidence and time come from `events`."""
    times = [event.time for event in events if event.time is not None]
    return Proposal(
        order=order,
        finding=Finding(
            class_=name,
            confidence=confidence,
            sentence=sentence,
            ranks=sorted(set(ranks)),
            nodes=list(dict.fromkeys(nodes)),
            links=list(dict.fromkeys(links)),
            evidence=_sources(events),
            time=min(times, default=None),
        ),
        alternatives=[Alternative(class_=other, reason=reason) for other, reason in alternatives],
    )


def _sources(events: Sequence[Event]) -> list[Source]:
    sources = list(dict.fromkeys(event.source for event in events))
    if len(sources) <= MAX_EVIDENCE:
        return sources
    return [*sources[: MAX_EVIDENCE - 2], *sources[-2:]]


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-6, 8` for sentences."""
    if not ranks:
        return "no rank"
    parts: list[str] = []
    numbers = sorted(set(ranks))
    start = previous = numbers[0]
    for number in [*numbers[1:], -2]:
        if number != previous + 1:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = number
        previous = number
    text = ", ".join(parts[:8]) + (", ..." if len(parts) > 8 else "")
    return ("rank " if len(numbers) == 1 else "ranks ") + text
