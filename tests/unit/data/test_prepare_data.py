"""tools/prepare_data on files shaped like the published ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "prepare_data"
MESSAGES = [{"role": "user", "content": "What is 6 x 7?"}]


def prepare(source, out, *options):
    return subprocess.run(
        [sys.executable, str(TOOL), str(source), str(out), *options],
        capture_output=True,
        text=True,
        timeout=120,
    )


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_original_parquet_with_its_repetitions(tmp_path):
    import pyarrow
    import pyarrow.parquet

    row = {
        "data_source": "math_dapo",
        "prompt": MESSAGES,
        "ability": "MATH",
        "reward_model": {"ground_truth": "42", "style": "rule"},
    }
    other = {**row, "prompt": [{"role": "user", "content": "1+1?"}]}
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([row, other] * 100), tmp_path / "a.parquet"
    )
    out = tmp_path / "new folder" / "out.jsonl"
    done = prepare(tmp_path / "a.parquet", out, "--expect", "2")
    assert done.returncode == 0, done.stderr
    assert "2 questions (read 200, repeated 198)" in done.stdout
    assert rows_of(out)[0] == {"prompt": MESSAGES, "label": "42"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": MESSAGES, "label": "42"},
        {"ID": "2024-I-1", "Problem": "What is 6 x 7?", "Answer": 42},
        {"question": "What is 6 x 7?", "answer": "42"},
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_other_schemas(row, suffix, tmp_path):
    source = tmp_path / f"in{suffix}"
    source.write_text(json.dumps([row]) if suffix == ".json" else json.dumps(row) + "\n")
    assert prepare(source, tmp_path / "out.jsonl").returncode == 0
    (seen,) = rows_of(tmp_path / "out.jsonl")
    assert seen["label"] == "42"
    assert "What is 6 x 7?" in seen["prompt"][0]["content"]
    if "prompt" not in row:
        assert "Answer:" in seen["prompt"][0]["content"]


def test_bad_rows_are_counted_and_contradictions_left_out(tmp_path):
    rows = [
        {"prompt": MESSAGES, "label": "42"},
        {"prompt": [{"role": "user", "content": "1+1?"}], "label": "2"},
        {"prompt": [{"role": "user", "content": "1+1? "}], "label": "3"},
        {"prompt": "no answer"},
        {"label": "no question"},
        {"prompt": [{"role": "user", "content": ""}], "label": "0"},
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    done = prepare(source, tmp_path / "out.jsonl")
    assert "read 6, incomplete 3, repeated 1, contradicting 1" in done.stdout
    assert [row["label"] for row in rows_of(tmp_path / "out.jsonl")] == ["42"]


@pytest.mark.parametrize(
    ("name", "content", "options", "code", "message"),
    [
        ("in.csv", "a", [], 2, "valid are"),
        ("in.jsonl", "{", [], 2, "prepare_data"),
        ("in.jsonl", "", [], 1, "0 usable questions"),
        ("in.jsonl", '{"prompt": "1?", "label": 1}', ["--expect", "30"], 1, "expected 30"),
    ],
)
def test_bad_input_writes_nothing(name, content, options, code, message, tmp_path):
    (tmp_path / name).write_text(content)
    done = prepare(tmp_path / name, tmp_path / "out.jsonl", *options)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert not (tmp_path / "out.jsonl").exists()
