"""Training repeats itself: predict the next operation, find where a rank left its rhythm."""

import typing
from collections.abc import Sequence

import msgspec

Key = typing.TypeVar("Key")

MAX_PERIOD = 512
"""Operations of one train step that are recognised as one; a ring buffer holds 2000 entries."""
_WINDOW = 64


def predict(history: Sequence[Key]) -> Key | None:
    """Return what comes next if the history repeats itself: the last two periods are equal."""
    for period in range(1, min(MAX_PERIOD, len(history) // 2) + 1):
        length = max(2, period)
        if length + period > len(history):
            return None
        if all(history[-1 - i] == history[-1 - i - period] for i in range(length)):
            return history[-period]
    return None


class Break(msgspec.Struct, typing.Generic[Key], frozen=True):
    """Where a history stopped repeating itself."""

    index: int
    expected: Key
    got: Key
    is_skip: bool
    """Whether what came is what was expected next but one."""


def find_break(history: Sequence[Key]) -> Break[Key] | None:
    """Find the newest deviation that was not followed by a whole period, or None."""
    end = len(history)
    for index in range(end - 1, max(end - 1 - _WINDOW, 2), -1):
        past = history[max(0, index - 3 * MAX_PERIOD) : index]
        expected = predict(past)
        if expected is None or expected == history[index]:
            continue
        after = predict([*past, expected])
        return Break(index, expected, history[index], after == history[index])
    return None
