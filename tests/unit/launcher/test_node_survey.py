"""The service of a preflight with a thousand tasks that only talk to its handlers."""

import asyncio
from collections.abc import Collection

import pytest

from relax_hpc.control.rpc import Caller
from relax_hpc.launcher import node_scores
from relax_hpc.launcher.node_scores import Tolerance
from relax_hpc.launcher.node_survey import Limits, NodeSurvey
from relax_hpc.topology.node_facts import NodeFacts
from relax_hpc.topology.node_report import FurtherAsk, FurtherTold, Measured, PairAsk, Report
from relax_hpc.topology.pairing import ROUNDS

CALLER = Caller(role="preflight", index=0, rank=0, incarnation=1, attempt=1)


async def node(survey: NodeSurvey, rank: int, slow: set[int]) -> tuple[int, FurtherTold]:
    """What a task does, without sockets; returns the number of its tests."""
    facts = NodeFacts(node=f"n{rank}")
    report = Report(rank=rank, facts=facts, address=f"10.0.0.{rank}", port=rank + 1, has_mpi=True)
    await survey._report(CALLER, report)
    tests = 0
    for number in range(ROUNDS + 1):
        told = await survey._pair(CALLER, PairAsk(rank=rank, round_number=number))
        if told.rank < 0:
            continue
        tests += 1
        assert (told.address, told.port) == (f"10.0.0.{told.rank}", told.rank + 1)
        if told.is_leader:
            speed = 1.0 if {rank, told.rank} & slow else 12.0
            measured = Measured(
                rank=rank,
                peer=told.rank,
                round_number=number,
                latency_us=5.0,
                gbytes_per_s=speed,
            )
            await survey._took(CALLER, measured)
    return tests, await survey._further(CALLER, FurtherAsk(rank=rank))


def play(
    num_ranks: int, missing: set[int], slow: set[int], lost: Collection[str] = ()
) -> tuple[NodeSurvey, list[int], bool]:
    start_s = 300.0 if lost else 0.5  # who is known to be dead is not waited for
    limits = Limits(start_s=start_s, pairs_s=300.0)
    survey = NodeSurvey(num_ranks, limits, Tolerance(), use_mpi=True)
    survey.lost(lost)

    async def everyone() -> list[tuple[int, FurtherTold]]:
        present = [rank for rank in range(num_ranks) if rank not in missing]
        return await asyncio.gather(*(node(survey, rank, slow) for rank in present))

    ends = asyncio.run(everyone())
    return survey, [tests for tests, _ in ends], all(told.use_mpi for _, told in ends)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 10, 1001])
def test_a_node_has_a_few_tests_whatever_the_size(num_ranks: int) -> None:
    slow = {7, 8, 500} if num_ranks > 100 else set()
    survey, tests, use_mpi = play(num_ranks, set(), slow)
    assert max(tests) <= 4
    assert use_mpi
    findings = node_scores.judge_ways(survey.names, list(survey.measured.values()), Tolerance())
    assert {finding.node for finding in findings} == {f"n{rank}" for rank in slow}


@pytest.mark.parametrize("lost", [set(), {"n2"}, {"n1", "n2"}])
def test_who_does_not_report_is_left_out_of_the_ring(lost: set[str]) -> None:
    survey, tests, use_mpi = play(6, {2}, set(), lost)
    assert survey.names == {0: "n0", 1: "n1", 3: "n3", 4: "n4", 5: "n5"}
    assert len(tests) == 5
    assert not use_mpi  # MPI's start would wait for n2 for ever
    assert not survey.mpi_asked
