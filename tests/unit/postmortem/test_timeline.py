"""Order of events, clocks that differ, several attempts of one job."""

from pathlib import Path

from relax_hpc.postmortem.diagnose import analyse
from relax_hpc.postmortem.evidence import Event, EventKind, Source
from relax_hpc.postmortem.timeline import order


def signal(node: str, rank: int, time: float) -> Event:
    return Event(
        kind=EventKind.DUMP_SIGNAL,
        source=Source(f"{node}.log", 1, ""),
        node=node,
        rank=rank,
        time=time,
        attrs={"from_rank": 9},
    )


def test_a_clock_that_is_an_hour_ahead_is_corrected() -> None:
    events = [signal("a", 0, 100.0), signal("b", 1, 3700.4), signal("c", 2, 100.8)]
    timeline = order(events)
    assert list(timeline.skew_s) == ["b"]
    assert abs(timeline.skew_s["b"] - 3600) < 2
    assert max(event.time or 0 for event in timeline.events) < 110


def test_two_clocks_do_not_tell_which_is_wrong() -> None:
    assert order([signal("a", 0, 100.0), signal("b", 1, 3700.0)]).skew_s == {}


def test_lines_without_stamp_keep_their_place() -> None:
    def event(file: str, line: int, time: float | None) -> Event:
        return Event(kind=EventKind.PHASE, source=Source(file, line, ""), time=time)

    events = [event("a", 1, None), event("a", 2, 50.0), event("a", 3, None), event("b", 1, 20.0)]
    ordered = [(e.source.file, e.source.line) for e in order(events).events]
    assert ordered == [("b", 1), ("a", 1), ("a", 2), ("a", 3)]


def test_history_names_a_node_that_fails_again(tmp_path: Path) -> None:
    for attempt in (1, 2, 3):
        folder = tmp_path / f"attempt_{attempt}" / "train"
        folder.mkdir(parents=True)
        node = "gpu7" if attempt != 2 else "gpu1"
        (folder / "0.log").write_text(
            f"Mar  {attempt} 00:00:00 {node} kernel: NVRM: Xid (PCI:0000:1a:00): 79, pid=1\n"
        )
    report = analyse([str(tmp_path)], history=True)
    assert any("gpu7 is suspected in 2 of 3" in note for note in report.notes)
    assert any("attempt_2" in note and "gpu1" in note for note in report.notes)


def test_history_of_one_attempt(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("step 1\n")
    assert any("only one" in note for note in analyse([str(tmp_path)], history=True).notes)


def test_the_cascade_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(
        "gpu7: NVRM: Xid (PCI:0000:1a:00): 79, pid=1, GPU has fallen off the bus\n"
        "n1:5:6 [0] socket.cc:49 NCCL WARN Connection closed by remote peer gpu7<41109>\n"
        "srun: error: n1: tasks 0-3: Exited with exit code 1\n"
    )
    report = analyse([str(tmp_path)])
    assert report.verdict.class_ == "gpu-pcie-lost"
    assert {"remote-crash", "rank-died"} <= {finding.class_ for finding in report.cascade}
