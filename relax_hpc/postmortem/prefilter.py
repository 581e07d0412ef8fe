"""Find the lines that hold one of some hundred literals, at hundreds of MB/s, with NumPy alone.

An alternation of that many words costs `re` about 1 us per byte, `bytes.find` per word as much in
sum. Here every literal is known by its rarest four bytes: all 4-byte windows of a block are hashed
at once and looked up in a table; only the few that remain are compared with the literals.
"""

import functools
from collections.abc import Iterator, Sequence

import numpy as np

_MULTIPLIER = np.uint32(2654435761)  # Knuth's multiplicative hash
_SHIFT = np.uint32(16)
_CHUNK = 1 << 16  # windows per step: hashes, indices and flags stay in the second-level cache
_GRAM = 4

_COMMON = {letter: place for place, letter in enumerate(reversed(" etaoinsrhldcumfpgwybvkxjqz"))}
_COMMON |= dict.fromkeys("0123456789:.[]()-_/=", 20)
_EVERYWHERE = (
    b" NCC",
    b"CCL ",
    *b"rank Rank NCCL INFO loss Init cuda CUDA ning rain step iter epoc time rate".split(),
)
"""In most lines of a training log ("learning rate"): each would be compared with its literals."""


class Prefilter:
    """Positions of literals in bytes. Every literal has at least 4 bytes."""

    def __init__(self, literals: Sequence[str]) -> None:
        self._literals: dict[bytes, list[tuple[int, bytes]]] = {}
        for literal in sorted({text.encode() for text in literals}):
            if len(literal) < _GRAM:
                raise ValueError(f"literal {literal!r}: shorter than {_GRAM} bytes")
            offset = min(range(len(literal) - _GRAM + 1), key=lambda i: _frequency(literal, i))
            gram = literal[offset : offset + _GRAM]
            self._literals.setdefault(gram, []).append((offset, literal))
        keys = sorted(int.from_bytes(gram, "little") for gram in self._literals)
        self._keys = np.array(keys, dtype=np.uint32)
        self._table = np.zeros(1 << 16, dtype=np.bool_)
        self._table[(self._keys * _MULTIPLIER) >> _SHIFT] = True

    def lines(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of every line that holds a literal; the end includes the newline."""
        end = 0
        for position in self._candidates(data):
            if position >= end and self._is_literal(data, position):
                start = data.rfind(b"\n", 0, position) + 1
                end = data.find(b"\n", position) + 1 or len(data)
                yield start, end

    def _is_literal(self, data: bytes, position: int) -> bool:
        for offset, literal in self._literals.get(data[position : position + _GRAM], ()):
            if position >= offset and data.startswith(literal, position - offset):
                return True
        return False

    def _candidates(self, data: bytes) -> list[int]:
        """Positions whose four bytes are a key, in order."""
        found: list[np.ndarray] = []
        last = self._keys.size - 1
        for offset in range(_GRAM):
            count = (len(data) - offset) // _GRAM
            if count <= 0:
                continue
            # A copy, so that the view is aligned: arithmetic on unaligned views is slower.
            shifted = data[offset : offset + count * _GRAM]
            windows = np.frombuffer(shifted, dtype="<u4")
            for start in range(0, count, _CHUNK):
                part = windows[start : start + _CHUNK]
                places = np.flatnonzero(self._table[(part * _MULTIPLIER) >> _SHIFT])
                if places.size:
                    values = part[places]
                    near = np.searchsorted(self._keys, values)
                    places = places[self._keys[np.minimum(near, last)] == values]
                    found.append((places + start) * _GRAM + offset)
        return np.sort(np.concatenate(found)).tolist() if found else []


@functools.cache
def prefilter(literals: tuple[str, ...]) -> Prefilter:
    """Prefilter of these literals, built once per process."""
    return Prefilter(literals)


def _frequency(literal: bytes, offset: int) -> int:
    """How common four bytes are in ordinary logs, roughly: blanks and frequent letters are."""
    gram = literal[offset : offset + _GRAM].decode("latin-1")
    everywhere = 100 if literal[offset : offset + _GRAM] in _EVERYWHERE else 0
    return everywhere + sum(_COMMON.get(letter, 6) for letter in gram)
