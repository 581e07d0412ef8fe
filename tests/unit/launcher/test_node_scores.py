"""From pair results to names."""

from relax_hpc.launcher import node_scores
from relax_hpc.launcher.check_list import Severity
from relax_hpc.launcher.node_scores import Tolerance
from relax_hpc.topology.node_facts import GpuFacts, NodeFacts
from relax_hpc.topology.node_report import GpuMeasured, Measured, MpiMeasured
from relax_hpc.topology.pairing import ROUNDS, partner, retest_pairs

ALLOW = Tolerance()
SIZE = 9
NAMES = {rank: f"n{rank}" for rank in range(SIZE)}


def results(
    slow: set[int],
    broken: set[int] = frozenset(),
    ways: set[tuple[int, int]] = frozenset(),
    size: int = SIZE,
) -> list[Measured]:
    """What the rounds would measure; a pair is as slow as its slower end."""
    found = []
    for number in range(ROUNDS):
        for rank in range(size):
            peer = partner(rank, size, number)
            if peer is not None and rank < peer:
                found.append(result(rank, peer, number, slow, broken, ways))
    bad, fine = node_scores.suspects(found, ALLOW)
    again = retest_pairs(bad, fine)
    found += [
        result(rank, peer, ROUNDS, slow, broken, ways)
        for rank, peer in again.items()
        if rank < peer
    ]
    return found


def result(
    rank: int, peer: int, number: int, slow: set[int], broken: set[int], ways: set[tuple[int, int]]
) -> Measured:
    is_slow = bool({rank, peer} & slow) or (rank, peer) in ways
    return Measured(
        rank=rank,
        peer=peer,
        round_number=number,
        latency_us=900.0 if is_slow else 10.0,
        gbytes_per_s=0.5 if is_slow else 11.0,
        fault="timed out" if {rank, peer} & broken else "",
    )


def named(measured: list[Measured]) -> set[tuple[str, str]]:
    return {(f.check, f.node) for f in node_scores.judge_ways(NAMES, measured, ALLOW)}


def test_even_nodes_are_fine() -> None:
    assert named(results(set())) == set()


def test_a_slow_node_is_named_and_its_partners_are_not() -> None:
    assert named(results({3})) == {("slow-node", "n3")}
    assert named(results({0, 1, 4})) == {("slow-node", f"n{n}") for n in (0, 1, 4)}


def test_the_retest_clears_a_node_all_of_whose_partners_are_slow() -> None:
    """n3 is tested with n2, n4 and n7 only."""
    slow = {2, 4, 7}
    assert partner(3, SIZE, 3) == 7
    assert named(results(slow)) == {("slow-node", f"n{n}") for n in slow}


def test_a_node_that_nobody_reaches_is_named() -> None:
    assert named(results(set(), {5})) == {("unreachable-node", "n5")}
    assert named(results({2}, {5})) == {("unreachable-node", "n5"), ("slow-node", "n2")}


def test_a_slow_way_is_told_as_such() -> None:
    findings = list(node_scores.judge_ways(NAMES, results(set(), ways={(2, 3)}), ALLOW))
    (finding,) = findings
    assert (finding.check, finding.severity) == ("slow-way", Severity.WARNING)
    assert finding.what.startswith("n2 - n3: ")


def test_mpi_ranks_must_be_slurms() -> None:
    good = {r: MpiMeasured(rank=r, latency_us=2, gbytes_per_s=20) for r in NAMES}
    good[0] = MpiMeasured(rank=0, latency_us=2, gbytes_per_s=20, hosts=tuple(NAMES.values()))
    assert list(node_scores.judge_mpi(NAMES, good, ALLOW)) == []
    other = {**good, 0: MpiMeasured(rank=0, hosts=("n1", "n0"))}
    other[4] = MpiMeasured(rank=4, latency_us=2, gbytes_per_s=2)
    other[5] = MpiMeasured(rank=5, fault="MPI.Exception: no")
    found = {(f.check, f.node) for f in node_scores.judge_mpi(NAMES, other, ALLOW)}
    assert found == {("mpi", ""), ("slow-node", "n4"), ("mpi", "n5")}


def test_a_slow_gpu_is_named_with_its_node() -> None:
    gpus = {
        r: GpuMeasured(
            rank=r,
            gemm_tflops=(600.0, 605.0, 400.0 if r == 2 else 598.0),
            nccl_gbytes_per_s=120.0 if r == 1 else 370.0,
            pair_gbytes_per_s=10.0 if r == 4 else 45.0,
        )
        for r in range(6)
    }
    gpus[5] = GpuMeasured(rank=5, fault="RuntimeError: CUDA error: uncorrectable ECC error")
    found = {f.node: f for f in node_scores.judge_gpus(NAMES, gpus, ALLOW)}
    assert set(found) == {"n1", "n2", "n4", "n5"}
    assert found["n2"].what == "GPU 2 makes 400 TFLOP/s (median 600)"
    assert found["n5"].check == "gpu"


def test_a_node_of_another_kind_is_named() -> None:
    gpu = GpuFacts(uuid="u", name="H800", memory_mb=81559)
    nodes = [
        NodeFacts(node=f"n{i}", gpus=(gpu,) * (7 if i == 1 else 8), rdma_active=("m/1",) * (i != 2))
        for i in range(4)
    ]
    assert {f.check for f in node_scores.judge_kinds(nodes)} == {"odd-node"}
    assert {f.node: f.what for f in node_scores.judge_kinds(nodes)} == {
        "n1": "7 GPUs (H800) (most have 8 GPUs (H800))",
        "n2": "0 active RDMA ports (most have 1 active RDMA ports)",
    }
    assert list(node_scores.judge_kinds([])) == []
    assert list(node_scores.judge_kinds(nodes[:2])) == []
