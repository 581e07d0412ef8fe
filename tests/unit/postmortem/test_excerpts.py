"""The public excerpts: class and culprit of each, and that nobody is named without reason.

expected.tsv: `ranks` and `places` (nodes or ends of links) must be named if given; `never_*` are
the traps (reporters, victims, healthy nodes); `at_most` is how sure a verdict may be.
"""

import csv
import gzip
from pathlib import Path

import pytest

from relax_hpc.postmortem.classes import CATALOGUE
from relax_hpc.postmortem.diagnose import analyse
from relax_hpc.postmortem.verdict import Report

FOLDER = Path(__file__).parents[2] / "data" / "nccl_logs"
with (FOLDER / "expected.tsv").open() as _table:
    ROWS = list(csv.DictReader(_table, delimiter="\t"))
SURE = ("undetermined", "likely", "established")


def _numbers(text: str) -> set[int]:
    return {int(part) for part in text.split(",") if part}


def _check(row: dict[str, str], report: Report) -> None:
    verdict = report.verdict
    assert verdict.class_ == row["class"], verdict.sentence
    assert verdict.class_ in CATALOGUE
    assert _numbers(row["ranks"]) <= set(verdict.ranks)
    assert not _numbers(row["never_ranks"]) & set(verdict.ranks)
    for place in row["places"].split():
        assert any(place in name for name in verdict.nodes + verdict.links)
    for node in row["never_nodes"].split():
        assert not any(name.startswith(node) for name in verdict.nodes)
    assert SURE.index(verdict.confidence.value) <= SURE.index(row["at_most"])
    assert verdict.evidence
    assert verdict.next_steps


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["file"])
def test_excerpt(row: dict[str, str]) -> None:
    _check(row, analyse([str(FOLDER / row["file"])]))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["file"])
def test_the_name_of_the_file_does_not_matter(row: dict[str, str], tmp_path: Path) -> None:
    text = (FOLDER / row["file"]).read_bytes()
    (tmp_path / "x.gz").write_bytes(gzip.compress(text))
    _check(row, analyse([str(tmp_path)]))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["file"])
def test_at_the_end_of_a_long_log(row: dict[str, str], tmp_path: Path) -> None:
    """The prefilter loses nothing, and ordinary lines before it change nothing."""
    noise = "".join(
        f"[2024-05-01 10:00:{i % 60:02d}] step {i} loss 2.{i:05d} lr 1e-5 tokens/s {90000 + i}\n"
        for i in range(6000)
    )
    text = (FOLDER / row["file"]).read_bytes()
    (tmp_path / "job.out").write_bytes(noise.encode() + b"\n" + text)
    report = analyse([str(tmp_path / "job.out")])
    _check(row, report)
    lines = (tmp_path / "job.out").read_text().split("\n")
    for source in report.verdict.evidence:
        assert source.text[:40].strip() in lines[source.line - 1]


def test_every_excerpt_has_a_row() -> None:
    assert {row["file"] for row in ROWS} == {path.name for path in FOLDER.glob("*.log")}
