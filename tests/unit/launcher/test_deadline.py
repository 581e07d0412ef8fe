"""When to stop: the job's end, the saves that were seen, an end that is moved."""

import math
import time
from pathlib import Path

import pytest

from relax_hpc import slurm
from relax_hpc.errors import SlurmError
from relax_hpc.launcher.deadline import (
    MARGIN_S,
    Deadline,
    job_deadline,
    parse_time,
    save_p95_s,
    saves_of,
)
from relax_hpc.metrics.writers import MetricWriter
from relax_hpc.runfolder import open_run_folder
from relax_hpc.steps.timed_keeper import TimedKeeper


def test_the_end_less_a_save_and_the_margin() -> None:
    saves = [10.0] * 19 + [500.0]
    assert save_p95_s(saves) == 10.0
    deadline = Deadline(10_000.0, lambda: [*saves, 300.0])
    assert not deadline.is_due(9_639.0)
    assert deadline.stop_at == 10_000.0 - 300.0 - MARGIN_S
    assert deadline.grace_s == 330.0
    assert deadline.is_due(9_640.0)


@pytest.mark.parametrize(
    ("saves", "p95"), [([], 0.0), ([7.0], 7.0), ([3.0, 1.0, 2.0], 3.0), (list(range(1, 101)), 95)]
)
def test_percentile(saves: list[float], p95: float) -> None:
    assert save_p95_s(saves) == p95


def test_a_job_without_an_end_is_never_due(tmp_path: Path) -> None:
    for deadline in (Deadline(None, list), job_deadline({}, "", open_run_folder(tmp_path / "a"))):
        assert deadline.stop_at == math.inf and not deadline.is_due(1e12)


def test_slurm_is_asked_once_more_before_the_run_is_stopped() -> None:
    asked: list[float | None] = [9_000.0, 5_000.0, None]
    deadline = Deadline(5_000.0, list, lambda: asked.pop(0))
    assert not deadline.is_due(4_900.0) and len(asked) == 3
    assert not deadline.is_due(4_950.0) and len(asked) == 2  # an operator gave it more time
    assert deadline.stop_at == 9_000.0 - MARGIN_S
    assert not deadline.is_due(8_000.0) and len(asked) == 2
    assert deadline.is_due(8_950.0) and asked == [None]
    assert deadline.is_due(8_951.0)


def test_the_end_comes_from_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_run_folder(tmp_path / "a-1")
    assert job_deadline({"SLURM_JOB_END_TIME": "1767225600"}, "7", folder).stop_at == (
        1767225600.0 - MARGIN_S
    )
    ends = [{"EndTime": "2026-01-01T00:00:00"}, {"EndTime": "2026-01-01T01:00:00"}]
    monkeypatch.setattr(slurm, "show_job", lambda job_id: ends)
    first = time.mktime((2026, 1, 1, 0, 0, 0, 0, 0, -1))
    assert job_deadline({}, "7", folder).stop_at == first - MARGIN_S
    assert [parse_time(text) for text in ("Unknown", "", "NONE")] == [None] * 3

    def silent(job_id: str) -> list[dict[str, str]]:
        raise SlurmError("no answer")

    monkeypatch.setattr(slurm, "show_job", silent)
    assert job_deadline({}, "7", folder).stop_at == math.inf


class Keeper:
    """Saves nothing."""

    damaged, ledger = (3,), b"x"

    def save(self, step: int, with_hf: bool, ledger: bytes | None = None) -> object:
        if step == 2:
            raise OSError("disk full")
        return step

    def resume(self) -> int:
        return 4

    def has_hf(self, step: int) -> bool:
        return step == 5


def test_saves_are_noted_where_the_supervisor_looks(tmp_path: Path) -> None:
    folder = open_run_folder(tmp_path / "a-1")
    with MetricWriter(folder, "train") as writer, MetricWriter(folder, "rollout") as other:
        keeper = TimedKeeper(Keeper(), writer)
        assert keeper.save(1, with_hf=False, ledger=b"") == 1
        with pytest.raises(OSError, match="disk full"):
            keeper.save(2, with_hf=False)
        with other.span("save", 1), writer.span("other", 1):
            pass
        assert (keeper.resume(), keeper.has_hf(5), keeper.damaged) == (4, True, (3,))
        assert keeper.ledger == b"x"
    assert len(saves_of(folder)) == 2 and all(took >= 0 for took in saves_of(folder))
