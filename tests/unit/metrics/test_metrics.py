"""Metric files: what is written is read back, also after crashes and restarts."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from relax_hpc.errors import RelaxError
from relax_hpc.metrics.metric import (
    Reduction,
    check_name,
    read_metrics,
    read_spans,
    reduction_of,
    series,
)
from relax_hpc.metrics.writers import MetricWriter
from relax_hpc.runfolder import create_run_folder


@pytest.fixture
def folder(tmp_path):
    return create_run_folder(tmp_path / "with space", "run")


def test_lines_have_the_documented_keys(folder):
    with MetricWriter(folder, "train", 0) as writer:
        writer.log(3, {"train/loss": 0.5, "lr": 1e-6})
    (line,) = (folder.metrics / "train-0.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert set(record) == {"time", "step", "role", "index", "metrics"}
    assert (record["step"], record["role"], record["index"]) == (3, "train", 0)
    assert record["metrics"] == {"train/loss": 0.5, "lr": 1e-6}


def test_not_finite_values_stay_json_and_read_as_nan(folder):
    with MetricWriter(folder, "train", 0) as writer:
        writer.log(0, {"train/loss": math.nan, "train/grad_norm": math.inf})
    json.loads((folder.metrics / "train-0.jsonl").read_text(), parse_constant=pytest.fail)
    ((step, value),) = series(read_metrics(folder), "train/loss")
    assert step == 0
    assert math.isnan(value)


def test_series_combines_writers_and_redone_steps_count_once(folder):
    with MetricWriter(folder, "rollout", 0) as first, MetricWriter(folder, "rollout", 1) as second:
        first.log(1, {"rollout/reward_mean": 9.0, "rollout/tokens_max": 9.0})
        first.log(1, {"rollout/reward_mean": 1.0, "rollout/tokens_max": 5.0})
        second.log(1, {"rollout/reward_mean": 2.0, "rollout/tokens_max": 7.0})
        second.log(0, {"rollout/reward_mean": 4.0})
    records = read_metrics(folder)
    assert series(records, "rollout/reward_mean") == [(0, 4.0), (1, 1.5)]
    assert series(records, "rollout/tokens_max") == [(1, 7.0)]
    assert series(records, "nothing") == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("train/staleness_max", Reduction.MAX),
        ("rollout/response_len/min", Reduction.MIN),
        ("perf/tokens_sum", Reduction.SUM),
        ("train/loss", Reduction.MEAN),
        ("train/climax", Reduction.MEAN),
    ],
)
def test_reduction_is_in_the_name(name, kind):
    assert reduction_of(name) is kind


@pytest.mark.parametrize("name", ["", "/", "a//b", "a b", "a/", "\u00e9", "a\n"])
def test_bad_names_are_refused(folder, name):
    with pytest.raises(RelaxError, match="metric name"):
        check_name(name)
    with pytest.raises(RelaxError), MetricWriter(folder, "train", 0) as writer:
        writer.log(0, {name: 1.0})
    assert read_metrics(folder) == []


def test_spans_are_written_also_when_the_body_raises(folder):
    with MetricWriter(folder, "train", 0) as writer:
        with writer.span("wait_chunk", 4):
            time.sleep(0.01)
        with pytest.raises(ZeroDivisionError), writer.span("optimizer", 4):
            raise ZeroDivisionError
    spans = read_spans(folder)["train-0"]
    assert [(s.name, s.step) for s in spans] == [("wait_chunk", 4), ("optimizer", 4)]
    assert spans[0].end - spans[0].start >= 0.01
    assert read_metrics(folder) == []


def test_torn_line_of_a_killed_writer_hides_nothing_else(folder):
    with MetricWriter(folder, "train", 0) as writer:
        writer.log(0, {"train/loss": 1.0})
    with (folder.metrics / "train-0.jsonl").open("ab") as file:
        file.write(b'{"time": 1.0, "step": 1, "met\x00\xff')
    with MetricWriter(folder, "train", 0) as writer:
        writer.log(1, {"train/loss": 2.0})
    assert series(read_metrics(folder), "train/loss") == [(0, 1.0), (1, 2.0)]


def test_a_killed_process_loses_no_line_it_logged(folder):
    code = (
        "import sys, pathlib, time\n"
        "from relax_hpc.runfolder import RunFolder\n"
        "from relax_hpc.metrics.writers import MetricWriter\n"
        "writer = MetricWriter(RunFolder(pathlib.Path(sys.argv[1])), 'train', 0)\n"
        "for step in range(50): writer.log(step, {'train/loss': step})\n"
        "print('logged', flush=True); time.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(folder.path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "logged\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait(timeout=30)
    child.stdout.close()
    assert [step for step, _ in series(read_metrics(folder), "train/loss")] == list(range(50))


def test_threads_do_not_mix_lines(folder):
    with MetricWriter(folder, "rollout", 2) as writer:
        threads = [
            threading.Thread(
                target=lambda k=k: [writer.log(k * 100 + i, {"a": i}) for i in range(50)]
            )
            for k in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(read_metrics(folder)) == 200


def test_tensorboard_events_hold_the_same_values(folder):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    with MetricWriter(folder, "train", 0) as writer:
        writer.log(7, {"train/loss": 0.25})
    (path,) = (folder.metrics / "tensorboard" / "train-0").iterdir()
    events = [e for e in loader.EventFileLoader(str(path)).Load() if e.summary.value]
    (value,) = events[0].summary.value
    number = value.simple_value or value.tensor.float_val[0]
    assert (events[0].step, value.tag, number) == (7, "train/loss", 0.25)


def test_writing_metrics_loads_no_torch_and_works_without_tensorboard(folder):
    code = (
        "import sys, pathlib\n"
        "sys.modules['tensorboard'] = None if len(sys.argv) > 2 else sys.modules.get('x', None)\n"
        "if len(sys.argv) == 2: del sys.modules['tensorboard']\n"
        "from relax_hpc.runfolder import RunFolder\n"
        "from relax_hpc.metrics.writers import MetricWriter\n"
        "with MetricWriter(RunFolder(pathlib.Path(sys.argv[1])), 'train', 0) as w:\n"
        "    w.log(0, {'a': 1.0})\n"
        "assert 'torch' not in sys.modules and 'tensorflow' not in sys.modules\n"
    )
    for more in ([], ["without"]):
        subprocess.run([sys.executable, "-c", code, str(folder.path), *more], check=True)
    assert len(read_metrics(folder)) == 2
