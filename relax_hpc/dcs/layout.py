"""The algebra of weights: which box of which canonical (Hugging Face) tensor a rank holds.

Pure functions; no torch, no files, no network. Bytes travel raw with the name of their dtype,
because numpy has no bfloat16.
"""

import math
import typing
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from relax_hpc.errors import WeightSyncError

DTYPE_BYTES: typing.Final[Mapping[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element by dtype name: str(torch.dtype) without the leading `torch.`."""


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A rectangle of one tensor: elements start[i] <= index[i] < stop[i]. A scalar has no axes."""

    name: str
    """Canonical (Hugging Face) name of the tensor."""
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Length along each axis."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into an array of the whole tensor."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def __str__(self) -> str:
        ranges = ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True))
        return f"{self.name}[{ranges}]"


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """A whole canonical tensor."""

    name: str
    dtype: str
    """A key of DTYPE_BYTES."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.size * itemsize(self.dtype, self.name)

    def whole(self) -> Box:
        """The box of all elements."""
        return Box(self.name, (0,) * len(self.shape), self.shape)


class HostTensor(typing.NamedTuple):
    """A tensor, or a box of one, in host memory as raw bytes.

    `torch.from_numpy(t.data).view(getattr(torch, t.dtype)).reshape(t.shape)` makes a torch view.
    """

    dtype: str
    """A key of DTYPE_BYTES."""
    shape: tuple[int, ...]
    data: np.ndarray
    """uint8, read-only, possibly mapped from shared memory: [nbytes] in C order of `shape`; a box
    that is a part of a larger mapped one is a strided view [..., shape[-1] * bytes of an element].
    """


def itemsize(dtype: str, name: str = "") -> int:
    """Bytes of one element of a dtype name; WeightSyncError for a name that nobody can read."""
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        raise WeightSyncError(
            f"tensor {name}: dtype {dtype!r} is unknown; valid: {', '.join(DTYPE_BYTES)}"
        ) from None


def intersect(a: Box, b: Box) -> Box | None:
    """Elements that are in both boxes; None when there are none (or the tensors differ)."""
    if a.name != b.name or len(a.start) != len(b.start):
        return None
    start = tuple(map(max, a.start, b.start))
    stop = tuple(map(min, a.stop, b.stop))
    if any(lo >= hi for lo, hi in zip(start, stop, strict=True)):
        return None
    return Box(a.name, start, stop)


def subtract(box: Box, hole: Box) -> list[Box]:
    """Cut `hole` out of `box`: disjoint boxes of what is left, at most two per axis."""
    common = intersect(box, hole)
    if common is None:
        return [box] if box.size else []
    left = []
    start, stop = list(box.start), list(box.stop)
    for axis in range(len(start)):
        for lo, hi in ((start[axis], common.start[axis]), (common.stop[axis], stop[axis])):
            if lo < hi:
                part_start, part_stop = list(start), list(stop)
                part_start[axis], part_stop[axis] = lo, hi
                left.append(Box(box.name, tuple(part_start), tuple(part_stop)))
        start[axis], stop[axis] = common.start[axis], common.stop[axis]
    return left


def check_coverage(specs: Sequence[TensorSpec], boxes: Mapping[int, Iterable[Box]]) -> None:
    """Prove that the boxes of all ranks hold every element of every tensor exactly once.

    Args:
        specs: The whole canonical tensors; names are unique.
        boxes: Boxes by shard rank. Boxes without elements are allowed and hold nothing.

    Raises:
        WeightSyncError: names the first tensor and range that is missing, held twice, outside of
            its tensor, or of a tensor that no spec names.
    """
    by_name = {spec.name: spec for spec in specs}
    if len(by_name) != len(specs):
        raise WeightSyncError("weight specs: a tensor name occurs twice; names must be unique")
    held: dict[str, list[tuple[Box, int]]] = {name: [] for name in by_name}
    for rank, of_rank in boxes.items():
        for box in of_rank:
            check_inside(by_name.get(box.name), box, rank)
            if box.size:
                held[box.name].append((box, rank))
    for name, owned in held.items():
        _check_tensor(by_name[name], owned)


def check_inside(spec: TensorSpec | None, box: Box, rank: int) -> None:
    """Raise WeightSyncError unless the box lies within its tensor."""
    if spec is None:
        raise WeightSyncError(
            f"shard of rank {rank} holds {box}, but no tensor {box.name!r} is in the specs"
        )
    inside = len(box.start) == len(box.stop) == len(spec.shape) and all(
        0 <= a <= b <= n for a, b, n in zip(box.start, box.stop, spec.shape, strict=False)
    )
    if not inside:
        raise WeightSyncError(
            f"shard of rank {rank} holds {box.name}{list(box.start)}:{list(box.stop)}, which is "
            f"outside of the tensor's shape {list(spec.shape)}"
        )


def _check_tensor(spec: TensorSpec, owned: list[tuple[Box, int]]) -> None:
    """Disjoint boxes inside the tensor whose sizes add up to its size cover it exactly once."""
    owned.sort(key=lambda item: item[0].start)
    active: list[tuple[Box, int]] = []  # boxes that may still overlap along the first axis
    for box, rank in owned:
        active = [a for a in active if not box.start or a[0].stop[0] > box.start[0]]
        for other, other_rank in active:
            common = intersect(box, other)
            if common is not None:
                raise WeightSyncError(
                    f"weights {common} are held twice, by the shards of rank {other_rank} and "
                    f"{rank}; exactly one rank must publish an element"
                )
        active.append((box, rank))
    if sum(box.size for box, _ in owned) != spec.size:
        gap = _first_gap(spec, [box for box, _ in owned])
        raise WeightSyncError(
            f"weights {gap} are held by no shard (tensor shape {list(spec.shape)}, ranks "
            f"{sorted({rank for _, rank in owned})} hold the rest); publish every element once"
        )


def _first_gap(spec: TensorSpec, boxes: list[Box]) -> Box:
    left = [spec.whole()]
    for box in boxes:
        left = [part for rest in left for part in subtract(rest, box)]
    return min(left, key=lambda part: part.start)
