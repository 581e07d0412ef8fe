"""Training repeats itself: predict the next operation, find where a rank left its rhythm."""

import typing
from collections.abc import Sequence

import msgspec

Key = typing.TypeVar("Key")

MAX_PERIOD = 512
"""Operations of one train step that are recognised as one; a ring buffer holds 2000 entries."""
_WINDOW = 64


def find_period(history: Sequence[Key]) -> int:
    """Return the longest period whose last two rounds are equal, 0 if none.

    The longest one counts: inside a train step short ones come and go.
    """
    for period in range(min(MAX_PERIOD, len(history) // 2), 0, -1):
        length = max(2, period)
        if length + period <= len(history) and all(
            history[-1 - i] == history[-1 - i - period] for i in range(length)
        ):
            return period
    return 0


def predict(history: Sequence[Key]) -> Key | None:
    """Return what comes next if the history repeats itself."""
    period = find_period(history)
    return history[-period] if period else None


class Break(msgspec.Struct, typing.Generic[Key], frozen=True):
    """Where a history stopped repeating itself."""

    index: int
    expected: Key
    got: Key
    is_skip: bool
    """Whether what came is what was expected next but one."""


def find_break(history: Sequence[Key]) -> Break[Key] | None:
    """Find the newest deviation from the longest rhythm, unless a whole period followed it."""
    first = max(len(history) - _WINDOW, 2)
    pasts = {
        index: history[max(0, index - 3 * MAX_PERIOD) : index]
        for index in range(len(history) - 1, first - 1, -1)
    }
    periods = {index: find_period(past) for index, past in pasts.items()}
    longest = max(periods.values(), default=0)
    for index, past in pasts.items():
        period = periods[index]
        if period == 0 or 2 * period < longest or index < len(history) - longest:
            continue
        expected = past[-period]
        if expected != history[index]:
            is_skip = predict([*past, expected]) == history[index]
            return Break(index, expected, history[index], is_skip)
    return None
