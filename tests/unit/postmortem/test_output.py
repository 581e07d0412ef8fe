"""What a report looks like: plain, on a terminal, as a page, as JSON; hostile text everywhere."""

import argparse
import html.parser
import io
import json
import os
import pty
import re

import pytest

from relax_hpc.postmortem.command import exit_code, report_json
from relax_hpc.postmortem.evidence import Event, EventKind, Group, Source
from relax_hpc.postmortem.marks import add_picture, marks_of, waits_of
from relax_hpc.postmortem.page import render_html
from relax_hpc.postmortem.picture import lanes
from relax_hpc.postmortem.printable import number_ranges, printable
from relax_hpc.postmortem.terminal import print_report, report_lines
from relax_hpc.postmortem.verdict import Alternative, Confidence, Finding, Report, Verdict, Wait

EVIL = "\x1b]0;owned\x07</title><script>alert(1)</script>\"'&\x9b2J\u202e\udcff\x00 onload=x"


def timeout_of(rank: int, time: float | None = None) -> Event:
    return Event(
        kind=EventKind.COLLECTIVE_TIMEOUT,
        source=Source(f"rank{rank}.log", 7, f"[rank{rank}]: Watchdog caught ..."),
        rank=rank,
        time=time,
        op="all_reduce",
        seq=41,
        group=Group(name="default_pg"),
    )


def report_of(num_ranks: int = 8, culprit: int = 3, text: str = "no line of rank 3") -> Report:
    verdict = Verdict(
        class_="missing-rank",
        confidence=Confidence.LIKELY,
        sentence=f"rank {culprit} on n07 did not reach all_reduce 41 of default_pg",
        ranks=[culprit],
        nodes=["n07"],
        evidence=[Source("rank0.log", 7, text), Source("trace_3", 0, "entry 41")],
        alternatives=[Alternative(class_="network", reason="no error of a card was seen")],
        next_steps=["look at the stack of rank 3", "switch the recorder on"],
    )
    echo = Finding(class_="echo", confidence=Confidence.ESTABLISHED, sentence="7 ranks waited")
    report = Report(
        verdict=verdict,
        findings=[echo],
        cascade=[echo],
        num_files=num_ranks,
        num_lines=123456,
        ranks_seen=list(range(num_ranks)),
        notes=["a note"],
    )
    events = [timeout_of(rank, 1e9 + rank) for rank in range(num_ranks) if rank != culprit]
    return add_picture(report, events)


def plain(report: Report) -> str:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_report(report, out)
    out.flush()
    return out.buffer.getvalue().decode("ascii")


def test_plain_text_says_it_in_order() -> None:
    text = plain(report_of())
    places = [
        "likely: missing-rank",
        "rank 3 on n07 did not reach",
        "most likely at fault: ranks 3; nodes n07",
        "rank0.log:7",
        "  trace_3\n",
        "network: no error of a card",
        "1. look at the stack",
        "echo: 7 ranks waited",
        "read 8 files, 123,456 lines",
        "ranks seen 0-7",
        "note: a note",
    ]
    found = [text.index(place) for place in places]
    assert found == sorted(found)
    assert max(map(len, text.splitlines())) <= 100


def test_nobody_is_accused_when_nothing_is_proven() -> None:
    report = report_of()
    report.verdict.confidence = Confidence.UNDETERMINED
    assert "at fault" not in plain(report)
    assert "nothing is proven: ranks 3; nodes n07" in plain(report)
    assert "At fault" not in render_html(report)


def test_on_a_terminal() -> None:
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal:
        print_report(report_of(text=EVIL), terminal)
        terminal.flush()
        seen = ""
        while "note: a note" not in seen:
            seen += os.read(leader, 65536).decode()
    os.close(leader)
    assert "missing-rank" in seen
    assert "\x1b]" not in seen, "an escape sequence of the log came through"
    assert "\x07" not in seen


@pytest.mark.parametrize("field", ["class_", "sentence", "nodes", "text", "next_steps", "notes"])
def test_hostile_text_is_harmless_in_every_field(field: str) -> None:
    report = report_of(text=EVIL if field == "text" else "x")
    if field in ("class_", "sentence"):
        setattr(report.verdict, field, EVIL)
    elif field == "notes":
        report.notes = [EVIL]
    elif field != "text":
        setattr(report.verdict, field, [EVIL])
    for _, line in report_lines(report, 80):
        assert line.isprintable() or line == ""
    assert json.loads(report_json(report))["verdict"]["confidence"] == "likely"
    page = render_html(report)
    assert page.isascii()
    assert tags_of(page).isdisjoint({"script", "img", "iframe", "link", "object"})


class _Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.open: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tags_of(page: str) -> set[str]:
    parser = _Tags()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert not any(name.startswith("on") for name in parser.attributes)
    return parser.seen


def test_page_loads_nothing_from_anywhere() -> None:
    page = render_html(report_of())
    assert not re.search(r"https?:|src=|url\((?!#)|@import", page)
    assert "<svg" in page
    assert "waited for" in page


def test_a_thousand_ranks_fit_and_the_culprit_has_its_own_lane() -> None:
    report = report_of(num_ranks=1024, culprit=700)
    rows, left_out = lanes(report)
    assert left_out == 0
    assert rows[0].ranks == (700,)
    assert rows[0].is_at_fault
    assert rows[1].label == "ranks 0-699,701-1023"
    assert len(render_html(report)) < 200_000


def test_marks_without_time_stand_in_order() -> None:
    report = report_of()
    report.marks = marks_of([timeout_of(0), timeout_of(1, 5.0), timeout_of(2)])
    assert "no time stamp" in render_html(report)
    report.marks = marks_of([timeout_of(0), timeout_of(1, float("inf"))])
    assert "<svg" in render_html(report)


def test_marks_keep_first_and_last_of_a_kind() -> None:
    events = [timeout_of(1, float(n)) for n in range(100)]
    assert [mark.time for mark in marks_of(events)] == [0.0, 99.0]


def test_arrows_go_from_those_that_say_they_waited() -> None:
    assert waits_of([timeout_of(1), timeout_of(2)], [2]) == [
        Wait(rank=1, on=2, why="all_reduce 41 of default_pg")
    ]


def test_a_report_of_nothing() -> None:
    verdict = Verdict(class_="undetermined", confidence=Confidence.UNDETERMINED, sentence="no data")
    report = Report(verdict=verdict)
    assert "read 0 files" in plain(report)
    assert "<svg" not in render_html(report)
    assert exit_code(report) == 1
    assert exit_code(report_of()) == 0


def test_numbers_and_text() -> None:
    assert number_ranges([3, 1, 2, 7, 7]) == "1-3,7"
    assert number_ranges([]) == ""
    assert number_ranges(range(0, 100, 2), 2) == "0,2,.. (50)"
    assert printable("a\tb\x1b[1m") == "a b\\x1b[1m"
    assert printable("x" * 100, 20) == "xxxxxxx ... xxxxxxx"
    assert printable("caf\u00e9") == "caf\u00e9"


def test_json_holds_no_infinity() -> None:
    report = report_of()
    report.findings[0].time = float("nan")
    assert json.loads(report_json(report))["findings"][0]["time"] is None


def test_json_has_the_fields_that_scripts_read() -> None:
    verdict = json.loads(report_json(report_of()))["verdict"]
    assert verdict["class"] == "missing-rank"
    assert verdict["evidence"][0] == {"file": "rank0.log", "line": 7, "text": "no line of rank 3"}
    assert verdict["alternatives"][0]["class"] == "network"


def test_arguments() -> None:
    from relax_hpc.postmortem.command import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["a", "-", "--json", "--html", "f.html", "--history"])
    assert (args.paths, args.json, args.html, args.history) == (["a", "-"], True, "f.html", True)
    with pytest.raises(SystemExit):
        parser.parse_args(["a", "--json", "--exclude"])
