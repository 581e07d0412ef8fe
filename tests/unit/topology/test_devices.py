"""`nvidia-smi topo -m` of several machines, and a sysfs made of the same facts."""

from pathlib import Path

import pytest

from relax_hpc.errors import TopologyError
from relax_hpc.topology.devices import (
    Gpu,
    Link,
    NodeDevices,
    local_gpu_order,
    odd_nodes,
    parse_cpu_list,
    parse_topo_matrix,
    read_sysfs,
)

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_3
  NIC2: mlx5_bond_0
"""
_TAIL = "CPU Affinity\tNUMA Affinity\tGPU NUMA ID"
# An NVSwitch node with a rail of each GPU's own behind a PCIe switch (first and last GPU of eight),
# and one NIC without a GPU. The header is underlined.
NVSWITCH = (
    f"\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tNIC2\t{_TAIL}\x1b[0m\n"
    "GPU0\t X \tNV18\tPXB\tNODE\tSYS\t0-55,112-167\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tSYS\tPIX\t56-111,168-223\t1\t\tN/A\n"
    "NIC0\tPXB\tSYS\t X \tPIX\tSYS\t\t\t\t\n"
    "NIC1\tNODE\tSYS\tPIX\t X \tSYS\t\t\t\t\n"
    "NIC2\tSYS\tPIX\tSYS\tSYS\t X \t\t\t\t\n" + LEGEND
)
PCIE_ONLY = (
    f"\tGPU0\tGPU1\tGPU2\tGPU3\t{_TAIL}\n"
    "GPU0\t X \tNODE\tSYS\tSYS\t0-15,32-47\t0\t\tN/A\n"
    "GPU1\tNODE\t X \tSYS\tSYS\t0-15,32-47\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tNODE\t16-31,48-63\t1\t\tN/A\n"
    "GPU3\tSYS\tSYS\tNODE\t X \t16-31,48-63\t1\t\tN/A\n"
)
# Two pairs of bridged GPUs that are not neighbours by number; blanks instead of tabs.
BRIDGED = """\
        GPU0    GPU1    GPU2    GPU3    mlx5_0  CPU Affinity    NUMA Affinity
GPU0     X      SYS     NV4     SYS     NODE    0,2-17          0
GPU1    SYS      X      SYS     NV4     SYS     1,18-33         1
GPU2    NV4     SYS      X      SYS     NODE    0,2-17          0
GPU3    SYS     NV4     SYS      X      SYS     1,18-33         1
mlx5_0  NODE    SYS     NODE    SYS      X
"""


def test_nvswitch_and_rails() -> None:
    node = parse_topo_matrix("some banner\n\n" + NVSWITCH)
    assert node.nvlink_groups == ((0, 1),)
    assert node.nics == ("mlx5_0", "mlx5_3", "mlx5_bond_0")
    first, last = node.gpus
    assert (first.nics, first.nic_link, first.numa) == (("mlx5_0",), Link.PXB, 0)
    assert (last.nics, last.nic_link, last.numa) == (("mlx5_bond_0",), Link.PIX, 1)
    assert first.cpus == (*range(56), *range(112, 168))


def test_no_nvlink_and_no_nics() -> None:
    node = parse_topo_matrix(PCIE_ONLY)
    assert node.nvlink_groups == ((0,), (1,), (2,), (3,))
    assert node.nics == ()
    assert [(gpu.nics, gpu.nic_link, gpu.numa) for gpu in node.gpus] == [
        ((), None, 0),
        ((), None, 0),
        ((), None, 1),
        ((), None, 1),
    ]


def test_bridges_older_names_and_blanks() -> None:
    node = parse_topo_matrix(BRIDGED)
    assert node.nvlink_groups == ((0, 2), (1, 3))
    assert node.gpus[0].cpus == (0, *range(2, 18))
    assert [(gpu.nics, gpu.nic_link) for gpu in node.gpus[:2]] == [
        (("mlx5_0",), Link.NODE),
        (("mlx5_0",), Link.SYS),
    ]


def test_one_gpu() -> None:
    node = parse_topo_matrix(f"\tGPU0\t{_TAIL}\nGPU0\t X \t0-31\t0\t\tN/A\n")
    assert node == NodeDevices(
        gpus=(Gpu(index=0, numa=0, cpus=tuple(range(32)), nics=(), nic_link=None),),
        nvlink_groups=((0,),),
        nics=(),
    )


def test_affinity_that_is_not_there() -> None:
    node = parse_topo_matrix(f"\tGPU0\t{_TAIL}\nGPU0\t X \tN/A\tN/A\t\tN/A\n")
    assert (node.gpus[0].cpus, node.gpus[0].numa) == ((), None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("NVIDIA-SMI has failed", "no header line"),
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-3\n", "no row of GPU1"),
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \n", "1 cells, the header 2"),
    ],
)
def test_output_that_is_cut(text: str, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        parse_topo_matrix(text)


def test_order_of_gpus_keeps_tp_inside_nvlink() -> None:
    assert local_gpu_order(parse_topo_matrix(BRIDGED), tp=2) == (0, 2, 1, 3)
    assert local_gpu_order(parse_topo_matrix(NVSWITCH), tp=2) == (0, 1)
    assert local_gpu_order(parse_topo_matrix(PCIE_ONLY), tp=4) == (0, 1, 2, 3)
    with pytest.raises(TopologyError, match=r"tp=4 does not fit into NVLink groups of \[2, 2\]"):
        local_gpu_order(parse_topo_matrix(BRIDGED), tp=4)


def test_nodes_that_are_not_like_the_others_are_named() -> None:
    whole = parse_topo_matrix(NVSWITCH)
    without_nic = (
        "\n".join(
            line
            for line in NVSWITCH.replace("NIC2\t", "", 1).splitlines()
            if not line.startswith("NIC2")
        )
        .replace("\tSYS\t0-55", "\t0-55")
        .replace("\tPIX\t56", "\t56")
    )
    broken_link = NVSWITCH.replace("NV18", "SYS")
    nodes = {
        "n1": whole,
        "n2": whole,
        "n3": parse_topo_matrix(without_nic),
        "n4": parse_topo_matrix(broken_link),
        "n5": whole,
    }
    odd = odd_nodes(nodes)
    assert set(odd) == {"n3", "n4"}
    assert odd["n3"].startswith("2 NICs (most have 3 NICs), nearest NICs by PXB x 1 SYS x 1 (most")
    assert odd["n4"] == "NVLink groups of [1, 1] (most have NVLink groups of [2])"
    assert odd_nodes({"n1": whole, "n2": whole}) == odd_nodes({}) == {}


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-2,8") == (0, 1, 2, 8)
    assert parse_cpu_list("") == ()
    with pytest.raises(TopologyError, match="'a' is no number"):
        parse_cpu_list("0,a")


def _device(root: Path, chain: str, numa: int, cpus: str = "") -> Path:
    folder = root / "devices" / chain
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{numa}\n")
    if cpus:
        (folder / "local_cpulist").write_text(f"{cpus}\n")
    return folder


def _link_to(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def test_sysfs(tmp_path: Path) -> None:
    switch = "pci0000:15/0000:15:01.0/0000:16:00.0"
    gpus = {
        "0000:18:00.0": _device(tmp_path, f"{switch}/0000:17:00.0/0000:18:00.0", 0, "0-3"),
        "0000:2a:00.0": _device(tmp_path, "pci0000:26/0000:26:01.0/0000:2a:00.0", 0, "0-3"),
        "0000:9d:00.0": _device(tmp_path, "pci0000:97/0000:97:01.0/0000:9d:00.0", 1, "4-7"),
        "0000:ab:00.0": _device(tmp_path, "pci0000:a7/0000:a7:01.0/0000:ab:00.0", -1),
    }
    for address, folder in gpus.items():
        _link_to(tmp_path / "bus/pci/drivers/nvidia" / address, folder)
    (tmp_path / "bus/pci/drivers/nvidia/bind").write_text("")  # files that are no devices
    nics = {
        "mlx5_0": _device(tmp_path, f"{switch}/0000:17:01.0/0000:19:00.0", 0),
        "mlx5_1": _device(tmp_path, "pci0000:97/0000:97:02.0/0000:9e:00.0", 1),
    }
    for name, folder in nics.items():
        _link_to(tmp_path / "class/infiniband" / name / "device", folder)
    node = read_sysfs(tmp_path)
    assert node.nics == ("mlx5_0", "mlx5_1")
    assert [(gpu.nics, gpu.nic_link, gpu.numa) for gpu in node.gpus] == [
        (("mlx5_0",), Link.PIX, 0),  # the same PCIe switch
        (("mlx5_0",), Link.NODE, 0),  # the same socket
        (("mlx5_1",), Link.PHB, 1),  # the same host bridge
        (("mlx5_0", "mlx5_1"), Link.SYS, None),  # the kernel does not know its socket
    ]
    assert node.gpus[0].cpus == (0, 1, 2, 3)
    assert node.nvlink_groups == ((0,), (1,), (2,), (3,))
