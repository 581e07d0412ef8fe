"""Failures whose cause is known because it was put in: class and ranks must be right in each."""

from pathlib import Path

import pytest

from relax_hpc.postmortem.classes import CATALOGUE
from relax_hpc.postmortem.flight import read_dumps
from relax_hpc.postmortem.flight_rules import CLASSES, flight_findings
from relax_hpc.postmortem.verdict import Confidence, Finding
from tests.unit.postmortem.flight_samples import (
    TWELVE,
    Job,
    Scenario,
    cascade,
    misses,
    others,
    steps,
)


def test_every_class_has_its_remedy() -> None:
    assert set(CLASSES) <= CATALOGUE.keys()


def explain(files: list[str]) -> Finding:
    findings = flight_findings(read_dumps(files))
    assert all(finding.class_ in CLASSES for finding in findings)
    return findings[0]


@pytest.mark.parametrize("scenario", TWELVE, ids=lambda scenario: scenario.name)
def test_twelve_small_failures(tmp_path: Path, scenario: Scenario) -> None:
    finding = explain(scenario.write(tmp_path))
    assert (finding.class_, finding.ranks) == (scenario.class_, scenario.ranks)
    assert (finding.confidence == Confidence.UNDETERMINED) == (not scenario.ranks)


def test_a_rank_misses_an_operation(tmp_path: Path) -> None:
    job = steps(4).launch(others(2), state="started")
    finding = explain(job.write(tmp_path))
    assert (finding.class_, finding.ranks) == ("missing-rank", [2])
    assert finding.confidence == Confidence.ESTABLISHED


def test_an_extra_operation_in_the_middle(tmp_path: Path) -> None:
    job = Job(4)
    for _ in range(3):
        job.launch(range(4), "all_gather").launch(range(4), "reduce_scatter")
    job.launch([1], "barrier", state="started")
    job.launch(range(4), "all_gather", state="scheduled")
    job.launch(range(4), "reduce_scatter", state="scheduled")
    finding = explain(job.write(tmp_path))
    assert (finding.class_, finding.ranks) == ("extra-op", [1])


@pytest.mark.parametrize(
    "name", ["nccl_trace_rank_container-node02_{rank}", "trace_rank_10-0-0-7_{rank}.pickle"]
)
def test_host_name_in_the_file_name(tmp_path: Path, name: str) -> None:
    job = steps(4).launch(others(3), state="started")
    finding = explain(job.write(tmp_path, name=name))
    assert (finding.class_, finding.ranks) == ("missing-rank", [3])
    assert len(finding.nodes) == 1


def test_other_size_on_one_rank(tmp_path: Path) -> None:
    job = steps(4).launch([3], state="started", size=999).launch(others(3), state="started")
    finding = explain(job.write(tmp_path))
    assert (finding.class_, finding.ranks) == ("size-mismatch", [3])
    assert finding.confidence == Confidence.ESTABLISHED
    assert "[999]" in finding.sentence


def test_other_type_on_one_rank(tmp_path: Path) -> None:
    job = steps(4).launch([0], state="started", dtype="Double").launch(others(0), state="started")
    finding = explain(job.write(tmp_path))
    assert (finding.class_, finding.ranks) == ("dtype-mismatch", [0])


def test_empty_dump_of_the_dead_rank(tmp_path: Path) -> None:
    job = steps(4).launch(others(1), state="started")
    finding = explain(job.write(tmp_path, empty=(1,)))
    assert (finding.class_, finding.ranks) == ("missing-rank", [1])
    assert "empty" in finding.sentence


def test_a_hang_in_one_group_and_four_groups_that_wait_for_it(tmp_path: Path) -> None:
    files = cascade().write(tmp_path)
    findings = flight_findings(read_dumps(files))
    assert len(findings) == 1
    assert (findings[0].class_, findings[0].ranks) == ("missing-rank", [6])
    assert "7 ranks wait in 5 groups" in findings[0].sentence


def test_a_straggler_that_came_after_the_time_out(tmp_path: Path) -> None:
    job = steps(4, 10).launch(others(2), state="started")
    job.launch([2], state="scheduled", delay_s=640)
    finding = explain(job.write(tmp_path))
    assert (finding.class_, finding.ranks) == ("straggler", [2])


def test_a_wrong_clock_is_no_straggler(tmp_path: Path) -> None:
    job = steps(4, 10).launch(range(4), state="started")
    for entry in job.entries[2]:
        entry["time_created_ns"] += int(3600e9)
    assert explain(job.write(tmp_path)).confidence == Confidence.UNDETERMINED


def test_ranks_that_wait_for_each_other_in_two_groups(tmp_path: Path) -> None:
    job = Job(4, {"0": ("default_pg", [0, 1, 2, 3]), "1": ("second", [0, 1, 2, 3])})
    for _ in range(3):
        job.launch(range(4)).launch(range(4), group="1")
    job.launch(others(1), state="started").launch([1], group="1", state="started")
    finding = explain(job.write(tmp_path))
    assert (finding.class_, finding.ranks) == ("missing-rank", [1])


def test_two_ranks_that_disagree_are_both_named(tmp_path: Path) -> None:
    job = Job(2).launch([0], "broadcast", state="started").launch([1], state="started")
    finding = explain(job.write(tmp_path))
    assert (finding.class_, finding.ranks) == ("op-mismatch", [0, 1])
    assert finding.confidence == Confidence.LIKELY


def test_history_tells_which_of_two_ranks_is_odd(tmp_path: Path) -> None:
    job = Job(2)
    for _ in range(4):
        job.launch(range(2), "all_gather").launch(range(2), "reduce_scatter")
    job.launch([0], "reduce_scatter", state="started").launch([1], "all_gather", state="started")
    finding = explain(job.write(tmp_path))
    assert (finding.class_, finding.ranks) == ("missing-rank", [0])


def test_uneven_shares_are_no_mismatch(tmp_path: Path) -> None:
    job = steps(2)
    job.launch([0], "all_to_all", size=3, state="started")
    job.launch([1], "all_to_all", size=5, state="started")
    assert explain(job.write(tmp_path)).confidence == Confidence.UNDETERMINED


def test_parts_of_a_coalesced_operation_are_not_unfinished(tmp_path: Path) -> None:
    job = steps(2)
    for rank in range(2):
        job.launch([rank], "all_gather", state="scheduled")
    job.seqs = {key: value - 1 for key, value in job.seqs.items()}
    job.launch(range(2), "coalesced")
    assert flight_findings(read_dumps(job.write(tmp_path))) == []


def test_all_complete_is_no_finding(tmp_path: Path) -> None:
    assert flight_findings(read_dumps(steps(4).write(tmp_path))) == []


def test_no_readable_dump_is_no_finding(tmp_path: Path) -> None:
    files = steps(2).write(tmp_path, empty=(0, 1))
    assert flight_findings(read_dumps(files)) == []


def test_one_dump_of_many_ranks_names_nobody_for_certain(tmp_path: Path) -> None:
    job = steps(8).launch(range(8), state="started")
    finding = explain(job.write(tmp_path, without=tuple(range(1, 8))))
    assert finding.confidence == Confidence.UNDETERMINED


def send(job: Job, rank: int, peer: int, op: str, state: str = "started") -> None:
    job.launch([rank], f"{op} {rank}{'->' if op == 'send' else '<-'}{peer}", state=state)
    job.entries[rank][-1] |= {"is_p2p": True, "p2p_seq_id": 1}
    job.seqs[rank, "0"] -= 1


def test_a_receiver_without_a_sender(tmp_path: Path) -> None:
    job = steps(4)
    send(job, 1, 0, "recv")
    send(job, 2, 1, "recv")
    send(job, 3, 2, "recv")
    finding = explain(job.write(tmp_path))
    assert (finding.class_, finding.ranks) == ("missing-rank", [0])


def test_a_send_and_its_recv_blame_nobody(tmp_path: Path) -> None:
    job = steps(2)
    send(job, 0, 1, "send")
    send(job, 1, 0, "recv")
    assert explain(job.write(tmp_path)).confidence == Confidence.UNDETERMINED


def batch(job: Job, rank: int, sides: list[tuple[str, int]], state: str = "started") -> None:
    """`batch_isend_irecv`: parts without a state, then the coalesced operation."""
    for op, peer in sides:
        send(job, rank, peer, op, "scheduled")
    job.launch([rank], "coalesced", state=state)
    job.entries[rank][-1] |= {"is_p2p": True, "p2p_seq_id": 1}
    job.seqs[rank, "0"] -= 1


def test_a_pipeline_waits_for_the_stage_that_did_not_come(tmp_path: Path) -> None:
    job = steps(4)
    batch(job, 0, [("send", 1), ("recv", 1)])
    batch(job, 1, [("send", 0), ("recv", 0), ("send", 2), ("recv", 2)])
    batch(job, 3, [("send", 2), ("recv", 2)])
    finding = explain(job.write(tmp_path))
    assert (finding.class_, finding.ranks) == ("missing-rank", [2])


def test_dumps_of_active_operations_only(tmp_path: Path) -> None:
    """A rank whose operations all completed has no entries; its status tells where it was."""
    job = misses(2)
    for rank in range(4):
        job.entries[rank] = [e for e in job.entries[rank] if e["state"] != "completed"]
    job.enqueued = {2: 4}
    finding = explain(job.write(tmp_path))
    assert (finding.class_, finding.ranks) == ("missing-rank", [2])
    job.enqueued = {2: 5}
    assert explain(job.write(tmp_path)).confidence == Confidence.UNDETERMINED


def test_gloo_groups_beside_nccl_ones(tmp_path: Path) -> None:
    """Gloo's operations stay `scheduled` for ever: nobody waits in the old ones."""
    job = Job(4, {"0": ("default_pg", [0, 1, 2, 3]), "1": ("dp_gloo", [0, 1, 2, 3])})
    for _ in range(3):
        job.launch(range(4)).launch(range(4), "barrier", "1", state="scheduled")
        for rank in range(4):
            job.entries[rank][-1]["profiling_name"] = "gloo:barrier"
    assert explain(job.write(tmp_path)).confidence == Confidence.UNDETERMINED
    assert flight_findings(read_dumps(job.launch(range(4)).write(tmp_path))) == []
    job.launch(others(2), state="started")
    finding = explain(job.write(tmp_path))
    assert (finding.class_, finding.ranks) == ("missing-rank", [2])
    assert finding.confidence == Confidence.ESTABLISHED
