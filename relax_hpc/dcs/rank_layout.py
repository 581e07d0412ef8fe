"""A layout: which boxes of which canonical tensors every rank of one side holds.

Layers, experts and replicas repeat, so that a layout names each distinct way to spread a tensor
once (`Sharding`) and gives every tensor the number of its way: 36,000 tensors on 1,000 ranks stay a
few hundred shardings.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import xxhash

from relax_hpc.dcs.layout import Box, TensorSpec, check_inside, itemsize
from relax_hpc.errors import WeightSyncError

Range = tuple[tuple[int, ...], tuple[int, ...]]
"""start and stop of a box whose tensor is known."""
Interval = tuple[int, int]
"""First row (or column) and the one behind the last."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sharding:
    """One way to spread a tensor: its distinct boxes, and the ranks that hold each of them."""

    ranges: tuple[Range, ...]
    """Sorted, each once, none empty."""
    holders: tuple[tuple[int, ...], ...]
    """Per range: ascending ranks, at least one."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Boxes of all ranks of one side (all trainer ranks, or all ranks of all engines)."""

    num_ranks: int
    specs: tuple[TensorSpec, ...]
    shardings: tuple[Sharding, ...]
    """Each distinct one once, in order of first use."""
    sharding_of: tuple[int, ...]
    """Per tensor of `specs`: index into `shardings`."""

    @functools.cached_property
    def digest(self) -> int:
        """xxh3-64 of the whole layout; equal layouts have equal digests in every process."""
        ways = [(way.ranges, way.holders) for way in self.shardings]
        whole = (self.num_ranks, self.specs, ways, self.sharding_of)
        return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(whole))

    @functools.cached_property
    def rank_bytes(self) -> np.ndarray:
        """Bytes that each rank holds: int64 [num_ranks]."""
        total = np.zeros(self.num_ranks, dtype=np.int64)
        for way, element_bytes in zip(self.shardings, self._element_bytes(), strict=True):
            for (start, stop), ranks in zip(way.ranges, way.holders, strict=True):
                total[list(ranks)] += size_of(start, stop) * element_bytes
        return total

    def _element_bytes(self) -> list[int]:
        """Per sharding: bytes of one element, summed over the tensors that are spread so."""
        sums = [0] * len(self.shardings)
        for spec, number in zip(self.specs, self.sharding_of, strict=True):
            sums[number] += itemsize(spec.dtype, spec.name)
        return sums

    def copies_bytes(self, cell: Sequence[int]) -> int:
        """Bytes when the ranks of one cell (a node) keep one copy of a box that several hold.

        Args:
            cell: Number of each rank's cell, [num_ranks].
        """
        total = 0
        for way, element_bytes in zip(self.shardings, self._element_bytes(), strict=True):
            for (start, stop), ranks in zip(way.ranges, way.holders, strict=True):
                total += len({cell[r] for r in ranks}) * size_of(start, stop) * element_bytes
        return total

    def boxes_of(self, rank: int) -> list[Box]:
        """List the boxes of one rank, in order of the tensors."""
        held = [
            [box for box, ranks in zip(way.ranges, way.holders, strict=True) if rank in ranks]
            for way in self.shardings
        ]
        pairs = zip(self.specs, self.sharding_of, strict=True)
        return [Box(spec.name, *box) for spec, number in pairs for box in held[number]]


class LayoutBuilder:
    """Collects tensors one by one and gives equal shardings one number."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._specs: list[TensorSpec] = []
        self._sharding_of: list[int] = []
        self._numbers: dict[Sharding, int] = {}
        self._seen: dict[int, tuple[Sharding, int]] = {}  # by id: hashing long tuples is slow

    def add(self, spec: TensorSpec, sharding: Sharding) -> None:
        """Append a tensor that at least one rank holds."""
        known = self._seen.get(id(sharding))
        if known is None:
            number = self._numbers.setdefault(sharding, len(self._numbers))
            known = self._seen[id(sharding)] = (sharding, number)  # kept alive: ids stay unique
        self._specs.append(spec)
        self._sharding_of.append(known[1])

    def build(self) -> Layout:
        """Make the layout of what was added."""
        specs, numbers = tuple(self._specs), tuple(self._sharding_of)
        return Layout(self._num_ranks, specs, tuple(self._numbers), numbers)


def layout_of_boxes(specs: Sequence[TensorSpec], boxes: Mapping[int, Iterable[Box]]) -> Layout:
    """Make the layout of boxes that each rank lists itself (traced from a weight loader).

    Args:
        specs: Whole tensors; names are unique.
        boxes: By rank 0 .. n - 1; boxes without elements are ignored.

    Raises:
        WeightSyncError: a box outside of its tensor, or of a tensor that no spec names.
    """
    by_name = {spec.name: spec for spec in specs}
    held: dict[str, dict[Range, list[int]]] = {spec.name: {} for spec in specs}
    for rank in sorted(boxes):
        for box in boxes[rank]:
            check_inside(by_name.get(box.name), box, rank)
            ranks = held[box.name].setdefault((box.start, box.stop), [])
            if box.size and rank not in ranks[-1:]:
                ranks.append(rank)
    builder = LayoutBuilder(max(boxes, default=-1) + 1)
    for spec in specs:
        if any(held[spec.name].values()):
            builder.add(spec, _sharding(held[spec.name]))
    return builder.build()


def spread(
    shape: tuple[int, ...], axis: int, shares: Sequence[tuple[Interval, Sequence[int]]]
) -> Sharding:
    """Cut a tensor along one axis.

    Args:
        shape: Of the whole tensor.
        axis: That is cut; other axes stay whole.
        shares: (interval, ranks that hold it); equal intervals are merged, empty ones hold nothing.
    """
    held: dict[Range, list[int]] = {}
    for (first, behind), ranks in shares:
        start, stop = [0] * len(shape), list(shape)
        start[axis], stop[axis] = first, behind
        held.setdefault((tuple(start), tuple(stop)), []).extend(int(rank) for rank in ranks)
    return _sharding(held)


def whole(shape: tuple[int, ...], ranks: Sequence[int]) -> Sharding:
    """All of a tensor on every one of the ranks."""
    return _sharding({((0,) * len(shape), shape): [int(rank) for rank in ranks]})


def size_of(start: Sequence[int], stop: Sequence[int]) -> int:
    """Number of elements of a box."""
    return math.prod(b - a for a, b in zip(start, stop, strict=True))


def divide(count: int, parts: int, what: str) -> int:
    """Exact quotient; WeightSyncError when the parts would be unequal."""
    if parts < 1 or count % parts:
        raise WeightSyncError(f"{what}={count} does not divide into {parts} equal parts")
    return count // parts


def even(count: int, parts: int, what: str) -> list[Interval]:
    """Cut `count` rows into equal intervals."""
    size = divide(count, parts, what)
    return [(part * size, (part + 1) * size) for part in range(parts)]


def padded(count: int, multiple: int, parts: int) -> list[Interval]:
    """Cut rows that are padded to a multiple into equal intervals of real rows; some are empty."""
    total = -(-count // multiple) * multiple
    pairs = even(total, parts, "padded vocabulary")
    return [(min(first, count), min(behind, count)) for first, behind in pairs]


def _sharding(held: Mapping[Range, Iterable[int]]) -> Sharding:
    full = sorted((box, tuple(sorted(set(ranks)))) for box, ranks in held.items())
    kept = [(box, ranks) for box, ranks in full if ranks and size_of(*box)]
    return Sharding(tuple(box for box, _ in kept), tuple(ranks for _, ranks in kept))
