"""What an order of nodes is worth: bytes per train step on each level of the switches, and seconds.

Model, for one train step (forward, backward, optimizer), in bytes that a rank sends:

    tp    ring       8 x (tp-1)/tp x activation, per layer and micro-batch (sequence parallel)
    cp    ring       3 x (cp-1) x keys and values of a rank, per layer and micro-batch
    ep    all-to-all 4 x tokens x top_k x hidden, per MoE layer and micro-batch
    dp    ring       (n-1)/n x (gradients + parameters), once: the distributed optimizer
    edp   ring       the same for the experts
    pp    line       activation to the next stage, gradient back, per micro-batch

Rings follow rank order, as NCCL's do between nodes. NCCL's trees and overlap with computation are
left out on purpose: the model compares orders, it does not predict a step's time.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from relax_hpc.topology.fabric import Fabric
from relax_hpc.topology.ranks import Ranks, Shape

Labels = npt.NDArray[np.int64]
"""[depth + 1, num_nodes]: number of the place of each node on each level; row 0 is the node."""
Floats = npt.NDArray[np.float64]

_BF16 = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Sizes of the model and of one train step that decide how many bytes move."""

    layers: int
    hidden: int
    kv_hidden: int
    """Width of keys or values of one token (heads x head size)."""
    dense_params: float
    """All parameters that are no experts."""
    expert_params: float = 0.0
    moe_layers: int = 0
    top_k: int = 0
    micro_batch_tokens: int = 8192
    """Of one replica; tp (sequence parallel) and cp divide it."""
    num_micro_batches: int = 16
    """Per replica and step."""
    grad_bytes: int = 4
    """Per parameter in the reduce-scatter; Megatron accumulates in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinkRates:
    """Rates in GB/s. Defaults: an H800 node with eight 400 Gbit/s rails."""

    nvlink_gb_s: float = 200.0
    """Of one GPU, one direction."""
    nic_gb_s: float = 50.0
    """Of one GPU's rail, one direction."""
    oversubscription: float = 1.0
    """Bandwidth below a switch : above it; 1 = no level is thinner."""
    nvlink_levels: int = 0
    """1 where NVLink joins the nodes of a block: what leaves a node then does not need its NICs."""

    def gb_s(self, level: int) -> float:
        """Rate per GPU of what leaves a node (level 0), a leaf (1), ..."""
        if level < self.nvlink_levels:
            return self.nvlink_gb_s
        return self.nic_gb_s / self.oversubscription ** (level - self.nvlink_levels)


class Pattern(enum.StrEnum):
    """Who sends to whom inside a group."""

    RING = "ring"
    LINE = "line"
    """Neighbours in both directions, ends not joined."""
    ALL_TO_ALL = "all-to-all"


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of collective, by all its groups at once."""

    name: str
    pattern: Pattern
    groups: Ranks
    """[num_groups, group_size] ranks."""
    nbytes: float
    """That a rank sends in a step; of a line: to each neighbour."""


def traffic(shape: Shape, load: Workload) -> list[Traffic]:
    """Return what the ranks send in one train step; axes of size 1 are left out."""
    tokens = load.micro_batch_tokens / (shape.tp * shape.cp)
    activation = tokens * load.hidden * _BF16
    per_stage = load.num_micro_batches / shape.pp
    kv = 2 * load.micro_batch_tokens / shape.cp * load.kv_hidden / shape.tp * _BF16
    found = [
        ("tp", Pattern.RING, 8 * (shape.tp - 1) * activation * load.layers * per_stage),
        ("cp", Pattern.RING, 3 * (shape.cp - 1) * kv * load.layers * per_stage),
        ("ep", Pattern.ALL_TO_ALL, 4 * activation * load.top_k * load.moe_layers * per_stage),
        ("dp-cp", Pattern.RING, _reduced(load, load.dense_params, shape.tp * shape.pp)),
        (
            "edp",
            Pattern.RING,
            _reduced(load, load.expert_params, shape.expert_tp * shape.ep * shape.pp),
        ),
        ("pp", Pattern.LINE, activation * load.num_micro_batches),
    ]
    kinds = []
    for axes, pattern, nbytes in found:
        groups = shape.groups(axes)
        size = groups.shape[1]
        if size > 1 and nbytes > 0:
            share = (size - 1) / size if axes in ("dp-cp", "edp") else 1.0
            kinds.append(Traffic(axes, pattern, groups, nbytes * share))
    return kinds


def _reduced(load: Workload, params: float, shards: int) -> float:
    return params / shards * (load.grad_bytes + _BF16)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Of one train step under one order of nodes."""

    crossing_bytes: dict[str, tuple[float, ...]]
    """Collective -> bytes that leave a node, a leaf, a switch of the next level, ..."""
    link_bytes: float
    """Bytes x links that they pass: 2 under one leaf, 4 under the next level, ..."""
    expected_s: float
    """Sum over collectives of the busiest link's time, without overlap."""
    leaf_spread: dict[str, tuple[int, float]]
    """Collective -> leaves under which a group lies: (largest, mean)."""

    @property
    def network_bytes(self) -> float:
        """Bytes that leave a node."""
        return sum(levels[0] for levels in self.crossing_bytes.values())

    @property
    def spine_bytes(self) -> float:
        """Bytes that leave a leaf (or block); 0 where no topology is known."""
        return sum(levels[1] for levels in self.crossing_bytes.values() if len(levels) > 1)

    @property
    def mean_hops(self) -> float:
        """Mean links of a byte that leaves its node."""
        return self.link_bytes / self.network_bytes if self.network_bytes else 0.0


def labels_of(fabric: Fabric, hosts: Sequence[str]) -> Labels:
    """Number the places of hosts on every level."""
    rows: list[Sequence[str]] = [hosts]
    rows += [list(row) for row in zip(*fabric.all_paths(hosts), strict=True)]
    return np.stack([np.unique(np.array(row), return_inverse=True)[1] for row in rows])


def evaluate(kinds: Sequence[Traffic], labels: Labels, per_node: int, rates: LinkRates) -> Cost:
    """Count what crosses each level when node i of `labels` holds ranks i*per_node and up."""
    levels = [np.repeat(row, per_node) for row in labels]
    nodes_below = [np.bincount(row) for row in labels]
    crossing: dict[str, tuple[float, ...]] = {}
    spread: dict[str, tuple[int, float]] = {}
    seconds = 0.0
    for kind in kinds:
        leaving = [leaving_bytes(kind, row[kind.groups], int(row.max()) + 1) for row in levels]
        crossing[kind.name] = tuple(float(out.sum()) for out in leaving)
        seconds += _busiest_s(kind, leaving, nodes_below, per_node, rates)
        leaf = levels[min(1, len(levels) - 1)]
        counts = _num_distinct(leaf[kind.groups])
        spread[kind.name] = (int(counts.max()), float(counts.mean()))
    return Cost(
        crossing_bytes=crossing,
        link_bytes=2 * sum(sum(row) for row in crossing.values()),
        expected_s=seconds,
        leaf_spread=spread,
    )


def leaving_bytes(kind: Traffic, places: Ranks, num_places: int) -> Floats:
    """Bytes that leave each place (node, leaf, ...). `places` is [num_groups, group_size]."""
    if kind.pattern is Pattern.ALL_TO_ALL:
        size = places.shape[1]
        keys = (np.arange(len(places))[:, None] * num_places + places).ravel()
        key, count = np.unique(keys, return_counts=True)
        # Each rank sends an equal share to every member, itself included.
        sent = count * (size - count) / size * kind.nbytes
        return _sums(key % num_places, sent, num_places)
    if kind.pattern is Pattern.RING:
        source, target = places, np.roll(places, -1, axis=1)
    else:
        forth, back = places[:, :-1], places[:, 1:]
        source, target = np.concatenate([forth, back]), np.concatenate([back, forth])
    crosses = source != target
    return _sums(source[crosses], None, num_places) * kind.nbytes


def _sums(places: Ranks, weights: Floats | None, num_places: int) -> Floats:
    return np.bincount(places, weights, num_places).astype(np.float64)


def _busiest_s(
    kind: Traffic,
    leaving: Sequence[Floats],
    nodes_below: Sequence[npt.NDArray[np.int64]],
    per_node: int,
    rates: LinkRates,
) -> float:
    """Time of the fullest uplink: all groups run at once, nodes share their switch's uplinks."""
    slowest = kind.nbytes / (rates.nvlink_gb_s * 1e9)
    for level, (out, nodes) in enumerate(zip(leaving, nodes_below, strict=True)):
        uplink = nodes * per_node * rates.gb_s(level) * 1e9
        busy = out > 0
        slowest = max(slowest, float((out[busy] / uplink[busy]).max(initial=0.0)))
    return slowest


def _num_distinct(places: Ranks) -> npt.NDArray[np.int64]:
    ordered = np.sort(places, axis=1)
    changes: npt.NDArray[np.int64] = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1)
    return changes


def gain(block_order: Cost, planned: Cost) -> Mapping[str, float]:
    """Say what a plan saves over Slurm's own block order, as shares (0.3 = 30 % less)."""
    pairs = {
        "spine_bytes": (block_order.spine_bytes, planned.spine_bytes),
        "link_bytes": (block_order.link_bytes, planned.link_bytes),
        "expected_s": (block_order.expected_s, planned.expected_s),
    }
    return {name: 1 - new / old if old else 0.0 for name, (old, new) in pairs.items()}
