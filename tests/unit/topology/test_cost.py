"""The cost model against one that walks every pair of ranks, written apart from it."""

import dataclasses
import random

import pytest

from relax_hpc.topology.cost import (
    LinkRates,
    Pattern,
    Traffic,
    Workload,
    evaluate,
    gain,
    labels_of,
    traffic,
)
from relax_hpc.topology.fabric import Fabric, flat_fabric, parse_topology
from relax_hpc.topology.ranks import Shape

MOE = Workload(
    layers=4,
    hidden=64,
    kv_hidden=16,
    dense_params=1e6,
    expert_params=8e6,
    moe_layers=4,
    top_k=2,
    micro_batch_tokens=256,
    num_micro_batches=4,
)
SHAPES = [
    Shape(world=32, tp=2, pp=2, ep=4),
    Shape(world=32, tp=2, pp=4, cp=2),
    Shape(world=32, tp=4, ep=8, etp=1, pp=2),
]


def _fabric(rng: random.Random, num_hosts: int) -> tuple[Fabric, list[str]]:
    hosts = [f"n{i}" for i in range(num_hosts)]
    rng.shuffle(hosts)
    lines, leaves = [], []
    while hosts:
        width = rng.randint(1, 3)
        leaf, hosts = hosts[:width], hosts[width:]
        leaves.append(f"l{len(leaves)}")
        lines.append(f"SwitchName={leaves[-1]} Nodes={','.join(leaf)}")
    half = len(leaves) // 2
    lines.append(f"SwitchName=s1 Switches={','.join(leaves[:half] or leaves)}")
    if half:
        lines.append(f"SwitchName=s2 Switches={','.join(leaves[half:])}")
        lines.append("SwitchName=core Switches=s1,s2")
    order = [f"n{i}" for i in range(num_hosts)]
    rng.shuffle(order)
    return parse_topology("\n".join(lines)), order


def _pairs(kind: Traffic) -> list[tuple[int, int, float]]:
    """(source, target, bytes) of every message of a collective."""
    found = []
    for group in kind.groups.tolist():
        for i, rank in enumerate(group):
            if kind.pattern is Pattern.ALL_TO_ALL:
                found += [(rank, other, kind.nbytes / len(group)) for other in group]
            elif kind.pattern is Pattern.RING:
                found.append((rank, group[(i + 1) % len(group)], kind.nbytes))
            else:
                found += [
                    (rank, group[j], kind.nbytes) for j in (i - 1, i + 1) if 0 <= j < len(group)
                ]
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_bytes_on_each_level_and_links_as_counted_pair_by_pair(shape: Shape, seed: int) -> None:
    per_node = 4
    fabric, order = _fabric(random.Random(seed), shape.world // per_node)
    kinds = traffic(shape, MOE)
    cost = evaluate(kinds, labels_of(fabric, order), per_node, LinkRates())
    link_bytes = 0.0
    for kind in kinds:
        crossing = [0.0] * (fabric.depth + 1)
        spread = [
            len({fabric.path(order[rank // per_node])[0] for rank in group})
            for group in kind.groups.tolist()
        ]
        for source, target, nbytes in _pairs(kind):
            hops = fabric.distance(order[source // per_node], order[target // per_node])
            link_bytes += hops * nbytes
            for level in range(hops // 2):
                crossing[level] += nbytes
        assert cost.crossing_bytes[kind.name] == pytest.approx(crossing)
        assert cost.leaf_spread[kind.name] == (
            max(spread),
            pytest.approx(sum(spread) / len(spread)),
        )
    assert cost.link_bytes == pytest.approx(link_bytes)


def test_bytes_of_each_collective_by_hand() -> None:
    shape = Shape(world=32, tp=2, cp=2, pp=2)
    sent = {kind.name: kind.nbytes for kind in traffic(shape, MOE)}
    activation = 256 / 2 / 2 * 64 * 2  # tokens of a rank x hidden x bfloat16
    per_stage = 4 * 4 / 2  # layers x micro-batches / stages
    assert sent["tp"] == pytest.approx(8 * activation * per_stage)
    assert sent["cp"] == pytest.approx(3 * (2 * 128 * 16 / 2 * 2) * per_stage)
    assert sent["pp"] == pytest.approx(activation * 4)
    assert sent["dp-cp"] == pytest.approx(1e6 / 4 * 6 * 7 / 8)
    assert sent["edp"] == pytest.approx(8e6 / 4 * 6 * 7 / 8)
    assert "ep" not in sent  # a group of one sends nothing
    moe = {kind.name: kind.nbytes for kind in traffic(Shape(world=8, ep=4), MOE)}
    assert moe["ep"] == pytest.approx(4 * 256 * 64 * 2 * 2 * 4 * 4)
    assert set(moe) == {"ep", "dp-cp", "edp"}


def test_seconds_of_the_busiest_link() -> None:
    fabric = parse_topology("SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n[3-4]\n")
    shape = Shape(world=8)
    kinds = [Traffic("dp-cp", Pattern.RING, shape.groups("dp"), 1e9)]
    labels = labels_of(fabric, ["n1", "n2", "n3", "n4"])
    rates = LinkRates(nvlink_gb_s=200, nic_gb_s=10)
    # One of the two ranks of a node sends 1 GB through the node's 2 rails of 10 GB/s.
    assert evaluate(kinds, labels, 2, rates).expected_s == pytest.approx(1 / 20)
    thin = dataclasses.replace(rates, oversubscription=8)
    # A leaf's 4 rails are 4 x 10 / 8 GB/s above it.
    assert evaluate(kinds, labels, 2, thin).expected_s == pytest.approx(1 / 5)
    block = dataclasses.replace(thin, nvlink_levels=1, oversubscription=1)
    assert evaluate(kinds, labels, 2, block).expected_s == pytest.approx(1 / 40)


def test_without_topology_nothing_is_said_about_the_spine() -> None:
    hosts = ["a", "b"]
    shape = Shape(world=4)
    cost = evaluate(traffic(shape, MOE), labels_of(flat_fabric(hosts), hosts), 2, LinkRates())
    assert cost.spine_bytes == 0
    assert cost.network_bytes > 0
    assert cost.mean_hops == 2
    assert gain(cost, cost) == {"spine_bytes": 0.0, "link_bytes": 0.0, "expected_s": 0.0}
    labels = labels_of(flat_fabric(["a"]), ["a"])
    alone = evaluate(traffic(Shape(world=2), MOE), labels, 2, LinkRates())
    assert alone.mean_hops == 0
