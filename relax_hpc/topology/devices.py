"""GPUs, NICs and NUMA nodes of one host, from `nvidia-smi topo -m` or sysfs.

Parsers only: the text or the folder is given, so that a recorded one is as good as a live one.
"""

import dataclasses
import enum
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from relax_hpc.errors import TopologyError


class Link(enum.IntEnum):
    """Kinds of connection in one node as nvidia-smi names them, the nearest first."""

    NV = 0
    """NVLink, also through NVSwitch."""
    PIX = 1
    PXB = 2
    PHB = 3
    NODE = 4
    SYS = 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU and what lies near it."""

    index: int
    numa: int | None
    cpus: tuple[int, ...]
    """Of its CPU affinity; empty if nothing is said."""
    nics: tuple[str, ...]
    """The nearest NICs by name (`mlx5_0`), those behind the same PCIe switch if there are any."""
    nic_link: Link | None
    """How near they are; PIX and PXB mean a rail of its own. None without NICs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NodeDevices:
    """What one node has."""

    gpus: tuple[Gpu, ...]
    nvlink_groups: tuple[tuple[int, ...], ...]
    """GPUs that reach each other over NVLink alone; a GPU without NVLink is a group of one."""
    nics: tuple[str, ...]


def parse_topo_matrix(text: str) -> NodeDevices:
    """Read `nvidia-smi topo -m`: tabs or blanks, underlined headers, with or without a NIC legend.

    Raises:
        TopologyError: no matrix in the text, or a row that is shorter than its header.
    """
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    top = next(
        (i for i, line in enumerate(lines) if re.match(r"\s*GPU0\s+(GPU|NIC|CPU)", line)), -1
    )
    if top < 0:
        raise TopologyError("nvidia-smi topo -m: no header line with GPU0; give its whole output")
    names = re.findall(r"\b(?:GPU\d+|NIC\d+|mlx\w+)", lines[top])
    legend = dict(re.findall(r"^\s+(NIC\d+): (\S+)", "\n".join(lines), re.MULTILINE))
    cells: dict[tuple[str, str], Link | None] = {}
    tails: dict[str, list[str]] = {}
    for first, *words in (line.split() for line in lines[top + 1 :] if line.strip()):
        if first not in names:
            continue
        if len(words) < len(names):
            raise TopologyError(
                f"nvidia-smi topo -m: row {first} has {len(words)} cells, the header {len(names)}"
            )
        cells |= {(first, name): _link(word) for name, word in zip(names, words, strict=False)}
        tails[first] = words[len(names) :]
    gpus = [name for name in names if name.startswith("GPU")]
    nics = [name for name in names if not name.startswith("GPU")]
    found = []
    for gpu in gpus:
        if gpu not in tails:
            raise TopologyError(f"nvidia-smi topo -m: no row of {gpu}; its output is cut")
        near, link = _nearest(nics, lambda nic, gpu=gpu: cells[gpu, nic])  # type: ignore[misc]
        cpus, numa = _affinity(tails[gpu])
        found.append(
            Gpu(
                index=int(gpu[3:]),
                numa=numa,
                cpus=cpus,
                nics=tuple(legend.get(nic, nic) for nic in near),
                nic_link=link,
            )
        )
    return NodeDevices(
        gpus=tuple(found),
        nvlink_groups=_nvlink_groups(gpus, cells),
        nics=tuple(legend.get(nic, nic) for nic in nics),
    )


def _link(cell: str) -> Link | None:
    """Read one cell; None for itself and for what a newer nvidia-smi may say."""
    if re.fullmatch(r"NV\d+", cell):
        return Link.NV
    return Link.__members__.get(cell)


def _nearest(
    nics: list[str], link_to: Callable[[str], Link | None]
) -> tuple[list[str], Link | None]:
    links = [(link, nic) for nic in nics if (link := link_to(nic)) is not None]
    if not links:
        return [], None
    best = min(link for link, _ in links)
    return [nic for link, nic in links if link == best], best


def _affinity(tail: list[str]) -> tuple[tuple[int, ...], int | None]:
    """Read `0-55,112-167  0  N/A`: CPUs, NUMA node, NUMA node of the GPU's own memory."""
    cpus = tail[0] if tail and re.fullmatch(r"[\d,-]+", tail[0]) else ""
    numa = tail[1] if cpus and len(tail) > 1 else ""
    return parse_cpu_list(cpus), int(numa) if numa.isdigit() else None


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Read `0-3,8` (a cpulist of the kernel).

    Raises:
        TopologyError: not a list of numbers and ranges.
    """
    cpus: list[int] = []
    for part in text.split(",") if text else []:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise TopologyError(f"CPU list {text!r}: {part!r} is no number and no range")
        cpus += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(cpus)


def _nvlink_groups(
    gpus: list[str], cells: Mapping[tuple[str, str], Link | None]
) -> tuple[tuple[int, ...], ...]:
    """Cut GPUs into cliques: in a mesh with gaps, two GPUs without a link share no group."""
    groups: list[list[str]] = []
    for gpu in gpus:
        for group in groups:
            if all(cells[gpu, other] is Link.NV for other in group):
                group.append(gpu)
                break
        else:
            groups.append([gpu])
    return tuple(tuple(int(gpu[3:]) for gpu in group) for group in groups)


def read_sysfs(root: Path) -> NodeDevices:
    """Read GPUs and NICs below a sysfs (`/sys`): drivers/nvidia, class/infiniband, numa_node.

    For nodes without nvidia-smi, e.g. in a container. sysfs does not show NVLink, so each GPU is
    a group of its own. GPUs are numbered in PCI order, which is nvidia-smi's order.
    """
    gpus = sorted((root / "bus/pci/drivers/nvidia").glob("????*:??:??.?"))
    nics = sorted((root / "class/infiniband").glob("*"), key=lambda path: path.name)
    place = {nic.name: (nic / "device").resolve() for nic in nics}
    found = []
    for index, gpu in enumerate(gpus):
        here = gpu.resolve()
        near, link = _nearest(
            list(place),
            lambda nic, here=here: _pci_link(here, place[nic]),  # type: ignore[misc]
        )
        cpus = _read(here / "local_cpulist")
        found.append(
            Gpu(
                index=index,
                numa=_numa(here),
                cpus=parse_cpu_list(cpus),
                nics=tuple(near),
                nic_link=link,
            )
        )
    return NodeDevices(
        gpus=tuple(found),
        nvlink_groups=tuple((gpu.index,) for gpu in found),
        nics=tuple(place),
    )


def _pci_link(a: Path, b: Path) -> Link:
    """Compare two device paths: /sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0."""
    left, right = _pci_chain(a), _pci_chain(b)
    shared = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        shared += 1
    if shared >= 2:  # at least a port below the host bridge: never over the CPU
        # The port of a switch and its downstream ports: same switch if only those differ.
        return Link.PIX if max(len(left), len(right)) - shared <= 2 else Link.PXB
    if shared == 1:
        return Link.PHB
    same_numa = _numa(a) is not None and _numa(a) == _numa(b)
    return Link.NODE if same_numa else Link.SYS


def _pci_chain(path: Path) -> list[str]:
    return [part for part in path.parts if re.match(r"pci\w{4,}:|\w{4,}:\w\w:", part)]


def _numa(device: Path) -> int | None:
    text = _read(device / "numa_node")
    return int(text) if text.isdigit() else None  # -1: the kernel does not know


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii").strip() if path.is_file() else ""


def local_gpu_order(devices: NodeDevices, tp: int) -> tuple[int, ...]:
    """Order a node's GPUs so that `tp` neighbours share an NVLink group, then a NUMA node.

    Returns:
        GPU index of each local rank.

    Raises:
        TopologyError: TP groups would cross NVLink groups. A node without any NVLink is fine.
    """
    numa = {gpu.index: -1 if gpu.numa is None else gpu.numa for gpu in devices.gpus}
    sizes = [len(group) for group in devices.nvlink_groups]
    if max(sizes, default=1) > 1 and any(size % tp for size in sizes):
        raise TopologyError(
            f"tp={tp} does not fit into NVLink groups of {sizes} GPUs; take a tp that divides them"
        )
    groups = sorted(
        (sorted(group, key=lambda gpu: (numa[gpu], gpu)) for group in devices.nvlink_groups),
        key=lambda group: (numa[group[0]], group[0]),
    )
    return tuple(gpu for group in groups for gpu in group)


def odd_nodes(devices: Mapping[str, NodeDevices]) -> dict[str, str]:
    """Name the nodes that are not like most others, with what differs.

    One NIC less on one node makes NCCL hang or fall back on all of them (nccl#2428), one GPU less
    too (nccl#2385): such nodes are to be excluded before a run starts.

    Returns:
        host -> e.g. `7 NICs (most have 8)`; empty if all are alike.
    """
    facts = {host: _facts(node) for host, node in sorted(devices.items())}
    usual = {
        what: Counter(fact[what] for fact in facts.values()).most_common(1)[0][0]
        for what in next(iter(facts.values()), {})
    }
    odd = {}
    for host, fact in facts.items():
        differs = [
            f"{fact[what]} (most have {usual[what]})" for what in fact if fact[what] != usual[what]
        ]
        if differs:
            odd[host] = ", ".join(differs)
    return odd


def _facts(node: NodeDevices) -> dict[str, str]:
    links = Counter("none" if gpu.nic_link is None else gpu.nic_link.name for gpu in node.gpus)
    return {
        "gpus": f"{len(node.gpus)} GPUs",
        "nvlink": f"NVLink groups of {sorted(map(len, node.nvlink_groups))}",
        "nics": f"{len(node.nics)} NICs",
        "rails": "nearest NICs by "
        + " ".join(f"{name} x {n}" for name, n in sorted(links.items())),
    }
