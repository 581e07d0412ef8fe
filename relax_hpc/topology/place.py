"""Which host takes which ranks: TP inside NVLink, then CP and EP, then PP and DP under few leaves.

A *slot* is a node's worth of consecutive ranks. Slots form a grid, one row per pipeline stage; EP
and CP groups are runs of columns (a *unit*), DP rings run along the rows, PP along the columns:

    stage 0   [u u][u u][u u][u u]     A leaf should hold whole units, and a rectangle of them: what
    stage 1   [u u][u u][u u][u u]     leaves it is the rectangle's edge, in bytes of DP (left and
    stage 2   [u u][u u][u u][u u]     right) and PP (above and below).

The best rectangle depends on the bytes and on how many nodes each leaf has left, so several heights
are laid out and the cost model chooses; Slurm's own block order is among them, so that no plan is
worse. No randomness: the same hosts give the same order, in whatever order they are given.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from relax_hpc.errors import TopologyError
from relax_hpc.topology.cost import (
    Cost,
    Labels,
    LinkRates,
    Traffic,
    Workload,
    evaluate,
    gain,
    labels_of,
    traffic,
)
from relax_hpc.topology.fabric import Fabric, FabricKind, natural_key
from relax_hpc.topology.ranks import Ranks, Shape

MAX_EXTRA_LINK_BYTES = 0.25
"""By how much an order kept over a requeue may be worse than a new one."""
_MAX_HEIGHTS = 16


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """An order of hosts, and what it is worth."""

    shape: Shape
    per_node: int
    """Ranks on each host."""
    hosts: tuple[str, ...]
    """Host i takes the ranks i*per_node and up."""
    spares: tuple[str, ...]
    """Usable hosts that take no ranks."""
    layout: str
    """Which layout won, e.g. `rows of 4 stages, units of 8 nodes`, `kept`, `block order`."""
    cost: Cost
    block_cost: Cost
    """Of Slurm's own order on the same nodes."""
    notes: tuple[str, ...]
    """What the user should know: hosts left out and why, no topology."""

    def host_of(self, rank: int) -> str:
        """Host of a rank."""
        return self.hosts[rank // self.per_node]

    def summary(self) -> list[str]:
        """Return lines for a terminal or a log: what was chosen, and its worth in a train step."""
        old, new = self.block_cost, self.cost
        saved = gain(old, new)
        lines = [
            f"{self.shape.world} ranks on {len(self.hosts)} nodes, {len(self.spares)} spare: "
            f"{self.layout}",
            f"over the spine {new.spine_bytes / 1e9:.1f} GB a step, {saved['spine_bytes']:.1%} "
            f"less than Slurm's block order ({old.spine_bytes / 1e9:.1f} GB)",
            f"links a byte {new.mean_hops:.2f} (block order {old.mean_hops:.2f}); busiest links "
            f"{new.expected_s:.2f} s ({old.expected_s:.2f} s), without overlap",
        ]
        for name, (most, mean) in new.leaf_spread.items():
            lines.append(
                f"{name} groups under {mean:.1f} leaves, at most {most} "
                f"(block order {old.leaf_spread[name][1]:.1f}, {old.leaf_spread[name][0]})"
            )
        return [*lines, *self.notes]


def place_ranks(
    fabric: Fabric,
    hosts: Mapping[str, int],
    shape: Shape,
    load: Workload,
    *,
    rates: LinkRates | None = None,
    exclude: Collection[str] = (),
    previous: Sequence[str] = (),
) -> Placement:
    """Order hosts for the ranks of one role.

    Args:
        fabric: where the hosts hang.
        hosts: host -> its GPUs (without GPUs: tasks), in Slurm's order (SLURM_JOB_NODELIST).
        shape: of the ranks.
        load: decides what moves, thus what should be near.
        rates: of the links.
        exclude: hosts that are broken or taken.
        previous: hosts of the last attempt in rank order; kept where they still are, a lost one is
            replaced by a spare as near as possible, unless that costs too much.

    Raises:
        TopologyError: too few hosts, TP does not fit into NVLink.
    """
    rates = dataclasses.replace(
        rates or LinkRates(), nvlink_levels=int(fabric.kind is FabricKind.BLOCK)
    )
    per_node, usable, notes = _usable_hosts(fabric, hosts, shape, exclude)
    names = sorted(usable, key=natural_key)
    size = shape.world // per_node
    judge = _Judge(traffic(shape, load), labels_of(fabric, names), per_node, rates)
    index = {host: number for number, host in enumerate(names)}
    block = np.array([index[host] for host in usable[:size]])
    candidates = {"block order": block, **dict(_layouts(judge.labels, shape, per_node))}
    ranked = {name: (judge.score(order), name) for name, order in candidates.items()}
    best = min(ranked, key=lambda name: ranked[name])
    kept = _kept_order(fabric, names, previous) if len(previous) == size else None
    if kept is not None:
        limit = (ranked["block order"][0][0], ranked[best][0][1] * (1 + MAX_EXTRA_LINK_BYTES))
        score = judge.score(kept)
        if score[0] <= limit[0] and score[1] <= limit[1]:
            best, candidates["kept"] = "kept", kept
        else:
            notes.append("the order of the last attempt was given up: a new one moves fewer bytes")
    order = candidates[best]
    _check_tensor_groups(judge.labels[:, order], shape, per_node)
    taken = set(order.tolist())
    return Placement(
        shape=shape,
        per_node=per_node,
        hosts=tuple(names[i] for i in order),
        spares=tuple(name for i, name in enumerate(names) if i not in taken),
        layout=best,
        cost=judge.cost(order),
        block_cost=judge.cost(block),
        notes=tuple(notes),
    )


class _Judge:
    """Costs of orders of the same hosts."""

    def __init__(
        self, kinds: Sequence[Traffic], labels: Labels, per_node: int, rates: LinkRates
    ) -> None:
        self.labels = labels
        self._kinds, self._per_node, self._rates = kinds, per_node, rates

    def cost(self, order: Ranks) -> Cost:
        return evaluate(self._kinds, self.labels[:, order], self._per_node, self._rates)

    def score(self, order: Ranks) -> tuple[float, float, float]:
        """Smaller is better: bytes over the spine, bytes x links, seconds."""
        cost = self.cost(order)
        return cost.spine_bytes, cost.link_bytes, cost.expected_s


def _usable_hosts(
    fabric: Fabric, hosts: Mapping[str, int], shape: Shape, exclude: Collection[str]
) -> tuple[int, list[str], list[str]]:
    """Choose ranks per node and the hosts that can take them, in the order given.

    All nodes get the same number: NCCL hangs with 7 GPUs on one node and 8 on another (nccl#2385).
    """
    gone = {host.casefold() for host in exclude}
    left = {host: gpus for host, gpus in hosts.items() if host.casefold() not in gone}
    may_span = fabric.kind is FabricKind.BLOCK
    for per_node in range(max(left.values(), default=0), 0, -1):
        enough = [host for host, gpus in left.items() if gpus >= per_node]
        inside = per_node % shape.tp == 0 or (may_span and shape.tp % per_node == 0)
        if shape.world % per_node == 0 and inside and len(enough) * per_node >= shape.world:
            notes = _host_notes(fabric, left, enough, per_node)
            return per_node, enough, notes
    counts = sorted(set(left.values()), reverse=True)
    has = ", ".join(f"{list(left.values()).count(n)} x {n}" for n in counts) or "none"
    raise TopologyError(
        f"{shape.world} ranks with tp={shape.tp} do not fit: hosts x GPUs are {has}; every node "
        "takes the same number of ranks, a divisor of the world that tp divides"
    )


def _host_notes(
    fabric: Fabric, left: Mapping[str, int], enough: Sequence[str], per_node: int
) -> list[str]:
    notes = [
        f"{host} left out: {gpus} GPUs, the others give {per_node} each"
        for host, gpus in left.items()
        if gpus < per_node
    ]
    if fabric.depth == 0:
        notes.append("no topology is known (no plugin): hosts stay in Slurm's order")
        return notes
    unknown = fabric.missing(enough)
    if unknown:
        notes.append(f"not in the topology, taken as far from all: {', '.join(unknown[:20])}")
    return notes


def _check_tensor_groups(labels: Labels, shape: Shape, per_node: int) -> None:
    if shape.tp <= per_node:
        return
    domain = np.repeat(labels[1], per_node)[shape.groups("tp")]
    split = (domain != domain[:, :1]).any(axis=1)
    if split.any():
        raise TopologyError(
            f"tp={shape.tp}: {int(split.sum())} TP groups would cross NVLink blocks; use a smaller "
            "tp, or ask Slurm for whole blocks (--segment)"
        )


# ---------------------------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------------------------


def _layouts(labels: Labels, shape: Shape, per_node: int) -> Iterator[tuple[str, Ranks]]:
    """Yield name and order (slot -> host number) of each layout worth a look."""
    if len(labels) == 1:
        return
    grid = _slot_grid(shape, per_node)
    units = _unit_sizes(shape, per_node, grid.shape[1])
    for height in _heights(len(grid)):
        for unit in units:
            walk = _walk(grid, height, unit)
            # What a leaf should hold as a whole: a unit, a column of the strip, the strip itself.
            for chunk in dict.fromkeys((unit, unit * height, grid.shape[1] * height)):
                order = np.empty(grid.size, dtype=np.int64)
                order[walk] = _fill(labels, grid.size, chunk)
                yield f"{height} stages high, units of {unit}, leaves by {chunk}", order


def _slot_grid(shape: Shape, per_node: int) -> Ranks:
    """Slots by stage: [num_stages, columns]; one row if a node holds several stages."""
    slots = np.arange(shape.world // per_node)
    stage_of_rank = np.empty(shape.world, dtype=np.int64)
    for stage, ranks in enumerate(shape.groups("pp").T):
        stage_of_rank[ranks] = stage
    stages = stage_of_rank.reshape(-1, per_node)
    if (stages != stages[:, :1]).any():
        return slots[None, :]
    return slots[np.argsort(stages[:, 0], kind="stable")].reshape(shape.pp, -1)


def _unit_sizes(shape: Shape, per_node: int, columns: int) -> list[int]:
    """Nodes that should lie under one leaf: those of an EP group, of a CP group, one."""
    spans = (shape.ep * shape.expert_tp, shape.cp * shape.tp, shape.tp)
    sizes = {max(1, span // per_node) for span in spans} | {1}
    return sorted((size for size in sizes if columns % size == 0), reverse=True)


def _heights(num_stages: int) -> list[int]:
    if num_stages <= _MAX_HEIGHTS:
        return list(range(1, num_stages + 1))
    return [height for height in range(1, num_stages + 1) if num_stages % height == 0]


def _walk(grid: Ranks, height: int, unit: int) -> Ranks:
    """Slots in the order in which leaves are filled: strips of stages, column by column.

    Every second strip runs backwards, so that a leaf that ends one and begins the next holds the
    same columns of both.
    """
    pieces = []
    for number, top in enumerate(range(0, len(grid), height)):
        strip = grid[top : top + height]
        # [stages, units, unit] -> unit by unit, in each the stages one after the other
        columns = strip.reshape(len(strip), -1, unit).transpose(1, 0, 2)
        pieces.append((columns[::-1] if number % 2 else columns).ravel())
    return np.concatenate(pieces)


def _fill(labels: Labels, size: int, chunk: int) -> Ranks:
    """Host numbers, leaf by leaf in whole chunks; what is left of the leaves comes last.

    The end is cut off: spares are what fits worst. (Tried: small leaves or rests as spares first;
    worse, because a single host may be what the rest of another leaf lacks.)
    """
    whole: list[int] = []
    rests: list[list[int]] = []
    for leaf in _leaves(labels):
        cut = len(leaf) // chunk * chunk
        whole += leaf[:cut]
        rests += [leaf[cut:]] if leaf[cut:] else []
    return np.array((whole + _pack(rests, chunk))[:size])


def _leaves(labels: Labels) -> list[list[int]]:
    """Hosts of each leaf; leaves under one switch are neighbours, larger switches come first."""
    counts = [np.bincount(row) for row in labels]

    def key(host: int) -> list[tuple[int, int]]:
        # The first host names a place: labels are numbered by the switches' names.
        return [(-int(counts[level][row[host]]), int(row[host])) for level, row in tops]

    tops = list(enumerate(labels))[:0:-1]
    found: dict[int, list[int]] = {}
    for host in sorted(range(labels.shape[1]), key=lambda host: (key(host), host)):
        found.setdefault(int(labels[1][host]), []).append(host)
    return list(found.values())


def _pack(rests: list[list[int]], chunk: int) -> list[int]:
    """Join rests of leaves to chunks out of as few leaves as possible, the largest first."""
    rests = sorted(rests, key=len, reverse=True)  # stable: neighbours stay neighbours
    packed: list[int] = []
    while rests:
        room = chunk
        while room and rests:
            fitting = next((i for i, rest in enumerate(rests) if len(rest) <= room), 0)
            piece = rests.pop(fitting)
            packed += piece[:room]
            if len(piece) > room:
                rests.append(piece[room:])
            room -= min(room, len(piece))
    return packed


# ---------------------------------------------------------------------------------------------
# After a requeue
# ---------------------------------------------------------------------------------------------


def _kept_order(fabric: Fabric, names: Sequence[str], previous: Sequence[str]) -> Ranks | None:
    """Order of the last attempt with lost hosts replaced; None if more than half are lost."""
    number = {name: i for i, name in enumerate(names)}
    lost = [slot for slot, host in enumerate(previous) if host not in number]
    if 2 * len(lost) > len(previous):
        return None
    order = np.array([number.get(host, -1) for host in previous])
    free = [name for name in names if name not in set(previous)]
    paths = dict(zip(free, fabric.all_paths(free), strict=True))
    for slot, path in zip(lost, fabric.all_paths([previous[slot] for slot in lost]), strict=True):
        # The names are sorted and min takes the first of equals.
        spare = min(paths, key=lambda host: _apart(path, paths[host]))
        order[slot] = number[spare]
        del paths[spare]
    return order


def _apart(a: Sequence[str], b: Sequence[str]) -> int:
    return sum(left != right for left, right in zip(a, b, strict=True))
