"""Nodes and the switches above them, as Slurm knows them: switch tree, blocks, or nothing.

Every node has a *path*: the switch of each level above it, leaf first. Two nodes are as far apart
as the levels on which their paths differ:

    level 2            core                    gpu001: (leaf1, spine1, core)
    level 1     spine1      spine2             gpu001 - gpu002: same leaf, 2 links
    level 0   leaf1 leaf2  leaf3 leaf4         gpu001 - another node under spine1: 4 links

Switches of one level that have a child in common (redundant leaves, several spines over the same
leaves) are one place: whatever is below reaches all of it without going higher. Pure text and
dictionaries; nothing here runs a command.
"""

import dataclasses
import enum
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from relax_hpc.errors import ConfigError, TopologyError
from relax_hpc.slurm import compress_hostlist, expand_hostlist


class FabricKind(enum.StrEnum):
    """Which of Slurm's topology plugins describes the nodes."""

    TREE = "tree"
    BLOCK = "block"
    """A block is one NVLink domain of several nodes (topology/block, Slurm >= 23.11)."""
    NONE = "none"
    """topology/flat or default: every node is as far from every other."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """Where nodes hang. Made by `parse_topology`, `parse_addresses` or `flat_fabric`."""

    kind: FabricKind
    depth: int
    """Levels of switches above a node; 0 without a topology plugin."""
    paths: Mapping[str, tuple[str, ...]]
    """Switches above each node, leaf first, `depth` of them."""
    problems: tuple[str, ...] = ()
    """What looked odd: a node under two leaves, a switch without nodes. For the log."""

    def path(self, host: str) -> tuple[str, ...]:
        """Switches above a host, leaf first. One that the topology misses is far from all others.

        A name in other letters counts as the same host: Slurm's node names may differ from what
        `hostname` says by case only.
        """
        return self.all_paths([host])[0]

    def all_paths(self, hosts: Sequence[str]) -> list[tuple[str, ...]]:
        """Return `path` of many hosts; reads the names once."""
        missing = [host for host in hosts if host not in self.paths]
        folded = {name.casefold(): name for name in self.paths} if missing else {}
        known = {host: folded.get(host.casefold(), "") for host in missing}
        return [
            self.paths.get(known.get(host, host)) or (f"?{host}",) * self.depth for host in hosts
        ]

    def missing(self, hosts: Iterable[str]) -> list[str]:
        """Hosts that the topology does not know."""
        known = {name.casefold() for name in self.paths}
        return [host for host in hosts if host.casefold() not in known]

    def common_switch(self, a: str, b: str) -> str | None:
        """Lowest switch above both; None if there is none (or no topology)."""
        pairs = zip(self.path(a), self.path(b), strict=True)
        return next((left for left, right in pairs if left == right), None)

    def distance(self, a: str, b: str) -> int:
        """Links between two hosts: 0 on one host, 2 under one leaf, 4 one level higher, ..."""
        if a.casefold() == b.casefold():
            return 0
        pairs = zip(self.path(a), self.path(b), strict=True)
        return 2 * (1 + sum(left != right for left, right in pairs))

    def links(self, a: str, b: str) -> list[tuple[str, str]]:
        """Links of the way from a to b in order, e.g. `[(n1, leaf1), (leaf1, n2)]`.

        Where no switch is common, the way leads through `fabric`, the part that nobody described.
        """
        if a.casefold() == b.casefold():
            return []
        up, down = [a], [b]
        for left, right in zip(self.path(a), self.path(b), strict=True):
            up.append(left)
            if left == right:
                break
            down.append(right)
        else:
            up.append("fabric")
        way = [*up, *reversed(down)]
        return list(itertools.pairwise(way))


def flat_fabric(hosts: Iterable[str]) -> Fabric:
    """Describe nodes of which no topology is known."""
    return Fabric(kind=FabricKind.NONE, depth=0, paths={host: () for host in hosts})


def natural_key(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Sort key that puts n9 before n10, as Slurm sorts its node table."""
    pieces = re.findall(r"\d+|\D+", name)
    return tuple((p.isdigit(), int(p) if p.isdigit() else 0, p) for p in pieces)


def parse_topology(text: str) -> Fabric:
    """Read `scontrol show topology`, or a topology.conf, of the tree or the block plugin.

    scontrol repeats all nodes below a parent beside its `Switches=`; only the leaves' count. Text
    without switches and blocks ("No topology information available") is a flat fabric.

    Raises:
        TopologyError: a line is cut (SLURM_TOPO_LEN), names an unknown switch, or mixes plugins.
    """
    records = [_record(line) for line in _logical_lines(text)]
    switches = [record for record in records if "switchname" in record]
    blocks = [record for record in records if "blockname" in record]
    if switches and blocks:
        raise TopologyError("topology: has switches and blocks; give one topology at a time")
    if switches:
        return _tree(switches)
    if blocks:
        return _blocks(blocks, [record for record in records if "aggregatedblock" in record])
    return flat_fabric(())


def _logical_lines(text: str) -> list[str]:
    joined = text.replace("\\\n", "")  # as slurm.conf(5): the next line goes on at once
    return [line for raw in joined.splitlines() if (line := raw.partition("#")[0].strip())]


def _record(line: str) -> dict[str, str]:
    pairs = (word.partition("=") for word in line.split())
    return {key.casefold(): value.strip('"') for key, mark, value in pairs if mark}


def _names(record: Mapping[str, str], key: str) -> list[str]:
    try:
        return expand_hostlist(record.get(key, ""))
    except ConfigError as err:
        name = record.get("switchname") or record.get("blockname") or "?"
        raise TopologyError(
            f"topology of {name}: {key}={record[key][-60:]!r} cannot be read ({err}); if the line "
            "is cut, unset SLURM_TOPO_LEN and ask again"
        ) from err


def _tree(records: Sequence[dict[str, str]]) -> Fabric:
    leaves: dict[str, list[str]] = {}
    parents: dict[str, list[str]] = {}
    for record in records:
        name = record["switchname"]
        children = _names(record, "switches")
        if not children:
            leaves.setdefault(name, []).extend(_names(record, "nodes"))
        for child in children:
            parents.setdefault(child, []).append(name)
    known = {record["switchname"] for record in records}
    for child, above in parents.items():
        if child not in known:
            raise TopologyError(
                f"topology: switch {above[0]} has the child {child}, which has no SwitchName line"
            )
    return _build(FabricKind.TREE, leaves, parents)


def _blocks(records: Sequence[dict[str, str]], larger: Sequence[dict[str, str]]) -> Fabric:
    leaves = {record["blockname"]: _names(record, "nodes") for record in records}
    parents: dict[str, list[str]] = {}
    below: dict[int, list[str]] = {}  # size in blocks -> names that have a parent of that size
    for record in larger:
        name = record["aggregatedblock"]
        members = _names(record, "aggregatedblock")
        below.setdefault(len(members), []).append(name)
    sizes = sorted(below)
    for size, next_size in zip([1, *sizes], sizes, strict=False):
        lower = list(leaves) if size == 1 else below[size]
        for name in below[next_size]:
            inside = set(expand_hostlist(name))
            for child in lower:
                if child != name and set(expand_hostlist(child)) <= inside:
                    parents.setdefault(child, []).append(name)
    return _build(FabricKind.BLOCK, leaves, parents)


def parse_addresses(addresses: Mapping[str, tuple[str, str]]) -> Fabric:
    """Build the fabric from each node's (SLURM_TOPOLOGY_ADDR, SLURM_TOPOLOGY_ADDR_PATTERN).

    Each task sees its own node's only, so one task per node must have told its own. The pattern
    says how many elements there are; the last takes the rest, for host names with dots. Parents
    come as one element when there are several (`s[1-2]`). Works in a container without scontrol.
    Both empty, as where the variables are not set, is a node without topology.

    Raises:
        TopologyError: address and pattern do not fit, or nodes disagree about the plugin.
    """
    leaves: dict[str, list[str]] = {}
    parents: dict[str, list[str]] = {}
    addresses = {host: told if any(told) else (host, "node") for host, told in addresses.items()}
    patterns = {pattern for _, pattern in addresses.values()}
    if len(patterns) > 1:
        raise TopologyError(
            f"SLURM_TOPOLOGY_ADDR_PATTERN differs between nodes: {', '.join(sorted(patterns))}; "
            "nodes of several fabrics need one plan each"
        )
    for host, (address, pattern) in addresses.items():
        kinds = pattern.split(".")
        parts = address.split(".", len(kinds) - 1)
        if kinds[-1] != "node" or len(parts) != len(kinds) or not all(parts):
            raise TopologyError(
                f"node {host}: SLURM_TOPOLOGY_ADDR={address!r} does not fit the pattern {pattern!r}"
            )
        if len(parts) == 1:
            continue
        levels = [_address_switches(host, part) for part in reversed(parts[:-1])]
        for leaf in levels[0]:
            leaves.setdefault(leaf, []).append(host)
        for below, above in itertools.pairwise(levels):
            for child in below:
                parents.setdefault(child, []).extend(above)
    if not leaves:
        return flat_fabric(addresses)
    is_block = all(pattern.startswith("block.") for pattern in patterns)
    kind = FabricKind.BLOCK if is_block else FabricKind.TREE
    return _build(kind, leaves, parents)


def _address_switches(host: str, element: str) -> list[str]:
    try:
        return expand_hostlist(element)
    except ConfigError as err:
        raise TopologyError(f"node {host}: SLURM_TOPOLOGY_ADDR element {element!r}: {err}") from err


def _build(
    kind: FabricKind, leaves: Mapping[str, list[str]], parents: Mapping[str, list[str]]
) -> Fabric:
    problems = [f"switch {leaf} has no nodes" for leaf, hosts in leaves.items() if not hosts]
    leaves_of: dict[str, list[str]] = {}
    for leaf, hosts in leaves.items():
        for host in dict.fromkeys(hosts):
            leaves_of.setdefault(host, []).append(leaf)
    problems += [
        f"node {host} is under {', '.join(above)}: taken as one switch"
        for host, above in leaves_of.items()
        if len(above) > 1
    ]
    paths: dict[str, tuple[str, ...]] = dict.fromkeys(leaves_of, ())
    above = leaves_of
    while any(above.values()):
        place_of = _merge(above.values())
        # A node whose own branch ends lower stays apart from all others on the higher levels.
        paths = {
            host: (*path, place_of[above[host][0]] if above[host] else f"?{path[-1]}")
            for host, path in paths.items()
        }
        above = {
            host: sorted({parent for switch in switches for parent in parents.get(switch, ())})
            for host, switches in above.items()
        }
        if len(next(iter(paths.values()))) > len(leaves) + len(parents) + 1:
            raise TopologyError("topology: switches are above each other in a circle")
    depth = len(next(iter(paths.values()), ()))
    return Fabric(kind=kind, depth=depth, paths=paths, problems=tuple(problems))


def _merge(groups: Iterable[list[str]]) -> dict[str, str]:
    """Give switches that occur together one name: that of all of them as a host list."""
    root: dict[str, str] = {}

    def find(name: str) -> str:
        while root[name] != name:
            root[name] = root[root[name]]
            name = root[name]
        return name

    for group in groups:
        for name in group:
            root.setdefault(name, name)
            root[find(name)] = find(group[0])
    members: dict[str, list[str]] = {}
    for name in root:
        members.setdefault(find(name), []).append(name)
    # A place of its own keeps its name: that of an aggregated block holds brackets already.
    shown = {
        top: compress_hostlist(sorted(together, key=natural_key)) if len(together) > 1 else top
        for top, together in members.items()
    }
    return {name: shown[find(name)] for name in root}
