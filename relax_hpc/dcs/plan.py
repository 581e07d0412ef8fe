"""Which trainer rank sends which box to which engine rank.

The plan is the intersection of two layouts. Every byte that an engine rank holds arrives exactly
once, and nothing else travels. The trainer ranks that hold a piece (data parallel replicas) share
it evenly by bytes; inside of these shares, and a little beyond, the nearest sends: same node, same
leaf, same spine, the rest. Deterministic: every rank can compute it alone and get the same.

Layers, experts and replicas repeat, so that the unit of work is an `_Item`: one piece, of all
tensors that are spread alike on both sides, for all ranks that want it.
"""

import dataclasses
import functools
import itertools
import typing
from collections.abc import Iterator

import msgspec
import numpy as np
import xxhash

from relax_hpc.dcs.layout import Box, itemsize, subtract
from relax_hpc.dcs.layout import intersect as intersect_boxes
from relax_hpc.dcs.rank_layout import Layout, Range, Sharding, size_of
from relax_hpc.dcs.sources import fill_up, match
from relax_hpc.errors import WeightSyncError

LINKS: typing.Final = ("node", "leaf", "spine", "core")
"""Classes of pairs: on one node, below one leaf switch, below one spine, and all others."""
_MIN_PIECE_BYTES = 2**20  # smaller pieces cost more in messages than balance gains
_NEAR_PERCENT = 105  # of the mean: so much may a source send before a far one is better than it
_UNITS_PER_SOURCE = 4  # a piece is cut when fewer units than this come on each source


class Place(typing.NamedTuple):
    """Where a rank runs. Each number is unique in the cluster, not only below its parent."""

    node: int
    leaf: int = 0
    spine: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Places of all ranks of both sides."""

    trainer: tuple[Place, ...]
    engine: tuple[Place, ...]

    @classmethod
    def blocks(
        cls,
        num_trainer: int,
        num_engine: int,
        *,
        node_ranks: int = 8,
        leaf_nodes: int = 1,
        spine_leaves: int = 1,
    ) -> "Placement":
        """Fill nodes one after the other; the engines start on a new node."""

        def place(node: int) -> Place:
            return Place(node, node // leaf_nodes, node // leaf_nodes // spine_leaves)

        first = -(-num_trainer // node_ranks)
        return cls(
            tuple(place(rank // node_ranks) for rank in range(num_trainer)),
            tuple(place(first + rank // node_ranks) for rank in range(num_engine)),
        )


class Transfer(typing.NamedTuple):
    """One box that travels."""

    rank: int
    """The other end: a trainer rank in an engine rank's list, and the reverse."""
    box: Box


@dataclasses.dataclass(frozen=True, slots=True)
class _Item:
    tensors: np.ndarray
    """Indices into the engine layout's specs, ascending: all are spread alike."""
    box: Range
    nbytes: int
    """Of the box in one tensor."""
    sources: np.ndarray
    destinations: np.ndarray


@dataclasses.dataclass(frozen=True)
class Plan:
    """All transfers of one weight version; build it with `plan`.

    Row i says: `source[i]` sends the box of item `item[i]` of the item's tensors number `first[i]`
    .. `first[i] + count[i] - 1` to `destination[i]`.
    """

    key: int
    """`plan_key` of what it was made from."""
    engine: Layout
    num_sources: int
    minimum_bytes: int
    """Sum of what every engine rank holds."""
    node_bytes: int
    """The same when a box that several ranks of a node hold is fetched once."""
    items: tuple[_Item, ...]
    item: np.ndarray
    source: np.ndarray
    destination: np.ndarray
    first: np.ndarray
    count: np.ndarray
    link: np.ndarray
    """Index into LINKS."""

    @functools.cached_property
    def row_bytes(self) -> np.ndarray:
        """Bytes of each row: int64."""
        nbytes = np.array([item.nbytes for item in self.items], dtype=np.int64)
        row_bytes: np.ndarray = nbytes[self.item] * self.count
        return row_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all transfers."""
        return int(self.row_bytes.sum())

    @property
    def sent_bytes(self) -> np.ndarray:
        """Bytes that each trainer rank sends: int64 [num_sources]."""
        return _sums(self.source, self.row_bytes, self.num_sources)

    @property
    def received_bytes(self) -> np.ndarray:
        """Bytes that each engine rank receives: int64 [ranks of the engine layout]."""
        return _sums(self.destination, self.row_bytes, self.engine.num_ranks)

    @property
    def link_bytes(self) -> dict[str, int]:
        """Bytes by class of link."""
        sums = _sums(self.link, self.row_bytes, len(LINKS))
        return {name: int(total) for name, total in zip(LINKS, sums, strict=True)}

    @property
    def max_vs_mean(self) -> float:
        """Bytes of the trainer rank that sends most, over the mean of all trainer ranks."""
        sent = self.sent_bytes
        return float(sent.max() / sent.mean()) if sent.any() else 1.0

    def to_destination(self, rank: int) -> list[Transfer]:
        """List what an engine rank receives, in order of its tensors."""
        return self._transfers(np.flatnonzero(self.destination == rank), self.source)

    def from_source(self, rank: int) -> list[Transfer]:
        """List what a trainer rank sends, in order of the tensors, then of the receivers."""
        return self._transfers(np.flatnonzero(self.source == rank), self.destination)

    def _transfers(self, rows: np.ndarray, other_end: np.ndarray) -> list[Transfer]:
        found = []
        for row in rows.tolist():
            item, first = self.items[self.item[row]], int(self.first[row])
            for tensor in item.tensors[first : first + int(self.count[row])].tolist():
                found.append((tensor, *item.box, int(other_end[row])))
        found.sort()
        names = self.engine.specs
        return [Transfer(end, Box(names[t].name, start, stop)) for t, start, stop, end in found]


def plan_key(trainer: Layout, engine: Layout, placement: Placement) -> int:
    """Hash of both layouts and all places: equal keys have equal plans."""
    parts = (trainer.digest, engine.digest, placement.trainer, placement.engine)
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(parts))


class PlanCache:
    """Keeps the newest plan: layouts change when the run's shape does, not from step to step."""

    def __init__(self) -> None:
        self._plan: Plan | None = None

    def get(self, trainer: Layout, engine: Layout, placement: Placement) -> Plan:
        """Return the plan, made now only if a layout or a place changed."""
        key = plan_key(trainer, engine, placement)
        if self._plan is None or self._plan.key != key:
            self._plan = plan(trainer, engine, placement)
        return self._plan


def plan(trainer: Layout, engine: Layout, placement: Placement) -> Plan:
    """Plan one weight version from trainer to engines.

    Raises:
        WeightSyncError: an engine tensor that the trainer lacks or has with another shape or
            dtype, a byte that no trainer rank holds, or places of another number of ranks.
    """
    for side, layout, places in (
        ("trainer", trainer, placement.trainer),
        ("engine", engine, placement.engine),
    ):
        if len(places) != layout.num_ranks:
            raise WeightSyncError(
                f"weight plan: {len(places)} places for {layout.num_ranks} {side} ranks"
            )
    items = tuple(_items(trainer, engine))
    minimum_bytes = int(engine.rank_bytes.sum())
    share = _Share(placement, minimum_bytes)
    # The least flexible first: what has many possible sources fills up the differences.
    order = sorted(range(len(items)), key=lambda i: (len(items[i].sources), -items[i].nbytes, i))
    rows = [share.give(number, items[number]) for number in order]
    columns = np.concatenate(rows, axis=1) if rows else np.zeros((6, 0), dtype=np.int64)
    item, source, destination, first, count, link = columns.astype(np.int32)
    return Plan(
        key=plan_key(trainer, engine, placement),
        engine=engine,
        num_sources=trainer.num_ranks,
        minimum_bytes=minimum_bytes,
        node_bytes=engine.copies_bytes([place.node for place in placement.engine]),
        items=items,
        item=item,
        source=source,
        destination=destination,
        first=first,
        count=count,
        link=link,
    )


# ---------------------------------------------------------------------------------------------
# Pieces
# ---------------------------------------------------------------------------------------------


def _items(trainer: Layout, engine: Layout) -> Iterator[_Item]:
    """Group the engine's tensors by how both sides spread them, and cut each group's boxes."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    where = {spec.name: number for number, spec in enumerate(trainer.specs)}
    for number, spec in enumerate(engine.specs):
        held = where.get(spec.name)
        if held is None or trainer.specs[held] != spec:
            seen = "does not have it" if held is None else f"has {trainer.specs[held]}"
            raise WeightSyncError(
                f"weight plan: engines want {spec}, but the trainer {seen}; "
                "both must read the same model"
            )
        ways = (trainer.sharding_of[held], engine.sharding_of[number])
        groups.setdefault((*ways, itemsize(spec.dtype)), []).append(number)
    for (from_way, to_way, element_bytes), tensors in groups.items():
        name, alike = engine.specs[tensors[0]].name, np.array(tensors)
        ways_pair = trainer.shardings[from_way], engine.shardings[to_way]
        yield from _items_of_group(name, alike, element_bytes, *ways_pair)


def _items_of_group(
    name: str, tensors: np.ndarray, element_bytes: int, held: Sharding, wanted: Sharding
) -> Iterator[_Item]:
    holders = [np.array(ranks) for ranks in held.holders]
    for (start, stop), ranks in zip(wanted.ranges, wanted.holders, strict=True):
        destinations = np.array(ranks)
        for piece, number in _pieces(Box(name, start, stop), held, ranks[0]):
            sources = holders[number]
            nbytes = piece.size * element_bytes
            units = len(tensors) * len(destinations)
            for box in _cut(piece, nbytes, units, len(sources)):
                size = size_of(*box) * element_bytes
                yield _Item(tensors, box, size, sources, destinations)


def _pieces(wanted: Box, held: Sharding, rank: int) -> list[tuple[Box, int]]:
    """Cut a wanted box into what each held box gives; (piece, index of the held box)."""
    left, pieces = [wanted], []
    for number, (start, stop) in enumerate(held.ranges):
        source = Box(wanted.name, start, stop)
        common = [intersect_boxes(part, source) for part in left]
        if any(common):
            pieces += [(part, number) for part in common if part is not None]
            left = [rest for part in left for rest in subtract(part, source)]
        if not left:
            break
    if left:
        raise WeightSyncError(
            f"weight plan: no trainer rank holds {left[0]}, which engine rank {rank} needs"
        )
    return pieces


def _cut(piece: Box, nbytes: int, units: int, num_sources: int) -> list[Range]:
    """Cut a large piece along its longest axis when there are too few units to balance."""
    parts = min(-(-_UNITS_PER_SOURCE * num_sources // units), nbytes // _MIN_PIECE_BYTES)
    longest = max(piece.shape, default=1)
    parts = min(parts, longest)
    if parts <= 1 or num_sources == 1:
        return [(piece.start, piece.stop)]
    axis = piece.shape.index(longest)
    edges = [piece.start[axis] + longest * part // parts for part in range(parts + 1)]
    cut = []
    for first, behind in itertools.pairwise(edges):
        start, stop = list(piece.start), list(piece.stop)
        start[axis], stop[axis] = first, behind
        cut.append((tuple(start), tuple(stop)))
    return cut


# ---------------------------------------------------------------------------------------------
# Sources
# ---------------------------------------------------------------------------------------------


class _Share:
    """Gives each item's units (one tensor for one destination) to its sources."""

    def __init__(self, placement: Placement, total_bytes: int) -> None:
        trainer = np.array(placement.trainer, dtype=int).reshape(-1, 3)
        engine = np.array(placement.engine, dtype=int).reshape(-1, 3)
        self._near = [
            (link, trainer[:, link], engine[:, link])
            for link in range(3)
            if np.isin(trainer[:, link], engine[:, link]).any()
        ]
        self._anywhere = np.zeros(len(trainer), dtype=int), np.zeros(len(engine), dtype=int)
        self._sent = np.zeros(len(trainer), dtype=np.int64)
        self._limit = total_bytes * _NEAR_PERCENT // 100 // max(len(trainer), 1)

    def give(self, number: int, item: _Item) -> np.ndarray:
        """Rows of one item: int64 [6, rows], in the order of Plan's columns from `item` on."""
        deal = _Deal(number, item, self._sent)
        for link, *cells in self._near:
            deal.match(link, deal.even_shares(), *cells)
            if deal.is_done:
                break
            # A far source would be idler, but not by much: better near.
            deal.match(link, deal.room(self._limit), *cells)
        if not deal.is_done:
            deal.match(len(LINKS) - 1, deal.even_shares(), *self._anywhere)
        return np.concatenate(deal.rows, axis=1)


class _Deal:
    """One item while its units are given out."""

    def __init__(self, number: int, item: _Item, sent: np.ndarray) -> None:
        self.rows: list[np.ndarray] = []
        self._number, self._item, self._sent = number, item, sent
        self._wants = np.full(len(item.destinations), len(item.tensors))

    @property
    def is_done(self) -> bool:
        return not self._wants.any()

    def even_shares(self) -> np.ndarray:
        loads = self._sent[self._item.sources]
        return fill_up(loads, self._item.nbytes, int(self._wants.sum()))

    def room(self, limit: int) -> np.ndarray:
        """Units that each source can take before it has to send more than `limit` bytes."""
        left: np.ndarray = (limit - self._sent[self._item.sources]) // self._item.nbytes
        return left.clip(0, int(self._wants.sum()))

    def match(
        self, link: int, shares: np.ndarray, trainer_cell: np.ndarray, engine_cell: np.ndarray
    ) -> None:
        item = self._item
        cells = trainer_cell[item.sources], engine_cell[item.destinations]
        found = match(shares, self._wants, *cells)
        if found is None:
            return
        source, destination, count, before = found
        first = len(item.tensors) - self._wants[destination] + before
        ends = item.sources[source], item.destinations[destination]
        same = np.full(len(count), self._number), np.full(len(count), link)
        self.rows.append(np.stack([same[0], *ends, first, count, same[1]]))
        np.add.at(self._sent, ends[0], count * item.nbytes)
        np.subtract.at(self._wants, destination, count)


def _sums(index: np.ndarray, nbytes: np.ndarray, size: int) -> np.ndarray:
    """Sum int64 bytes by index, exactly (bincount's weights are float64)."""
    total = np.zeros(size, dtype=np.int64)
    np.add.at(total, index, nbytes)
    return total
