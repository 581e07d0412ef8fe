"""Reading: blocks, encodings, packed files, folders, line numbers, the prefilter against `in`."""

import gzip
import io
import random
import sys
import types
from pathlib import Path

import pytest

from relax_hpc.postmortem import collect, diagnose
from relax_hpc.postmortem.parse import registry
from relax_hpc.postmortem.prefilter import Prefilter

LINE = (
    "[rank3]:[E512 10:00:00.000000001 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
    "Timeout(ms)=600000) ran for 600010 milliseconds before timing out."
)


def found(path: Path) -> list[tuple[int, str]]:
    status = collect.ReadStatus()
    return [
        (record.line, record.text)
        for window in collect.windows(str(path), registry.LITERALS, status)
        for record in window.records
    ]


def test_prefilter_finds_what_in_finds() -> None:
    chooser = random.Random(0)
    literals = list(registry.LITERALS)
    lines = []
    for number in range(3000):
        words = [chooser.choice(("loss", "step", "rank", "NCCL", "é", "x" * 9)) for _ in range(9)]
        if number % 7 == 0:
            words.insert(chooser.randrange(9), chooser.choice(literals))
        lines.append(" ".join(words))
    data = "\n".join(lines).encode()
    wanted = [line for line in lines if any(literal in line for literal in literals)]
    got = [data[start:end].decode().rstrip("\n") for start, end in Prefilter(literals).lines(data)]
    assert got == wanted


def test_every_byte_offset_is_looked_at() -> None:
    for shift in range(9):
        data = b"." * shift + b"Watchdog caught"
        assert list(Prefilter(["Watchdog caught"]).lines(data)) == [(0, len(data))]


def test_short_literals_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Prefilter(["ECC"])


@pytest.mark.parametrize("block", [64, 1000, 1 << 20])
def test_line_numbers_across_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(collect, "BLOCK_BYTES", block)
    monkeypatch.setattr(collect, "SMALL_BYTES", 0)
    lines = [f"step {number} loss 1" for number in range(400)]
    for place in (0, 57, 203, 399):
        lines[place] = LINE
    path = tmp_path / "job.log"
    path.write_text("\n".join(lines))
    hits = [line for line, text in found(path) if "Watchdog caught" in text]
    assert hits == [1, 58, 204, 400]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "job.log").write_text(f"start é\n{LINE}\n", encoding=encoding)
    assert diagnose.analyse([str(tmp_path)]).num_events >= 1


def test_wrong_bytes_and_carriage_returns(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_bytes(b"\xff\xfe\x00 10%\r 20%\r" + LINE.encode() + b"\r\n\0\0\0")
    assert diagnose.analyse([str(tmp_path / "job.log")]).num_files == 1
    (tmp_path / "job.log").write_bytes(b" 10%\r 20%\r" + LINE.encode() + b"\r\n\0\0\0")
    assert diagnose.analyse([str(tmp_path / "job.log")]).num_events >= 1


def test_packed_and_cut_off(tmp_path: Path) -> None:
    packed = gzip.compress((LINE + "\n").encode() * 2000)
    (tmp_path / "a.gz").write_bytes(packed)
    (tmp_path / "b.gz").write_bytes(packed[: len(packed) // 2])
    report = diagnose.analyse([str(tmp_path)])
    assert report.num_events >= 2000
    assert any("b.gz" in note for note in report.notes)


def test_folders_are_walked_and_secrets_left_alone(tmp_path: Path) -> None:
    (tmp_path / "logs" / "node1").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "logs" / "node1" / "rank_3.log").write_text(LINE)
    (tmp_path / "secret" / "key.log").write_text(LINE)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    assert [Path(log).name for log in collect.read([str(tmp_path)]).logs] == ["rank_3.log"]


def test_missing_paths(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        collect.read([str(tmp_path / "no")])
    (tmp_path / "a.log").write_text(LINE)
    corpus = collect.read([str(tmp_path / "no"), str(tmp_path)])
    assert len(corpus.logs) == 1
    assert "no such file" in corpus.notes[0]


def test_file_names_tell_ranks_only_together() -> None:
    assert collect.file_ranks(["a/about_rank_3.log"]) == {}
    assert collect.file_ranks(["a/rank_3.log", "a/rank_4.log"]) == {
        "a/rank_3.log": 3,
        "a/rank_4.log": 4,
    }


def test_several_processes_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(6):
        text = LINE.replace("rank3", f"rank{rank}").replace("Rank 3", f"Rank {rank}")
        (tmp_path / f"rank_{rank}.log").write_text(text + "\n")
    alone = diagnose.analyse([str(tmp_path)])
    monkeypatch.setattr(diagnose, "PARALLEL_BYTES", 0)
    assert diagnose.analyse([str(tmp_path)]) == alone


def test_zstandard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in: the package is optional, and no test may depend on what is installed."""
    fake = types.ModuleType("zstandard")

    class ZstdDecompressor:
        def stream_reader(self, raw: io.BufferedReader, read_across_frames: bool) -> io.BytesIO:
            assert read_across_frames
            raw.seek(4)
            return io.BytesIO(raw.read())

    fake.__dict__.update(ZstdDecompressor=ZstdDecompressor, ZstdError=ValueError)
    monkeypatch.setitem(sys.modules, "zstandard", fake)
    (tmp_path / "a.zst").write_bytes(b"\x28\xb5\x2f\xfd" + LINE.encode())
    assert diagnose.analyse([str(tmp_path)]).num_events >= 1


def test_zstandard_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.zst").write_bytes(b"\x28\xb5\x2f\xfd rest")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    report = diagnose.analyse([str(tmp_path)])
    assert any("needs the package zstandard" in note for note in report.notes)


def test_zstd_as_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.zst").write_bytes(b"\x28\xb5\x2f\xfd rest")
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "zstd"
    fake.write_text(f"#!/bin/sh\necho '{LINE}'\n")
    fake.chmod(0o755)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    report = diagnose.analyse([str(tmp_path / "a.zst")])
    assert report.num_events >= 1
