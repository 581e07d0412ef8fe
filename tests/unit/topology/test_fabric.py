"""Text of scontrol, topology.conf and the environment as recorded; distances against a graph."""

import collections
import random

import pytest

from relax_hpc.errors import TopologyError
from relax_hpc.topology.fabric import (
    FabricKind,
    flat_fabric,
    natural_key,
    parse_addresses,
    parse_topology,
)

# scontrol 22.05.8: parents repeat all nodes below them
SHOWN_TREE = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=gpu[001-003]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=gpu[004-006]
SwitchName=leaf3 Level=0 LinkSpeed=1 Nodes=gpu[007-008]
SwitchName=spine1 Level=1 LinkSpeed=1 Nodes=gpu[001-006] Switches=leaf[1-2]
SwitchName=spine2 Level=1 LinkSpeed=1 Nodes=gpu[007-008] Switches=leaf3
SwitchName=core Level=2 LinkSpeed=1 Nodes=gpu[001-008] Switches=spine[1-2]
"""
CONF_TREE = """\
# the racks
SwitchName=core switches=spine[1-2]   # parents may come first
switchname=spine1 Switches=leaf1,\\
leaf2 LinkSpeed=100
SwitchName=spine2 Switches=leaf3
SwitchName=leaf1 Nodes=gpu[001-003]
SwitchName=leaf2 Nodes=gpu[004-006]
SwitchName=leaf3 Nodes=gpu[007-008]
"""
SHOWN_BLOCKS = """\
BlockName=b1 BlockIndex=0 Nodes=gpu[001-004] BlockSize=4
BlockName=b2 BlockIndex=1 Nodes=gpu[005-008] BlockSize=4
BlockName=b3 BlockIndex=2 Nodes=gpu[009-012] BlockSize=4
BlockName=b4 BlockIndex=3 Nodes=gpu[013-016] BlockSize=4
AggregatedBlock=b[1-2] BlockIndex=4 Nodes=gpu[001-008] BlockSize=8
AggregatedBlock=b[3-4] BlockIndex=5 Nodes=gpu[009-016] BlockSize=8
AggregatedBlock=b[1-4] BlockIndex=6 Nodes=gpu[001-016] BlockSize=16
"""


@pytest.mark.parametrize("text", [SHOWN_TREE, CONF_TREE], ids=["scontrol", "topology.conf"])
def test_a_tree(text: str) -> None:
    fabric = parse_topology(text)
    assert fabric.kind is FabricKind.TREE
    assert fabric.depth == 3
    assert fabric.path("gpu005") == ("leaf2", "spine1", "core")
    assert fabric.common_switch("gpu001", "gpu003") == "leaf1"
    assert fabric.common_switch("gpu001", "gpu006") == "spine1"
    assert fabric.common_switch("gpu001", "gpu008") == "core"
    hops = [fabric.distance("gpu001", other) for other in ("gpu001", "gpu002", "gpu004", "gpu008")]
    assert hops == [0, 2, 4, 6]
    assert fabric.links("gpu001", "gpu004") == [
        ("gpu001", "leaf1"),
        ("leaf1", "spine1"),
        ("spine1", "leaf2"),
        ("leaf2", "gpu004"),
    ]
    assert fabric.problems == ()


def test_blocks_and_what_slurm_aggregates() -> None:
    fabric = parse_topology(SHOWN_BLOCKS)
    assert fabric.kind is FabricKind.BLOCK
    assert fabric.path("gpu006") == ("b2", "b[1-2]", "b[1-4]")
    assert [fabric.distance("gpu001", f"gpu{n:03d}") for n in (2, 5, 16)] == [2, 4, 6]


def test_blocks_of_topology_conf() -> None:
    text = "BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n[3-4]\nBlockSizes=2,4\n"
    fabric = parse_topology(text)
    assert (fabric.kind, fabric.depth, fabric.path("n3")) == (FabricKind.BLOCK, 1, ("b2",))


def test_no_plugin() -> None:
    fabric = parse_topology("No topology information available\n")
    assert (fabric.kind, fabric.depth) == (FabricKind.NONE, 0)
    assert flat_fabric(["a", "b"]).distance("a", "b") == 2


def test_addresses_tell_the_same_as_scontrol() -> None:
    shown = parse_topology(SHOWN_TREE)
    addresses = {
        host: (".".join([*reversed(path), host]), "switch.switch.switch.node")
        for host, path in shown.paths.items()
    }
    assert addresses["gpu001"][0] == "core.spine1.leaf1.gpu001"  # as a task saw it (22.05.8)
    assert parse_addresses(addresses).paths == shown.paths


def test_addresses_of_blocks_of_dotted_hosts_and_without_plugin() -> None:
    blocks = parse_addresses({"dgx-a1.c.l": ("b1.dgx-a1.c.l", "block.node")})
    assert (blocks.kind, blocks.path("dgx-a1.c.l")) == (FabricKind.BLOCK, ("b1",))
    tree = parse_addresses({"dgx-a1.c.l": ("s1.l1.dgx-a1.c.l", "switch.switch.node")})
    assert tree.path("dgx-a1.c.l") == ("l1", "s1")
    assert parse_addresses({"n1": ("n1", "node")}).kind is FabricKind.NONE


def test_addresses_that_are_not_set() -> None:
    fabric = parse_addresses({"n1": ("", ""), "n2.x.y": ("n2.x.y", "node")})
    assert (fabric.kind, fabric.depth) == (FabricKind.NONE, 0)
    assert fabric.distance("n1", "n2.x.y") == 2


def test_blocks_of_blocks_by_address() -> None:
    told = {f"n{n}": (f"B{n // 4}.b{n // 2}.n{n}", "block.block.node") for n in range(8)}
    fabric = parse_addresses(told)
    assert fabric.kind is FabricKind.BLOCK
    assert [fabric.distance("n0", f"n{n}") for n in (1, 2, 4)] == [2, 4, 6]


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "No topology information available"])
def test_texts_of_no_topology(text: str) -> None:
    assert parse_topology(text).kind is FabricKind.NONE


def test_text_of_newer_slurms_is_read_as_before() -> None:
    """24.11 adds keys and quotes, 25.05 names the topology; unknown keys and lines are left out."""
    text = 'Topology=default Cluster=yes\nSwitchName="l1" Level=0 Nodes=n[1-2] New=x\n'
    fabric = parse_topology(text + "SwitchName=s Level=1 Nodes=n[1-2] Switches=l1\n")
    assert fabric.path("n2") == ("l1", "s")


def test_several_parents_on_one_level_are_one_place() -> None:
    pattern = "switch.switch.node"
    addresses = {"n1": ("s[1-2].l1.n1", pattern), "n2": ("s2.l2.n2", pattern)}
    fabric = parse_addresses(addresses)
    assert fabric.path("n1") == ("l1", "s[1-2]")
    assert fabric.common_switch("n1", "n2") == "s[1-2]"


@pytest.mark.parametrize(
    ("addresses", "words"),
    [
        ({"n1": ("s1.n1", "switch.switch.node")}, "n1: SLURM_TOPOLOGY_ADDR"),
        ({"n1": ("s1.n1", "switch.node"), "n2": ("b1.n2", "block.node")}, "differs between"),
        ({"n1": ("s[1.n1", "switch.node")}, r"element 's\[1'"),
    ],
)
def test_addresses_that_do_not_fit(addresses: dict[str, tuple[str, str]], words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        parse_addresses(addresses)


def test_text_cut_by_slurm_topo_len_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"leaf1: nodes=.*unset SLURM_TOPO_LEN"):
        parse_topology("SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=gpu[001-00\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("SwitchName=s1 Switches=leaf9\n", "child leaf9"),
        ("SwitchName=s1 Nodes=n1\nBlockName=b1 Nodes=n2\n", "switches and blocks"),
        (
            "SwitchName=l Nodes=n1\nSwitchName=a Switches=l,b\nSwitchName=b Switches=a\n",
            "in a circle",
        ),
    ],
)
def test_topology_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        parse_topology(text)


def test_odd_nodes() -> None:
    text = SHOWN_TREE + "SwitchName=leaf9 Level=0 LinkSpeed=1 Nodes=gpu008\nSwitchName=empty\n"
    fabric = parse_topology(text)
    assert fabric.path("GPU001") == fabric.path("gpu001")  # names in other letters
    assert fabric.missing(["gpu001", "GPU002", "login1"]) == ["login1"]
    assert fabric.distance("login1", "gpu001") == 8  # nobody knows: farther than any other
    assert fabric.common_switch("login1", "gpu001") is None
    assert fabric.links("gpu001", "login1")[3:5] == [("core", "fabric"), ("fabric", "?login1")]
    assert fabric.path("gpu008")[0] == "leaf[3,9]"
    assert any("gpu008 is under leaf3, leaf9" in problem for problem in fabric.problems)
    assert any("empty has no nodes" in problem for problem in fabric.problems)


def test_a_branch_that_ends_lower_stays_apart() -> None:
    text = "SwitchName=l1 Nodes=a\nSwitchName=l2 Nodes=b\nSwitchName=l3 Nodes=c\n"
    fabric = parse_topology(text + "SwitchName=s Switches=l[1-2]\n")
    assert fabric.distance("a", "b") == 4
    assert fabric.common_switch("a", "c") is None
    assert fabric.distance("a", "c") == 6


@pytest.mark.parametrize("seed", range(10))
def test_distances_are_shortest_ways_in_the_graph(seed: int) -> None:
    rng = random.Random(seed)
    lines, edges = _random_tree(rng)
    rng.shuffle(lines)
    fabric = parse_topology("\n".join(lines))
    hosts = list(fabric.paths)
    for _ in range(50):
        a, b = rng.choice(hosts), rng.choice(hosts)
        assert fabric.distance(a, b) == _shortest(edges, a, b)
        assert len(fabric.links(a, b)) == fabric.distance(a, b)


def _random_tree(rng: random.Random) -> tuple[list[str], dict[str, set[str]]]:
    edges: dict[str, set[str]] = collections.defaultdict(set)
    names = [f"n{i}" for i in range(rng.randint(5, 40))]
    lines = []
    for level in range(rng.randint(1, 3)):
        word = "Nodes" if level == 0 else "Switches"
        rng.shuffle(names)
        above = []
        while names:
            width = rng.randint(1, 6)
            children, names = names[:width], names[width:]
            above.append(f"sw{level}x{len(above)}")
            lines.append(f"SwitchName={above[-1]} {word}={','.join(children)}")
            for child in children:
                edges[child].add(above[-1])
                edges[above[-1]].add(child)
        names = above
    lines.append(f"SwitchName=top Switches={','.join(names)}")
    for child in names:
        edges[child].add("top")
        edges["top"].add(child)
    return lines, edges


def _shortest(edges: dict[str, set[str]], start: str, goal: str) -> int:
    ways = {start: 0}
    queue = collections.deque([start])
    while queue:
        here = queue.popleft()
        for there in edges[here] - ways.keys():
            ways[there] = ways[here] + 1
            queue.append(there)
    return ways[goal]


def test_names_sort_as_slurm_sorts_nodes() -> None:
    names = ["n10", "n9", "gpu2", "gpu10", "n9b", "gpu"]
    assert sorted(names, key=natural_key) == ["gpu", "gpu2", "gpu10", "n9", "n9b", "n10"]
