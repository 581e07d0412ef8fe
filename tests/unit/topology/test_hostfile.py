"""What is published: srun's host file by srun's rules, and the rank map."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from relax_hpc.errors import TopologyError
from relax_hpc.topology.cost import Workload
from relax_hpc.topology.fabric import Fabric, flat_fabric, parse_topology
from relax_hpc.topology.hostfile import (
    RankMap,
    arbitrary_options,
    can_use_arbitrary,
    host_file,
    parse_host_file,
    rank_map,
    read_rank_map,
)
from relax_hpc.topology.place import Placement, place_ranks
from relax_hpc.topology.ranks import Shape

LOAD = Workload(layers=8, hidden=64, kv_hidden=64, dense_params=1e8)
TREE = parse_topology(
    "SwitchName=l1 Nodes=n1,n4\nSwitchName=l2 Nodes=n2,n3\nSwitchName=s Switches=l1,l2"
)


def placed(fabric: Fabric = TREE, names: str = "n1 n2 n3 n4", pp: int = 2) -> Placement:
    hosts = dict.fromkeys(names.split(), 2)
    return place_ranks(fabric, hosts, Shape(world=2 * len(hosts), tp=2, pp=pp), LOAD)


def test_the_host_file_names_each_ranks_host_in_rank_order() -> None:
    placement = placed()
    text = host_file(placement)
    assert parse_host_file(text) == [placement.host_of(rank) for rank in range(8)]
    assert set(parse_host_file(text)[:4]) in ({"n1", "n4"}, {"n2", "n3"})  # a stage is in one leaf
    assert not any(character in text for character in "[]*, #")
    assert arbitrary_options(8) == ["--ntasks=8", "--distribution=arbitrary"]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a\nb\na\n", ["a", "b", "a"]),  # interleaving is legal
        ("a*2\nb # spare\n# none\n\nc,d*2\n", ["a", "a", "b", "c", "d", "d"]),
    ],
)
def test_host_files_that_srun_reads(text: str, hosts: list[str]) -> None:
    assert parse_host_file(text) == hosts


@pytest.mark.parametrize("text", [" a\n", "gpu[1-2]\n", "a**2\n", "-a\n"])
def test_host_files_that_srun_refuses(text: str) -> None:
    with pytest.raises(TopologyError, match="host file, line 1"):
        parse_host_file(text)


def test_a_host_that_cannot_stand_in_a_file() -> None:
    with pytest.raises(TopologyError, match="cannot stand in a host file"):
        host_file(placed(flat_fabric(()), "_a _b", pp=1))


def test_block_topology_of_new_slurm_takes_no_host_file() -> None:
    block = parse_topology("BlockName=b Nodes=n1")
    assert can_use_arbitrary(block, (25, 11))
    assert not can_use_arbitrary(block, (26, 5))
    assert can_use_arbitrary(TREE, (26, 5))


def test_the_rank_map_tells_every_rank_and_comes_back_equal() -> None:
    placement = placed()
    told = rank_map(placement, TREE, attempt=3, gpu_order=(1, 0))
    again = read_rank_map(told.to_json())
    assert again == told
    assert again.shape.shape() == placement.shape
    assert again.hosts() == list(placement.hosts)
    for rank in range(8):
        place = again.check(rank, placement.host_of(rank).upper())
        assert (place.local_rank, place.gpu) == (rank % 2, 1 - rank % 2)
        assert place.leaf == TREE.path(place.host)[0]
        assert again.rank_of(place.host, place.local_rank) == rank


def test_ranks_are_looked_up_not_derived() -> None:
    """A sorted node list would put rank 0 on the first name; the map says where it is."""
    fabric = parse_topology(
        "SwitchName=l1 Nodes=n1,n5\nSwitchName=l2 Nodes=n2,n3,n4\nSwitchName=s Switches=l1,l2"
    )
    placement = place_ranks(
        fabric, dict.fromkeys(["n1", "n2", "n3", "n4", "n5"], 2), Shape(world=6), LOAD
    )
    told = rank_map(placement, fabric, attempt=1)
    assert told.ranks[0].host == "n2"
    assert told.spares == ["n1", "n5"]
    with pytest.raises(
        TopologyError, match=r"rank 0 runs on n1, the rank map of attempt 1 says n2"
    ):
        told.check(0, "n1")
    with pytest.raises(TopologyError, match="no rank 0 on n1"):
        told.rank_of("n1", 0)
    with pytest.raises(TopologyError, match="rank 6 is not in the rank map of 6"):
        told.check(6, "n2")


def _broken(told: RankMap, **changes: object) -> str:
    return json.dumps({**json.loads(told.to_json()), **changes})


def test_what_is_no_rank_map() -> None:
    told = rank_map(placed(), TREE, attempt=1)
    with pytest.raises(TopologyError, match="format 2, this version reads 1"):
        read_rank_map(_broken(told, format=2))
    with pytest.raises(TopologyError, match="0 ranks, its shape says 8"):
        read_rank_map(_broken(told, ranks=[]))
    with pytest.raises(TopologyError, match="cannot be read"):
        read_rank_map(told.to_json()[:-20])
    with pytest.raises(TopologyError, match="2 ranks a node, but GPUs"):
        rank_map(placed(), TREE, attempt=1, gpu_order=(0,))


def test_an_order_survives_a_requeue_through_the_published_map() -> None:
    first = placed()
    told = read_rank_map(rank_map(first, TREE, attempt=1).to_json())
    hosts = dict.fromkeys(["n4", "n3", "n2", "n1"], 2)
    second = place_ranks(TREE, hosts, first.shape, LOAD, previous=told.hosts())
    assert second.hosts == first.hosts


def test_what_srun_is_given_reaches_it(tmp_path: Path) -> None:
    """A stand-in for srun reads SLURM_HOSTFILE as the real one does; no --nodes beside it."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\ncase "$*" in *--nodes*) exit 1;; esac\ncat "$SLURM_HOSTFILE"\n')
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    placement = placed()
    path = tmp_path / "hosts of the train step"
    path.write_text(host_file(placement), encoding="ascii")
    told = subprocess.run(
        [srun, *arbitrary_options(8)],
        env={**os.environ, "SLURM_HOSTFILE": str(path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert told.stdout.split() == [placement.host_of(rank) for rank in range(8)]
