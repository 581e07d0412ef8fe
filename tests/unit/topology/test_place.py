"""Orders of hosts: promises on random broken topologies, and small cases against all orders."""

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from relax_hpc.errors import TopologyError
from relax_hpc.topology.cost import LinkRates, Workload, evaluate, labels_of, traffic
from relax_hpc.topology.fabric import Fabric, flat_fabric, parse_topology
from relax_hpc.topology.place import MAX_EXTRA_LINK_BYTES, Placement, _walk, place_ranks
from relax_hpc.topology.ranks import PIPELINE_INNER_ORDER, Shape

DENSE = Workload(layers=80, hidden=8192, kv_hidden=1024, dense_params=72e9)
MOE = Workload(
    layers=32,
    hidden=4096,
    kv_hidden=512,
    dense_params=4e9,
    expert_params=60e9,
    moe_layers=32,
    top_k=8,
)
SIZES = [
    (DENSE, {"tp": 8, "pp": 4}),
    (DENSE, {"tp": 4, "pp": 3}),
    (DENSE, {"tp": 2, "cp": 8, "pp": 2}),
    (DENSE, {"tp": 8, "pp": 4, "order": PIPELINE_INNER_ORDER}),
    (MOE, {"ep": 32, "etp": 1, "pp": 2}),
    (MOE, {"tp": 2, "ep": 16, "etp": 1}),
    (DENSE, {"pp": 16}),  # a node holds a part of a stage or several
]


def tree(leaves: list[list[str]], pods: int = 1) -> Fabric:
    lines = [f"SwitchName=l{i} Nodes={','.join(leaf)}" for i, leaf in enumerate(leaves)]
    names = [f"l{i}" for i in range(len(leaves))]
    for pod in range(pods):
        lines.append(f"SwitchName=p{pod} Switches={','.join(names[pod::pods])}")
    lines.append(f"SwitchName=core Switches=p[0-{pods - 1}]")
    return parse_topology("\n".join(lines))


def broken_fabric(rng: random.Random) -> tuple[Fabric, dict[str, int], list[str]]:
    """Uneven leaves, nodes that the topology misses, nodes with fewer GPUs, dead nodes."""
    names = [f"n{i}" for i in range(rng.randint(24, 60))]
    listed = [name for name in names if rng.random() > 0.05]
    rng.shuffle(listed)
    leaves = []
    while listed:
        width = rng.randint(1, 9)
        leaves.append(listed[:width])
        listed = listed[width:]
    hosts = {name: rng.choice([8] * 15 + [4]) for name in names}
    dead = rng.sample(names, 2)
    return tree(leaves, rng.randint(1, 3)), hosts, dead


def largest_shape(hosts: int, per_node: int, sizes: dict[str, int | str]) -> Shape:
    numbers = {key: value for key, value in sizes.items() if isinstance(value, int)}
    step = numbers.get("pp", 1) * max(
        numbers.get("tp", 1) * numbers.get("cp", 1),
        numbers.get("ep", 1) * numbers.get("etp", 1),
        per_node,
    )
    return Shape(world=hosts * per_node // step * step, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("load", "sizes"), SIZES, ids=[str(sizes) for _, sizes in SIZES])
def test_promises_on_broken_topologies(load: Workload, sizes: dict[str, int | str]) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        fabric, hosts, dead = broken_fabric(rng)
        whole = [host for host, gpus in hosts.items() if gpus == 8 and host not in dead]
        shape = largest_shape(len(whole) - rng.randint(0, 3), 8, sizes)
        found = place_ranks(fabric, hosts, shape, load, exclude=dead)
        # Every rank once, on a host that is there, whole and alive; the others are spares.
        assert found.per_node == 8
        assert len(set(found.hosts)) == len(found.hosts) == shape.world // 8
        assert set(found.hosts) | set(found.spares) == set(whole)
        assert not set(found.hosts) & set(found.spares)
        # TP stays on a host; no plan is worse than Slurm's own order of the same hosts.
        for group in shape.groups("tp").tolist():
            assert len({found.host_of(rank) for rank in group}) == 1
        assert found.cost.spine_bytes <= found.block_cost.spine_bytes
        # What it says of itself is what the model says of these hosts, and of Slurm's.
        used = (found.hosts, whole[: len(found.hosts)])
        for told, hosts_used in zip((found.cost, found.block_cost), used, strict=True):
            counted = spine_bytes_of(fabric, hosts_used, shape, load)
            assert told.spine_bytes == pytest.approx(counted)
        # The same hosts in another order give the same plan, whichever order Slurm has.
        if found.layout != "block order":
            mixed = list(hosts.items())
            rng.shuffle(mixed)
            again = place_ranks(fabric, dict(mixed), shape, load, exclude=dead)
            if again.layout != "block order":
                assert again.hosts == found.hosts


def spine_bytes_of(fabric: Fabric, hosts: Sequence[str], shape: Shape, load: Workload) -> float:
    labels = labels_of(fabric, hosts)
    kinds = traffic(shape, load)
    return evaluate(kinds, labels, shape.world // len(hosts), LinkRates()).spine_bytes


@pytest.mark.parametrize("seed", range(30))
def test_near_the_best_of_all_orders(seed: int) -> None:
    """Up to 9 hosts under 2 or 3 leaves: every way to give slots to leaves, spares included."""
    rng = random.Random(seed)
    names = [f"n{i}" for i in range(rng.randint(5, 9))]
    rng.shuffle(names)
    cuts = sorted(rng.sample(range(1, len(names)), rng.choice([1, 2])))
    leaves = [names[a:b] for a, b in itertools.pairwise([0, *cuts, len(names)])]
    pp = rng.choice([1, 2, 3, 4])
    size = (len(names) - rng.randint(0, 1)) // pp * pp
    shape = Shape(world=8 * size, tp=8, pp=pp)
    load = rng.choice([DENSE, MOE])
    found = place_ranks(tree(leaves), dict.fromkeys(sorted(names), 8), shape, load)
    kinds = traffic(shape, load)
    best = min(
        evaluate(kinds, np.array([range(size), row]), 8, LinkRates()).spine_bytes
        for row in itertools.product(range(len(leaves)), repeat=size)
        if all(row.count(leaf) <= len(hosts) for leaf, hosts in enumerate(leaves))
    )
    assert found.cost.spine_bytes <= 1.5 * best + 1


def test_ep_groups_get_whole_leaves_and_rests_are_joined() -> None:
    """Leaves of 7, 7, 5 and 5 hosts, EP groups of 4 hosts: a whole one each, two of 3 + 1."""
    leaves = [
        [f"{leaf}{i}" for i in range(size)] for leaf, size in zip("abcd", (7, 5, 7, 5), strict=True)
    ]
    fabric = tree(leaves)
    hosts = dict.fromkeys(
        [name for row in itertools.zip_longest(*leaves) for name in row if name], 8
    )
    found = place_ranks(fabric, hosts, Shape(world=192, ep=32, etp=1), MOE)
    groups = [found.hosts[first : first + 4] for first in range(0, 24, 4)]
    spread = sorted(len({host[0] for host in group}) for group in groups)
    assert spread == [1, 1, 1, 1, 2, 2]


def test_leaves_smaller_than_an_ep_group_are_joined_under_one_switch() -> None:
    """Leaves of 2 hosts, EP groups of 4 hosts: both leaves of a group under one spine."""
    leaves = [[f"l{i}.a.b", f"l{i}.c.d"] for i in range(8)]  # names with dots
    hosts = dict.fromkeys(
        sorted((host for leaf in leaves for host in leaf), key=lambda h: h[2:]), 8
    )
    fabric = tree(leaves, pods=2)
    found = place_ranks(fabric, hosts, Shape(world=128, ep=32, etp=1), MOE)
    for first in range(0, 16, 4):
        paths = [fabric.path(host) for host in found.hosts[first : first + 4]]
        assert len({path[0] for path in paths}) == 2
        assert len({path[1] for path in paths}) == 1


def test_spares_are_small_leaves_also_under_a_large_switch() -> None:
    fabric = parse_topology(
        "SwitchName=l1 Nodes=a[1-8]\nSwitchName=l2 Nodes=b1\nSwitchName=l3 Nodes=c[1-8]\n"
        "SwitchName=s1 Switches=l1,l2\nSwitchName=s2 Switches=l3\nSwitchName=core Switches=s1,s2\n"
    )
    hosts = dict.fromkeys(sorted(fabric.paths, key=lambda host: host[1:] + host), 8)
    found = place_ranks(fabric, hosts, Shape(world=128, tp=8, pp=2), DENSE)
    assert found.spares == ("b1",)


def test_a_leaf_over_the_end_of_a_strip_holds_the_same_columns_of_both() -> None:
    grid = np.arange(24).reshape(4, 6)
    walk = _walk(grid, height=2, unit=2).tolist()
    assert walk[:12] == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    assert walk[12:16] == [16, 17, 22, 23]  # below 4, 5, 10, 11
    assert sorted(walk) == list(range(24))


def rectangle_case() -> tuple[Fabric, dict[str, int], Shape]:
    names = [f"n{i:02d}" for i in range(36)]
    random.Random(3).shuffle(names)
    fabric = tree([names[first : first + 9] for first in range(0, 36, 9)])
    return fabric, dict.fromkeys(sorted(names), 8), Shape(world=256, tp=8, pp=4)


def test_the_summary_tells_what_was_gained() -> None:
    fabric, hosts, shape = rectangle_case()
    found = place_ranks(fabric, {**hosts, "small": 4}, shape, DENSE)
    lines = found.summary()
    assert lines[0].startswith("256 ranks on 32 nodes, 4 spare: ")
    saved = 1 - found.cost.spine_bytes / found.block_cost.spine_bytes
    assert f"{saved:.1%} less than Slurm's block order" in lines[1]
    assert "tp groups under 1.0 leaves, at most 1 (block order 1.0, 1)" in lines
    assert lines[-1] == "small left out: 4 GPUs, the others give 8 each"


def moved(before: Placement, after: Placement) -> int:
    return sum(a != b for a, b in zip(before.hosts, after.hosts, strict=True))


def test_a_lost_node_is_replaced_in_place_by_the_nearest_spare() -> None:
    fabric, hosts, shape = rectangle_case()
    first = place_ranks(fabric, hosts, shape, DENSE)
    with_leaf = {fabric.path(host)[0] for host in first.spares}
    lost = next(host for host in first.hosts if fabric.path(host)[0] in with_leaf)
    second = place_ranks(fabric, hosts, shape, DENSE, exclude=[lost], previous=first.hosts)
    assert second.layout == "kept"
    assert moved(first, second) == 1
    new = second.hosts[first.hosts.index(lost)]
    assert fabric.path(new)[0] == fabric.path(lost)[0]
    assert place_ranks(fabric, hosts, shape, DENSE, previous=first.hosts).hosts == first.hosts


def test_two_nodes_of_a_leaf_are_replaced_by_two_spares() -> None:
    fabric, hosts, shape = rectangle_case()
    first = place_ranks(fabric, hosts, shape, DENSE)
    lost = [host for host in first.hosts if fabric.path(host)[0] == fabric.path(first.hosts[0])[0]][
        :2
    ]
    second = place_ranks(fabric, hosts, shape, DENSE, exclude=lost, previous=first.hosts)
    assert (second.layout, moved(first, second)) == ("kept", 2)
    assert len(set(second.hosts)) == 32


@pytest.mark.parametrize("seed", range(10))
def test_after_a_requeue_on_other_nodes_no_rank_moves_without_need(seed: int) -> None:
    rng = random.Random(seed)
    fabric, hosts, shape = rectangle_case()
    given = dict.fromkeys(sorted(rng.sample(sorted(hosts), 34)), 8)
    first = place_ranks(fabric, given, shape, DENSE)
    other = dict.fromkeys(sorted(rng.sample(sorted(hosts), 34)), 8)
    second = place_ranks(fabric, other, shape, DENSE, previous=first.hosts)
    fresh = place_ranks(fabric, other, shape, DENSE)
    assert sorted([*second.hosts, *second.spares]) == sorted(other)
    assert second.cost.link_bytes <= (1 + MAX_EXTRA_LINK_BYTES) * fresh.cost.link_bytes
    if second.layout == "kept":
        assert moved(first, second) == len(set(first.hosts) - set(other))
    else:
        assert any("given up" in note for note in second.notes)


def test_a_previous_order_that_fits_no_more_is_not_kept() -> None:
    fabric, hosts, shape = rectangle_case()
    fresh = place_ranks(fabric, hosts, shape, DENSE)
    shuffled = random.Random(1).sample(sorted(hosts), 32)
    bad = place_ranks(fabric, hosts, shape, DENSE, previous=shuffled)
    assert bad.hosts == fresh.hosts
    assert any("given up" in note for note in bad.notes)
    other_size = place_ranks(fabric, hosts, shape, DENSE, previous=shuffled[:3])
    assert other_size.hosts == fresh.hosts
    strangers = [f"x{i}" for i in range(32)]
    assert place_ranks(fabric, hosts, shape, DENSE, previous=strangers).hosts == fresh.hosts


def test_all_nodes_get_the_same_number_of_ranks() -> None:
    hosts = {"n1": 8, "n2": 4, "n3": 8, "n4": 7}
    fabric = tree([["n1", "n2"], ["n3", "n4"]])
    found = place_ranks(fabric, hosts, Shape(world=16, tp=4), DENSE)
    assert (found.per_node, set(found.hosts)) == (8, {"n1", "n3"})
    assert "n4 left out: 7 GPUs, the others give 8 each" in found.notes
    with pytest.raises(TopologyError, match="1 x 8, 1 x 7, 1 x 4"):
        place_ranks(fabric, hosts, Shape(world=16, tp=4), DENSE, exclude=["N1"])
    smaller = place_ranks(fabric, hosts, Shape(world=12, tp=4), DENSE, exclude=["N1"])
    assert (smaller.per_node, set(smaller.hosts)) == (4, {"n2", "n3", "n4"})


def test_no_topology_keeps_slurms_order_and_says_so() -> None:
    hosts = dict.fromkeys(["n3", "n1", "n2"], 8)
    found = place_ranks(flat_fabric(hosts), hosts, Shape(world=16, tp=8), DENSE)
    assert found.hosts == ("n3", "n1")
    assert found.spares == ("n2",)
    assert any("no topology is known" in note for note in found.notes)


def test_nodes_that_the_topology_misses_are_named_and_used_last() -> None:
    fabric = tree([["n1", "n2"], ["n3", "n4"]])
    hosts = dict.fromkeys(["lost", "n1", "n2", "n3", "n4"], 8)
    found = place_ranks(fabric, hosts, Shape(world=32, tp=8), DENSE)
    assert found.spares == ("lost",)
    assert any("taken as far from all: lost" in note for note in found.notes)


def test_tp_wider_than_a_node_needs_nvlink_blocks() -> None:
    hosts = dict.fromkeys([f"n{i}" for i in (1, 5, 2, 6, 3, 7, 4, 8)], 4)
    text = "BlockName=b1 Nodes=n[1-4]\nBlockName=b2 Nodes=n[5-8]\n"
    shape = Shape(world=32, tp=16)
    found = place_ranks(parse_topology(text), hosts, shape, DENSE)
    for group in shape.groups("tp").tolist():
        assert {found.host_of(rank) for rank in group} in (
            {"n1", "n2", "n3", "n4"},
            {"n5", "n6", "n7", "n8"},
        )
    uneven = text.replace("n[1-4]", "n[1-3]").replace("n[5-8]", "n[4-8]")
    with pytest.raises(TopologyError, match="1 TP groups would cross NVLink blocks"):
        place_ranks(parse_topology(uneven), hosts, shape, DENSE)
    with pytest.raises(TopologyError, match="tp=16 do not fit"):
        place_ranks(tree([list(hosts)]), hosts, shape, DENSE)


@pytest.mark.parametrize(
    "hosts", [{}, {"n1": 8}, {"n1": 8, "n2": 6}], ids=["none", "too few", "no common divisor"]
)
def test_too_few_hosts(hosts: dict[str, int]) -> None:
    with pytest.raises(TopologyError, match="16 ranks with tp=8 do not fit: hosts x GPUs are"):
        place_ranks(flat_fabric(hosts), hosts, Shape(world=16, tp=8), DENSE)
