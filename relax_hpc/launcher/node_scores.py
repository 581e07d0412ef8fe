"""From what the nodes measured to who is slow, broken or odd. Pure functions."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from relax_hpc.launcher.check_list import Finding, Severity, found
from relax_hpc.topology.node_facts import NodeFacts
from relax_hpc.topology.node_report import GpuMeasured, Measured, MpiMeasured
from relax_hpc.topology.outliers import FACTOR, slow_ones


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """What still counts as like the others."""

    factor: float = FACTOR
    """Worse than the median by less than this factor is fine."""
    latency_slack_us: float = 100.0
    """Above the median. A Python process that wakes up late costs some 10 us."""
    gbytes_slack: float = 0.1
    """GB/s below the median."""
    gpu_factor: float = 1.2
    """GPUs of one kind differ by a few per cent; one that is throttled by more."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The best that a node reached with any of its partners."""

    latency_us: float
    gbytes_per_s: float


def _sides(measured: Sequence[Measured]) -> dict[int, list[Measured]]:
    """Results by rank; a pair counts for both its ends."""
    sides: dict[int, list[Measured]] = {}
    for one in measured:
        sides.setdefault(one.rank, []).append(one)
        sides.setdefault(one.peer, []).append(one)
    return sides


def best(measured: Sequence[Measured]) -> dict[int, Score | None]:
    """Return each rank's score; None: none of its pairs came through."""
    scores: dict[int, Score | None] = {}
    for rank, results in _sides(measured).items():
        good = [one for one in results if not one.fault]
        scores[rank] = (
            Score(
                latency_us=min(one.latency_us for one in good),
                gbytes_per_s=max(one.gbytes_per_s for one in good),
            )
            if good
            else None
        )
    return scores


def _slow(scores: Mapping[str, Score], allow: Tolerance) -> dict[str, list[str]]:
    """Return what is slow about each slow node."""
    said: dict[str, list[str]] = {}
    latency = {node: score.latency_us for node, score in scores.items()}
    speed = {node: score.gbytes_per_s for node, score in scores.items()}
    late = slow_ones(latency, more_is_worse=True, factor=allow.factor, slack=allow.latency_slack_us)
    for node, median in late.items():
        what = f"latency {latency[node]:.0f} us (median {median:.0f})"
        said.setdefault(node, []).append(what)
    slow = slow_ones(speed, more_is_worse=False, factor=allow.factor, slack=allow.gbytes_slack)
    for node, median in slow.items():
        what = f"{speed[node]:.2f} GB/s (median {median:.2f})"
        said.setdefault(node, []).append(what)
    return said


def suspects(measured: Sequence[Measured], allow: Tolerance) -> tuple[list[int], list[int]]:
    """Return (ranks that look slow or broken, the others, fastest first)."""
    scores = best(measured)
    good = {str(rank): score for rank, score in scores.items() if score is not None}
    slow = _slow(good, allow)
    bad = [rank for rank in sorted(scores) if scores[rank] is None or str(rank) in slow]
    fine = sorted(
        (int(rank) for rank in good if rank not in slow),
        key=lambda rank: (-good[str(rank)].gbytes_per_s, rank),
    )
    return bad, fine


def judge_ways(
    names: Mapping[int, str], measured: Sequence[Measured], allow: Tolerance
) -> Iterator[Finding]:
    """Name unreachable and slow nodes, and ways that are slow between nodes that are not.

    Args:
        names: rank -> node, of all that reported.
        measured: results of all rounds, the retest included.
    """
    scores = best(measured)
    for rank, score in scores.items():
        if score is None:
            sides = [one for one in measured if rank in (one.rank, one.peer)]
            what = f"none of {len(sides)} partners could talk to it ({sides[-1].fault})"
            yield found("unreachable-node", Severity.ERROR, what, names[rank])
    good = {names[rank]: score for rank, score in scores.items() if score is not None}
    slow = _slow(good, allow)
    for node, said in slow.items():
        yield found("slow-node", Severity.ERROR, "; ".join(said), node)
    yield from _slow_ways(names, measured, allow, {*slow, *(set(names.values()) - set(good))})


def _slow_ways(
    names: Mapping[int, str], measured: Sequence[Measured], allow: Tolerance, named: set[str]
) -> Iterator[Finding]:
    ways = {
        f"{names[one.rank]} - {names[one.peer]}": one
        for one in measured
        if names[one.rank] not in named and names[one.peer] not in named
    }
    for way, one in ways.items():
        if one.fault:
            yield found("slow-way", Severity.WARNING, f"{way}: {one.fault}")
    scores = {
        way: Score(latency_us=one.latency_us, gbytes_per_s=one.gbytes_per_s)
        for way, one in ways.items()
        if not one.fault
    }
    for way, said in _slow(scores, allow).items():
        yield found("slow-way", Severity.WARNING, f"{way}: {'; '.join(said)}")


def judge_mpi(
    names: Mapping[int, str], measured: Mapping[int, MpiMeasured], allow: Tolerance
) -> Iterator[Finding]:
    """Judge what MPI measured; its rank map must be Slurm's."""
    for rank, one in measured.items():
        if one.fault:
            yield found("mpi", Severity.WARNING, one.fault, names[rank])
        elif one.hosts and list(one.hosts) != [names[rank] for rank in sorted(names)]:
            what = f"MPI's ranks are on {', '.join(one.hosts[:8])} ..., Slurm's tasks are not"
            yield found("mpi", Severity.WARNING, what)
    scores = {
        names[rank]: Score(latency_us=one.latency_us, gbytes_per_s=one.gbytes_per_s)
        for rank, one in measured.items()
        if not one.fault and one.gbytes_per_s
    }
    for node, said in _slow(scores, allow).items():
        yield found("slow-node", Severity.ERROR, f"MPI: {'; '.join(said)}", node)


def judge_gpus(
    names: Mapping[int, str], measured: Mapping[int, GpuMeasured], allow: Tolerance
) -> Iterator[Finding]:
    """Name nodes with a GPU that fails, or that is slower than those of the others."""
    good: dict[str, GpuMeasured] = {}
    for rank, one in measured.items():
        if one.fault:
            yield found("gpu", Severity.ERROR, one.fault, names[rank])
        else:
            good[names[rank]] = one
    gpus = {
        f"{node} GPU {index}": speed
        for node, one in good.items()
        for index, speed in enumerate(one.gemm_tflops)
    }
    slow = slow_ones(gpus, more_is_worse=False, factor=allow.gpu_factor)
    for place, median in slow.items():
        node, _, gpu = place.partition(" ")
        what = f"{gpu} makes {gpus[place]:.0f} TFLOP/s (median {median:.0f})"
        yield found("slow-node", Severity.ERROR, what, node)
    kinds: tuple[tuple[str, Callable[[GpuMeasured], float]], ...] = (
        ("NCCL in the node", lambda one: one.nccl_gbytes_per_s),
        ("NCCL with a partner", lambda one: one.pair_gbytes_per_s),
    )
    for what, value in kinds:
        speeds = {node: value(one) for node, one in good.items() if value(one)}
        limit = allow.factor if "partner" in what else allow.gpu_factor
        for node, median in slow_ones(speeds, more_is_worse=False, factor=limit).items():
            told = f"{what}: {speeds[node]:.0f} GB/s (median {median:.0f})"
            yield found("slow-node", Severity.ERROR, told, node)


def judge_kinds(facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Name nodes with other GPUs or RDMA ports than most (nccl#2385, nccl#2428)."""
    shown = {
        fact.node: (
            f"{len(fact.gpus)} GPUs ({', '.join(sorted({gpu.name for gpu in fact.gpus}))})"
            if fact.gpus
            else "no GPUs",
            f"{len(fact.rdma_active)} active RDMA ports",
        )
        for fact in facts
    }
    for place in (0, 1):
        usual = Counter(kinds[place] for kinds in shown.values()).most_common(1)
        for node, kinds in shown.items():
            if usual[0][1] > len(shown) / 2 and kinds[place] != usual[0][0]:
                what = f"{kinds[place]} (most have {usual[0][0]})"
                yield found("odd-node", Severity.ERROR, what, node)
