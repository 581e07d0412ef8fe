"""Which bytes one reader pulls from which shard: the plan of a fetch.

    wanted boxes     less what an earlier one has already (that is copied)  -> parts
    parts            cut where the set of shards that hold them changes     -> atoms
    an atom          of one shard: read from it
                     of several: from the nearest; equally near ones share it by bytes

Pure: no torch, no files, no network. A reader's plan needs the manifests of one version only, and
is the same in every process that makes it from the same arguments.
"""

import collections
import dataclasses
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence

from relax_hpc.dcs.layout import Box, TensorSpec, intersect, itemsize, subtract
from relax_hpc.dcs.store import ShardManifest
from relax_hpc.errors import WeightSyncError

_UNIT_BYTES = 1 << 20  # shared work is dealt out in units of this: more cuts gain no balance

_Holder = tuple[int, int]  # (index of the shard, index of its piece)


class Read(typing.NamedTuple):
    """A box of one piece, and the wanted box that it is a part of."""

    piece: int
    """Index into the manifest's pieces."""
    box: Box
    target: int
    """Index into `PullPlan.wanted`."""


class Copy(typing.NamedTuple):
    """A part of a wanted box that another wanted box has as well."""

    source: int
    target: int
    """Indices into `PullPlan.wanted`."""
    box: Box


@dataclasses.dataclass(frozen=True, slots=True)
class PullPlan:
    """What to read; build it with `plan_pull`."""

    wanted: tuple[Box, ...]
    """Each once, in the caller's order."""
    dtypes: tuple[str, ...]
    """Of the wanted boxes."""
    reads: tuple[tuple[Read, ...], ...]
    """Of each shard, in the order of the manifests."""
    copies: tuple[Copy, ...]
    """In this order, after all reads."""

    def nbytes(self, read: Read) -> int:
        """Bytes of one read."""
        return read.box.size * itemsize(self.dtypes[read.target], read.box.name)

    @property
    def shard_bytes(self) -> list[int]:
        """Bytes that are read from each shard."""
        return [sum(map(self.nbytes, reads)) for reads in self.reads]

    @property
    def minimum_bytes(self) -> int:
        """Bytes of all wanted boxes together, those that are in several counted once."""
        return sum(self.shard_bytes)


def plan_pull(
    specs: Sequence[TensorSpec],
    shards: Sequence[ShardManifest],
    boxes: Iterable[Box] | None = None,
    *,
    distance: Callable[[str], int] = lambda node: 0,
    reader: int = 0,
    unit_bytes: int = _UNIT_BYTES,
) -> PullPlan:
    """Plan one fetch: every wanted byte is read exactly once.

    Args:
        specs: All whole tensors of the version.
        shards: Its manifests. Several may hold the same bytes; then these are equal.
        boxes: What is wanted; None: all tensors, whole. Boxes may repeat and overlap.
        distance: Of a node from the reader: what is nearer is read rather.
        reader: Number of the reader: equally good shards are taken in another order by each.
        unit_bytes: Larger atoms of several shards are cut before they are dealt out.

    Raises:
        WeightSyncError: a wanted box of no tensor or outside of its tensor, or a part of it that
            no shard holds.
    """
    wanted = _wanted(specs, boxes)
    dtype_of = {spec.name: spec.dtype for spec in specs}
    dtypes = tuple(dtype_of[box.name] for box in wanted)
    holders = _holders(shards, {box.name for box in wanted})
    deal = _Deal([distance(shard.node) for shard in shards], reader, unit_bytes)
    copies: list[Copy] = []
    earlier: dict[str, list[tuple[int, Box]]] = collections.defaultdict(list)
    for target, box in enumerate(wanted):
        parts = [box] if box.size else []
        for source, other in earlier[box.name]:
            common = [intersect(part, other) for part in parts]
            copies += [Copy(source, target, part) for part in common if part is not None]
            parts = [left for part in parts for left in subtract(part, other)]
        earlier[box.name].append((target, box))
        for part in parts:
            for atom, have in _atoms(part, holders[box.name]):
                deal.add(target, atom, itemsize(dtypes[target], box.name), have)
    deal.share()
    reads = tuple(map(tuple, deal.reads))
    return PullPlan(wanted, dtypes, reads, tuple(copies))


def cut_box(box: Box, element_bytes: int, max_bytes: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `max_bytes` (but at least one element), in C order.

    The first axis that can be cut is: what is contiguous stays so.
    """
    axis = next((i for i, length in enumerate(box.shape) if length > 1), None)
    if axis is None or box.size * element_bytes <= max_bytes:
        yield box
        return
    row_bytes = box.size // box.shape[axis] * element_bytes
    rows = max(max_bytes // row_bytes, 1)
    for first in range(box.start[axis], box.stop[axis], rows):
        start, stop = list(box.start), list(box.stop)
        start[axis], stop[axis] = first, min(first + rows, box.stop[axis])
        yield from cut_box(Box(box.name, tuple(start), tuple(stop)), element_bytes, max_bytes)


def _wanted(specs: Sequence[TensorSpec], boxes: Iterable[Box] | None) -> tuple[Box, ...]:
    if boxes is None:
        return tuple(spec.whole() for spec in specs)
    shapes = {spec.name: spec.shape for spec in specs}
    distinct = tuple(dict.fromkeys(boxes))
    for box in distinct:
        shape = shapes.get(box.name)
        if shape is None:
            raise WeightSyncError(
                f"weights {box} are wanted, but the trainer publishes no tensor {box.name!r}; both "
                "must read the same model"
            )
        is_inside = len(box.start) == len(box.stop) == len(shape) and all(
            0 <= a <= b <= n for a, b, n in zip(box.start, box.stop, shape, strict=True)
        )
        if not is_inside:
            raise WeightSyncError(
                f"weights {box} are wanted, which is outside of the tensor's shape {list(shape)}"
            )
    return distinct


def _holders(
    shards: Sequence[ShardManifest], names: set[str]
) -> dict[str, list[tuple[Box, _Holder]]]:
    found: dict[str, list[tuple[Box, _Holder]]] = {name: [] for name in names}
    for shard, manifest in enumerate(shards):
        for number, piece in enumerate(manifest.pieces):
            if piece.nbytes and piece.box.name in found:
                found[piece.box.name].append((piece.box, (shard, number)))
    return found


def _atoms(
    part: Box, holders: Sequence[tuple[Box, _Holder]]
) -> Iterator[tuple[Box, list[_Holder]]]:
    """Cut a box so that each piece holds all of an atom or nothing."""
    atoms: list[tuple[Box, list[_Holder]]] = [(part, [])]
    for box, holder in holders:
        if intersect(part, box) is None:
            continue
        split: list[tuple[Box, list[_Holder]]] = []
        for atom, have in atoms:
            common = intersect(atom, box)
            if common is not None:
                split.append((common, [*have, holder]))
            split += [(left, have) for left in subtract(atom, box)]
        atoms = split
    for atom, have in atoms:
        if not have:
            raise WeightSyncError(f"weights {atom} are wanted, but no shard holds them")
        yield atom, have


class _Deal:
    """Gives atoms to shards: first what has one source, then what balances the loads."""

    def __init__(self, distances: list[int], reader: int, unit_bytes: int) -> None:
        self.reads: list[list[Read]] = [[] for _ in distances]
        self._distances, self._unit_bytes = distances, unit_bytes
        count = max(len(distances), 1)
        self._turn = [(shard - reader) % count for shard in range(len(distances))]
        self._loads = [0] * len(distances)
        self._shared: list[tuple[int, int, Box, int, list[_Holder]]] = []

    def add(self, target: int, atom: Box, element_bytes: int, holders: list[_Holder]) -> None:
        nearest = min(self._distances[shard] for shard, _ in holders)
        near = [holder for holder in holders if self._distances[holder[0]] == nearest]
        nbytes = atom.size * element_bytes
        if len(near) == 1:
            self._give(target, atom, nbytes, near[0])
        else:
            self._shared.append((nbytes, target, atom, element_bytes, near))

    def share(self) -> None:
        self._shared.sort(key=lambda item: -item[0])  # stable: the caller's order among equals
        for _, target, atom, element_bytes, near in self._shared:
            for unit in cut_box(atom, element_bytes, self._unit_bytes):
                chosen = min(
                    near, key=lambda holder: (self._loads[holder[0]], self._turn[holder[0]])
                )
                self._give(target, unit, unit.size * element_bytes, chosen)

    def _give(self, target: int, box: Box, nbytes: int, holder: _Holder) -> None:
        shard, piece = holder
        self._loads[shard] += nbytes
        self.reads[shard].append(Read(piece, box, target))
