"""Engines near their weights."""

import random
from collections import Counter

import pytest

from relax_hpc.errors import TopologyError
from relax_hpc.topology.engines import place_engines
from relax_hpc.topology.fabric import Fabric, flat_fabric, parse_topology

TREE = parse_topology(
    "SwitchName=l1 Nodes=n[1-4]\nSwitchName=l2 Nodes=n[5-8]\nSwitchName=l3 Nodes=n[9-12]\n"
    "SwitchName=s1 Switches=l1,l2\nSwitchName=s2 Switches=l3\nSwitchName=core Switches=s1,s2\n"
)


def test_free_hosts_under_the_leaf_of_a_source_come_first() -> None:
    free = dict.fromkeys(["n12", "n6", "n3", "n9", "n2"], 8)
    found = place_engines(TREE, free, num_engines=3, engine_gpus=8, sources=["n1"])
    assert [(engine.hosts, engine.source, engine.distance) for engine in found] == [
        (("n2",), "n1", 2),
        (("n3",), "n1", 2),
        (("n6",), "n1", 4),
    ]


def test_small_engines_share_hosts_and_a_train_host_may_have_room() -> None:
    found = place_engines(TREE, {"n1": 2, "n5": 8}, num_engines=4, engine_gpus=2, sources=["n1"])
    assert [(engine.hosts[0], engine.first_gpu, engine.distance) for engine in found] == [
        ("n1", 0, 0),
        ("n5", 0, 4),
        ("n5", 2, 4),
        ("n5", 4, 4),
    ]


def test_engines_of_several_hosts_stay_under_one_leaf() -> None:
    free = dict.fromkeys(["n3", "n4", "n7", "n8", "n12"], 8)
    found = place_engines(TREE, free, num_engines=2, engine_gpus=16, sources=["n5"])
    assert [engine.hosts for engine in found] == [("n7", "n8"), ("n3", "n4")]
    with pytest.raises(TopologyError, match="3 engines of 16 GPUs do not fit"):
        place_engines(TREE, free, num_engines=3, engine_gpus=16)
    with pytest.raises(TopologyError, match="12 GPUs does not fill hosts of 8"):
        place_engines(TREE, free, num_engines=1, engine_gpus=12)


def test_equally_near_sources_feed_equally_many() -> None:
    free = dict.fromkeys([f"n{i}" for i in range(3, 13)], 8)
    found = place_engines(TREE, free, num_engines=10, engine_gpus=4, sources=["n1", "n2"])
    assert Counter(engine.source for engine in found) == {"n1": 5, "n2": 5}


def test_without_topology_or_sources() -> None:
    flat = flat_fabric(["a", "b"])
    assert (
        place_engines(flat, {"b": 1}, num_engines=1, engine_gpus=1, sources=["a"])[0].distance == 2
    )
    lonely = place_engines(flat, {"b": 1, "a": 1}, num_engines=2, engine_gpus=1)
    assert [(engine.hosts, engine.source, engine.distance) for engine in lonely] == [
        (("a",), "", 0),
        (("b",), "", 0),
    ]
    with pytest.raises(TopologyError, match="do not fit"):
        place_engines(flat, {}, num_engines=1, engine_gpus=1)


@pytest.mark.parametrize("seed", range(20))
def test_the_distance_is_that_of_the_nearest_source_and_no_gpu_is_given_twice(seed: int) -> None:
    rng = random.Random(seed)
    hosts = [f"n{i}" for i in range(1, 13)]
    rng.shuffle(hosts)
    fabric: Fabric = TREE
    sources, free = hosts[:3], {host: rng.randint(1, 8) for host in hosts[2:]}
    size = rng.randint(1, 3)
    room = sum(gpus // size for gpus in free.values())
    found = place_engines(fabric, free, num_engines=room, engine_gpus=size, sources=sources)
    taken = set()
    for engine in found:
        (host,) = engine.hosts
        assert engine.distance == min(fabric.distance(host, source) for source in sources)
        assert engine.distance == fabric.distance(host, engine.source)
        gpus = {(host, engine.first_gpu + i) for i in range(engine.num_gpus)}
        assert not gpus & taken
        assert engine.first_gpu + engine.num_gpus <= free[host]
        taken |= gpus
    nearest_first = [engine.distance for engine in found]
    assert nearest_first == sorted(nearest_first)
