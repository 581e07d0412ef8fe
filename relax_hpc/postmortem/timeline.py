"""One order of events from many clocks.

Skew of a node is measured by what all ranks see at nearly the same moment: the dump signal travels
through the TCPStore within about a second, so larger differences are the clocks'.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from relax_hpc.postmortem.evidence import Event, EventKind

MIN_SKEW_S = 3.0
"""Less than this is how long a dump signal may take (poll interval and load)."""

_MAX_SKEW_S = 26 * 3600.0
"""Time zones are skew too; more is another failure, not another clock."""


class Timeline(msgspec.Struct):
    """Events in order, times corrected where that was possible."""

    events: list[Event]
    skew_s: dict[str, float]
    """Node (or `rank N`) to seconds its clock was ahead."""


def order(events: Sequence[Event]) -> Timeline:
    """Sort by corrected time. An event without a stamp keeps its place in its file."""
    skew = _skews(events)
    corrected = [_correct(event, skew) for event in events]
    keys: list[tuple[float, int]] = []
    last: dict[str, float] = {}
    unknown = float("-inf")
    for index, event in enumerate(corrected):
        if event.time is not None:
            last[event.source.file] = event.time
        keys.append((last.get(event.source.file, unknown), index))
    # Lines before the first stamp of a file belong just before that stamp.
    first: dict[str, float] = {}
    for event in corrected:
        if event.time is not None:
            first.setdefault(event.source.file, event.time)
    keys = [
        (first.get(event.source.file, unknown) if time == unknown else time, index)
        for (time, index), event in zip(keys, corrected, strict=True)
    ]
    ordered = [corrected[index] for _, index in sorted(keys)]
    return Timeline(events=ordered, skew_s={name: value for name, value in skew.items() if value})


def _clock(event: Event) -> str:
    return event.node or ("" if event.rank is None else f"rank {event.rank}")


def _skews(events: Sequence[Event]) -> dict[str, float]:
    seen: dict[str, dict[str, float]] = defaultdict(dict)
    for event in events:
        if event.kind is EventKind.DUMP_SIGNAL and event.time is not None and _clock(event):
            name = str(event.attrs.get("from_rank", ""))
            if name and not event.attrs.get("local"):
                seen[name].setdefault(_clock(event), event.time)
    offsets: dict[str, list[float]] = defaultdict(list)
    for times in seen.values():
        if len(times) < 3:  # with two clocks nobody knows which one is wrong
            continue
        middle = statistics.median(times.values())
        for clock, time in times.items():
            offsets[clock].append(time - middle)
    return {
        clock: skew
        for clock, values in offsets.items()
        if MIN_SKEW_S < abs(skew := statistics.median(values)) < _MAX_SKEW_S
    }


def _correct(event: Event, skew: dict[str, float]) -> Event:
    offset = skew.get(_clock(event), 0.0)
    if event.time is None or not offset:
        return event
    return msgspec.structs.replace(event, time=event.time - offset)
