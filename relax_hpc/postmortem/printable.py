"""Text of strangers' logs for terminals and pages: no escape sequence of theirs gets through."""

import unicodedata
from collections.abc import Iterable

_UNSAFE = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
"""Unicode categories: control, format (also right-to-left overrides), surrogate, private use,
unassigned, line and paragraph separators."""


def printable(text: str, limit: int = 0) -> str:
    """Return one line without control characters, cut in the middle to `limit` characters (0: not).

    A tab becomes a blank, everything else that a terminal could act on is written as an escape.
    """
    if not (text.isascii() and text.isprintable()):
        text = "".join(map(_safe, text))
    if limit and len(text) > limit:
        half = max(1, (limit - 5) // 2)
        text = f"{text[:half]} ... {text[-half:]}"
    return text


def _safe(character: str) -> str:
    if character in "\t\r\n":
        return " "
    if unicodedata.category(character) in _UNSAFE:
        return character.encode("unicode_escape", "backslashreplace").decode("ascii")
    return character


def number_ranges(numbers: Iterable[int], limit: int = 12) -> str:
    """Write ranks as `0-3,7`; at most `limit` pieces, then how many there are in all."""
    ordered = sorted(set(numbers))
    pieces: list[list[int]] = []
    for number in ordered:
        if pieces and number == pieces[-1][-1] + 1:
            pieces[-1][1:] = [number]
        else:
            pieces.append([number])
    text = ",".join("-".join(map(str, piece)) for piece in pieces[:limit])
    return text if len(pieces) <= limit else f"{text},.. ({len(ordered)})"
