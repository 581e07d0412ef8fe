"""The picture of a report as SVG: one lane per rank or node, time to the right, arrows for waits.

Ranks that tell the same story share a lane, so that a thousand ranks fit on a page; the ranks at
fault always have their own. Everything that comes from a log is escaped.
"""

import dataclasses
import datetime
import html
from collections.abc import Iterable, Sequence

from relax_hpc.postmortem.printable import number_ranges, printable
from relax_hpc.postmortem.verdict import Mark, Report, Wait

_MAX_LANES = 48
_MAX_OWN_LANES = 16
"""Up to so many ranks each get a lane even if they tell the same story."""
_MAX_MARKS_OF_LANE = 120
_MAX_ARROWS = 64

_LEFT, _RIGHT, _PLOT = 230, 190, 700
_ROW, _TOP = 26, 24

FAMILIES = {
    "hardware": ("gpu_fault", "link_event"),
    "network": ("net_error", "peer_lost"),
    "memory": ("out_of_memory",),
    "waiting": ("collective_timeout", "heartbeat", "dump_signal", "rank_absent", "ras"),
    "mismatch": ("collective_mismatch",),
    "program": ("exception", "cuda_error", "process_exit"),
    "scheduler": ("scheduler", "launcher_error"),
    "storage": ("storage",),
    "progress": ("phase", "work_status"),
}
"""Kinds of events by colour."""

_FAMILY = {kind: family for family, kinds in FAMILIES.items() for kind in kinds}


@dataclasses.dataclass(slots=True)
class Lane:
    """One row of the picture."""

    label: str
    ranks: tuple[int, ...] = ()
    is_at_fault: bool = False
    marks: list[Mark] = dataclasses.field(default_factory=list)


def lanes(report: Report) -> tuple[list[Lane], int]:
    """Return the lanes to draw and how many did not fit."""
    verdict = report.verdict
    of_rank: dict[int, list[Mark]] = {rank: [] for rank in sorted(verdict.ranks)}
    of_place: dict[str, list[Mark]] = {}
    for mark in report.marks:
        if mark.rank is not None:
            of_rank.setdefault(mark.rank, []).append(mark)
        else:
            of_place.setdefault(mark.node or "job", []).append(mark)
    for wait in report.waits:
        of_rank.setdefault(wait.rank, [])
        of_rank.setdefault(wait.on, [])
    own = [Lane(f"rank {r}", (r,), True, of_rank.pop(r)) for r in sorted(set(verdict.ranks))]
    places = [
        Lane(printable(place, 28), (), place in verdict.nodes, marks)
        for place, marks in of_place.items()
    ]
    places.sort(key=lambda lane: not lane.is_at_fault)
    found = [*own, *places, *_rank_lanes(of_rank, report.waits)]
    return found[:_MAX_LANES], max(0, len(found) - _MAX_LANES)


def _rank_lanes(of_rank: dict[int, list[Mark]], waits: Sequence[Wait]) -> list[Lane]:
    if len(of_rank) <= _MAX_OWN_LANES:
        return [Lane(f"rank {r}", (r,), False, of_rank[r]) for r in sorted(of_rank)]
    on: dict[int, set[int]] = {}
    for wait in waits:
        on.setdefault(wait.rank, set()).add(wait.on)
    stories: dict[tuple[object, ...], list[int]] = {}
    for rank in sorted(of_rank):
        kinds = tuple(mark.kind for mark in of_rank[rank])
        stories.setdefault((kinds, tuple(sorted(on.get(rank, ())))), []).append(rank)
    found = []
    for ranks in stories.values():
        marks = [mark for rank in ranks for mark in of_rank[rank]]
        label = f"rank{'s' * (len(ranks) > 1)} {number_ranges(ranks, 4)}"
        found.append(Lane(label, tuple(ranks), False, _thin(marks, _MAX_MARKS_OF_LANE)))
    return found


def _thin(marks: list[Mark], limit: int) -> list[Mark]:
    if len(marks) <= limit:
        return marks
    return [marks[i * len(marks) // limit] for i in range(limit)]


def draw(report: Report) -> str:
    """Return the picture as an SVG element, or "" when there is nothing to draw."""
    rows, num_left_out = lanes(report)
    if not any(lane.marks for lane in rows) and not report.waits:
        return ""
    place = _Places([mark for lane in rows for mark in lane.marks])
    height = _TOP + _ROW * len(rows) + 30
    width = _LEFT + _PLOT + _RIGHT
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" '
        'aria-label="events of each rank over time">'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" class="arrowtip"/></marker></defs>'
    ]
    parts += place.axis(height)
    for number, lane in enumerate(rows):
        parts += _draw_lane(lane, _TOP + _ROW * number + _ROW // 2, place)
    parts += _draw_waits(rows, report.waits)
    parts.append("</svg>")
    if num_left_out:
        parts.append(f"<p>{num_left_out} more lanes are not drawn.</p>")
    return "\n".join(parts)


class _Places:
    """Where a mark stands: by its time; marks without one by their order, in a strip before it."""

    def __init__(self, marks: Iterable[Mark]) -> None:
        drawn = list(marks)
        times = [mark.time for mark in drawn if mark.time is not None]
        self._order = {id(mark): n for n, mark in enumerate(m for m in drawn if m.time is None)}
        self._low, self._high = min(times, default=0.0), max(times, default=0.0)
        if not times:
            self._strip = 1.0
        else:
            self._strip = 0.15 if self._order else 0.0
        self._has_times = bool(times)

    def x(self, mark: Mark) -> float:
        """Return the horizontal position."""
        if mark.time is None:
            share = (self._order[id(mark)] + 0.5) / len(self._order) * self._strip * 0.95
        else:
            span = self._high - self._low
            part = (mark.time - self._low) / span if span > 0 else 0.5
            share = self._strip + (0.01 + 0.98 * part) * (1 - self._strip)
        return _LEFT + _PLOT * share

    def axis(self, height: int) -> list[str]:
        """Return the scale below the lanes."""
        y = height - 12
        left, right = _LEFT + _PLOT * self._strip, _LEFT + _PLOT
        parts = []
        if self._strip:
            parts.append(
                f'<text x="{_LEFT}" y="{y}" class="small">no time stamp: in order of reading</text>'
            )
        if self._has_times:
            span = self._high - self._low
            parts.append(f'<text x="{left:.0f}" y="12" class="small">{_clock(self._low)}</text>')
            parts.append(
                f'<text x="{right}" y="12" class="small" text-anchor="end">'
                f"{_clock(self._high)} (+{span:,.1f} s)</text>"
            )
        return parts


def _clock(time: float) -> str:
    try:
        moment = datetime.datetime.fromtimestamp(time, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return html.escape(f"{time:g}")
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def _draw_lane(lane: Lane, y: int, place: _Places) -> list[str]:
    style = "fault" if lane.is_at_fault else "lane"
    parts = [
        f'<line x1="{_LEFT}" y1="{y}" x2="{_LEFT + _PLOT}" y2="{y}" class="{style}"/>'
        f'<text x="{_LEFT - 10}" y="{y + 4}" text-anchor="end" class="{style}text">'
        f"{html.escape(lane.label)}</text>"
    ]
    for mark in lane.marks:
        family = _FAMILY.get(mark.kind, "progress")
        title = html.escape(f"{mark.kind}: {printable(mark.label)}")
        parts.append(
            f'<circle cx="{place.x(mark):.1f}" cy="{y}" r="5" class="{family}">'
            f"<title>{title}</title></circle>"
        )
    return parts


def _draw_waits(rows: list[Lane], waits: Sequence[Wait]) -> list[str]:
    """Draw one arrow for each pair of lanes, in the column right of the plot."""
    row_of = {rank: number for number, lane in enumerate(rows) for rank in lane.ranks}
    pairs: dict[tuple[int, int], list[Wait]] = {}
    for wait in waits:
        ends = row_of.get(wait.rank), row_of.get(wait.on)
        if ends[0] is not None and ends[1] is not None and ends[0] != ends[1]:
            pairs.setdefault((ends[0], ends[1]), []).append(wait)
    parts = []
    for number, ((start, end), group) in enumerate(list(pairs.items())[:_MAX_ARROWS]):
        y1, y2 = (_TOP + _ROW * row + _ROW // 2 for row in (start, end))
        x = _LEFT + _PLOT + 6
        bend = x + 40 + 90 * (number + 1) / (min(len(pairs), _MAX_ARROWS) + 1)
        what = next((wait.why for wait in group if wait.why), "")
        title = html.escape(
            f"{number_ranges(wait.rank for wait in group)} waited for "
            f"{number_ranges(wait.on for wait in group)} {printable(what, 120)}"
        )
        parts.append(
            f'<path d="M{x} {y1}C{bend:.0f} {y1} {bend:.0f} {y2} {x} {y2}" class="arrow" '
            f'marker-end="url(#tip)"><title>{title}</title></path>'
        )
    return parts
