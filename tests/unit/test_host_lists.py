"""Host lists without scontrol: reported forms, generated ones, and those that are too large."""

from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.errors import ConfigError
from relax_hpc.launcher.allocation import slurm_allocation
from relax_hpc.slurm import compress_hostlist, expand_hostlist


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container: none of Slurm's commands."""
    monkeypatch.setenv("PATH", str(tmp_path))


LISTS = {
    "a[01-03,7],b": "a01 a02 a03 a7 b",
    "n[001-003,7],gpu-a": "n001 n002 n003 n7 gpu-a",
    "gpu[001-003,007],login1": "gpu001 gpu002 gpu003 gpu007 login1",
    "rack[1-2]n[01-04]": "rack1n01 rack1n02 rack1n03 rack1n04 rack2n01 rack2n02 rack2n03 rack2n04",
    "rack[0-1]_blade[08-10]": (
        "rack0_blade08 rack0_blade09 rack0_blade10 rack1_blade08 rack1_blade09 rack1_blade10"
    ),
    "a[0-1]b[0-1]c": "a0b0c a0b1c a1b0c a1b1c",
    "n[01-03]-ib": "n01-ib n02-ib n03-ib",
    "host_[1-2]": "host_1 host_2",
    "nodeA,nodeB[001,003],nodeC": "nodeA nodeB001 nodeB003 nodeC",
    "host-[001-002]": "host-001 host-002",
    "nodes[006,011]": "nodes006 nodes011",
    "dgx-a[1-2].c.l,x": "dgx-a1.c.l dgx-a2.c.l x",
    "single": "single",
}


@pytest.mark.usefixtures("no_slurm")
@pytest.mark.parametrize("text", LISTS)
def test_host_lists_need_no_scontrol(text: str) -> None:
    assert expand_hostlist(text) == LISTS[text].split()


@pytest.mark.usefixtures("no_slurm")
def test_the_allocation_is_read_in_a_container() -> None:
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "a[01-03,7],b",
        "SLURM_JOB_CPUS_PER_NODE": "64(x4),32",
    }
    (group,) = slurm_allocation(environ).groups
    assert group.nodes == ("a01", "a02", "a03", "a7", "b") and group.cpus_per_node == 32


NAMES = st.from_regex(r"[a-z][a-z_.-]{0,4}", fullmatch=True)


@st.composite
def brackets(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A bracket and what it stands for, as a program of one line would write it."""
    texts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        width, low = draw(st.integers(1, 5)), draw(st.integers(0, 120))
        high = low + draw(st.integers(0, 4))
        is_one = low == high and draw(st.booleans())
        texts.append(f"{low:0{width}d}" if is_one else f"{low:0{width}d}-{high}")
        numbers += [str(number).zfill(len(f"{low:0{width}d}")) for number in range(low, high + 1)]
    return f"[{','.join(texts)}]", numbers


@given(st.lists(st.tuples(NAMES, brackets(), NAMES), min_size=1, max_size=4))
def test_ranges_with_prefix_suffix_and_any_padding(
    items: list[tuple[str, tuple[str, list[str]], str]],
) -> None:
    text = ",".join(head + bracket + tail for head, (bracket, _), tail in items)
    wanted = [head + number + tail for head, (_, numbers), tail in items for number in numbers]
    assert expand_hostlist(text) == wanted


@given(NAMES, st.lists(brackets(), min_size=2, max_size=4))
def test_several_brackets_give_every_name_once(
    head: str, parts: list[tuple[str, list[str]]]
) -> None:
    names = [head]
    for _, numbers in parts:
        names = [f"{name}{number}x" for name in names for number in numbers]
    if len(names) > 20_000:
        return
    hosts = expand_hostlist(head + "".join(f"{bracket}x" for bracket, _ in parts))
    assert sorted(hosts) == sorted(names)
    last = [name.split("x")[-2] for name in hosts[: len(parts[-1][1])]]
    assert last == [name.split("x")[-2] for name in names[: len(parts[-1][1])]]  # fastest


@given(
    st.lists(
        st.from_regex(r"([a-z]{1,3}[0-9]{0,3}){0,2}[-_.]?[a-z]?[0-9]{1,5}", fullmatch=True),
        max_size=60,
    )
)
def test_round_trip(hosts: list[str]) -> None:
    assert expand_hostlist(compress_hostlist(hosts)) == hosts
    again = sorted(set(hosts))
    text = compress_hostlist(again)
    assert compress_hostlist(expand_hostlist(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "n[1-999999999999]",
        "n[1-1000000]",
        "n[0-999]m[0-999]k[0-999]",
        ",".join(["n[1-200000]"] * 50),
        "n[" + ",".join(["1-200000"] * 2000) + "]",
        "n" + "[1-2]" * 200,
        "n[1-" + "9" * 5000 + "]",
        "n[" + "0" * 200_000 + "1-9]",
    ],
)
def test_huge_lists_are_refused_before_they_are_made(text: str) -> None:
    before = psutil.Process().memory_info().rss
    with pytest.raises(ConfigError, match="host list") as caught:
        expand_hostlist(text)
    assert len(str(caught.value)) < 500
    assert psutil.Process().memory_info().rss - before < 200 << 20
