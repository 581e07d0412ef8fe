"""Draw curves with characters."""

import math
from collections.abc import Mapping, Sequence

_MARKS = "o.+x*"
"""One per series; the first series is drawn last, on top."""


def draw_curves(
    curves: Mapping[str, Sequence[tuple[int, float]]], width: int = 72, height: int = 14
) -> list[str]:
    """Draw series of (train step, value) into one chart of ASCII lines.

    Args:
        curves: name -> points; points that are not finite are left out.
        width: characters of a line, at least 30.
        height: lines of the plot area, at least 3.

    Returns:
        Lines without line ends; [] when there is no point.
    """
    clean = {
        name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in curves.items()
    }
    clean = {name: points for name, points in clean.items() if points}
    if not clean:
        return []
    xs = [x for points in clean.values() for x, _ in points]
    low, high = _range([y for points in clean.values() for _, y in points])
    columns, rows = max(30, width) - 10, max(3, height)
    grid = [[" "] * columns for _ in range(rows)]
    marks = dict(zip(clean, _MARKS * len(clean), strict=False))
    for name, points in reversed(clean.items()):
        for x, y in points:
            column = _scale(x, min(xs), max(xs), columns)
            grid[rows - 1 - _scale(y, low, high, rows)][column] = marks[name]
    legend = "   ".join(
        f"{marks[name]} {name} {points[-1][1]:.3g}" for name, points in clean.items()
    )
    return [legend, *_frame(grid, low, high), _axis(min(xs), max(xs), columns)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low >= 0 and high <= 1 and high - low > 0.05:
        return 0.0, 1.0  # accuracies: the whole scale says more than a magnified piece
    if high - low < 1e-9 * max(1.0, abs(high)):
        return low - 0.5, high + 0.5
    return low, high


def _scale(value: float, low: float, high: float, cells: int) -> int:
    if high <= low:
        return 0
    return min(cells - 1, max(0, round((value - low) / (high - low) * (cells - 1))))


def _frame(grid: list[list[str]], low: float, high: float) -> list[str]:
    rows = len(grid)
    lines = []
    for row, cells in enumerate(grid):
        value = high - (high - low) * row / (rows - 1)
        label = f"{value:8.3g}" if row in (0, rows // 2, rows - 1) else " " * 8
        lines.append(f"{label} |{''.join(cells)}".rstrip())
    return lines


def _axis(first: int, last: int, columns: int) -> str:
    right = f"{last} train steps"
    return " " * 10 + str(first) + right.rjust(columns - len(str(first)))
