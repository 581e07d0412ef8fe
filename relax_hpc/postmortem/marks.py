"""Thin the events of a job out to what a picture can hold: marks per lane, and who waited."""

from collections.abc import Iterable, Sequence

from relax_hpc.postmortem.evidence import Event, EventKind, Source
from relax_hpc.postmortem.printable import printable
from relax_hpc.postmortem.verdict import Mark, Report, Wait

_MAX_MARKS = 8192
_MAX_WAITS = 4096
_LABEL_LENGTH = 160

_UNSEEN = frozenset((EventKind.CONFIG_NOTE,))
_WAITING = frozenset((EventKind.COLLECTIVE_TIMEOUT, EventKind.HEARTBEAT))


def marks_of(events: Iterable[Event]) -> list[Mark]:
    """Return the first and the last event of each kind in each lane, in the order of the events."""
    first: dict[tuple[object, ...], int] = {}
    last: dict[tuple[object, ...], int] = {}
    kept: dict[int, Event] = {}
    for number, event in enumerate(events):
        if event.kind in _UNSEEN:
            continue
        key = (event.rank, event.node if event.rank is None else "", event.kind)
        if key not in first:
            first[key] = number
        else:
            kept.pop(last.get(key, -1), None)
            last[key] = number
        kept[number] = event
    return [_mark(kept[number]) for number in sorted(kept)[:_MAX_MARKS]]


def _mark(event: Event) -> Mark:
    return Mark(
        rank=event.rank,
        node=event.node,
        time=event.time,
        kind=event.kind.value,
        label=source_text(event.source, _LABEL_LENGTH),
    )


def source_text(source: Source, limit: int = 0) -> str:
    """Write a source as `file:line text`."""
    place = f"{source.file}:{source.line}" if source.line else source.file
    return f"{printable(place)} {printable(source.text, limit)}".rstrip()


def waits_of(events: Iterable[Event], culprits: Sequence[int]) -> list[Wait]:
    """Return an arrow to each culprit from each rank that says it waited in a collective."""
    told: dict[int, str] = {}
    for event in events:
        if event.kind in _WAITING and event.rank is not None and event.rank not in culprits:
            told.setdefault(event.rank, _waited_for(event))
    arrows = [Wait(rank=r, on=c, why=why) for c in culprits for r, why in sorted(told.items())]
    return arrows[:_MAX_WAITS]


def _waited_for(event: Event) -> str:
    number = "" if event.seq is None else str(event.seq)
    group = event.group.name or event.group.uid if event.group else ""
    return " ".join(filter(None, (event.op, number, f"of {group}" if group else "")))


def add_picture(report: Report, events: Sequence[Event]) -> Report:
    """Fill `marks` and, where no rule drew them, `waits` of a report."""
    report.marks = marks_of(events)
    if not report.waits:
        report.waits = waits_of(events, report.verdict.ranks)
    return report
