"""Real failures of real gloo processes: the verdict from dumps, and from text alone."""

import dataclasses
from pathlib import Path

import pytest

from relax_hpc.postmortem.diagnose import analyse
from relax_hpc.postmortem.verdict import Confidence, Verdict
from tests.distributed.failing_job import run_failing_job

pytestmark = pytest.mark.distributed

# What happened, as dumps and as text can tell it. A dump of a dead rank does not exist and a
# stopped process looks like a dead one: the class says what is seen, the rank must be right.
_GONE = {"missing-rank"}
_MISMATCH = {"size-mismatch", "dtype-mismatch", "op-mismatch"}
FROM_DUMPS = {
    "exit": _GONE,
    "kill": _GONE,
    "stop": _GONE,
    "cut": _GONE,
    "exception": _GONE,
    "oom": _GONE,
    "sleep": {"straggler"},
    "skip": {"missing-rank"},
    "op": {"op-mismatch"},
    "shape": {"size-mismatch"},
    "dtype": {"dtype-mismatch"},
}
FROM_TEXT = {
    "exit": {"rank-died", "missing-rank"},
    "kill": {"rank-died", "missing-rank"},
    "stop": {"missing-rank"},
    "cut": {"network-lost", "rank-died"},
    "exception": {"python-exception"},
    "oom": {"host-oom"},
    "sleep": {"straggler", "missing-rank"},
    "skip": _MISMATCH | _GONE,
    "op": _MISMATCH,
    "shape": _MISMATCH,
    "dtype": _MISMATCH,
}


@dataclasses.dataclass(frozen=True)
class Case:
    failure: str
    world: int
    culprit: int
    is_mesh: bool = False

    def __str__(self) -> str:
        return f"{self.failure}-{self.culprit}-of-{self.world}" + ("-mesh" if self.is_mesh else "")


SAMPLE = (
    Case("kill", 3, 0),
    Case("sleep", 3, 1),
    Case("shape", 2, 1),
    Case("stop", 4, 2, is_mesh=True),
)
ALL = tuple(
    Case(failure, world, culprit, is_mesh)
    for failure in FROM_DUMPS
    for world, culprit, is_mesh in (
        (2, 0, False),
        (2, 1, False),
        (3, 1, False),
        (4, 3, False),
        (4, 2, True),
        (8, 5, False),
        (8, 0, True),
        (16, 11, False),
    )
)


def run(case: Case, folder: Path) -> Path:
    return run_failing_job(
        folder / str(case), case.world, case.failure, case.culprit, is_mesh=case.is_mesh
    )


def dump_fault(case: Case, verdict: Verdict) -> str:
    """What is wrong with a verdict from dumps; empty if it is right."""
    is_right = verdict.class_ in FROM_DUMPS[case.failure] and verdict.ranks == [case.culprit]
    return "" if is_right else f"{case}: {verdict.class_} {verdict.ranks}: {verdict.sentence}"


def text_fault(case: Case, verdict: Verdict) -> str:
    """What is wrong with a verdict from text: two neighbours may be named, one of them right."""
    names_it = case.culprit in verdict.ranks and len(verdict.ranks) <= 2
    is_right = verdict.class_ in FROM_TEXT[case.failure] and names_it
    return "" if is_right else f"{case}: {verdict.class_} {verdict.ranks}: {verdict.sentence}"


def is_certain_and_wrong(case: Case, verdict: Verdict) -> bool:
    return verdict.confidence == Confidence.ESTABLISHED and verdict.ranks != [case.culprit]


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_real_failure(case: Case, tmp_path: Path) -> None:
    folder = run(case, tmp_path)
    assert dump_fault(case, analyse([str(folder / "dumps")]).verdict) == ""
    assert text_fault(case, analyse([str(folder / "logs")]).verdict) == ""
    together = analyse([str(folder)]).verdict
    assert together.ranks == [case.culprit]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_real_failures(tmp_path: Path) -> None:
    """100 % right with dumps, 90 % from text alone, and nothing wrong for certain."""
    from_dumps, from_text, certain = [], [], []
    for case in ALL:
        folder = run(case, tmp_path)
        by_dumps = analyse([str(folder / "dumps")]).verdict
        by_text = analyse([str(folder / "logs")]).verdict
        from_dumps.append(dump_fault(case, by_dumps))
        from_text.append(text_fault(case, by_text))
        certain += [str(case) for v in (by_dumps, by_text) if is_certain_and_wrong(case, v)]
    wrong_dumps, wrong_text = list(filter(None, from_dumps)), list(filter(None, from_text))
    print(f"\nof {len(ALL)}: {len(wrong_dumps)} wrong with dumps, {len(wrong_text)} from text")
    print(*wrong_dumps, *wrong_text, sep="\n")
    assert certain == []
    assert wrong_dumps == []
    assert len(wrong_text) <= len(ALL) / 10
