"""tools/bench_weights in small: it runs, checks its bits, and its last line holds the ratios."""

import json
import os
import subprocess

import pytest

from tests.distributed.launch import ROOT

pytestmark = pytest.mark.distributed


def test_the_ratios_are_the_last_line() -> None:
    command = [str(ROOT / "tools" / "bench_weights"), "--json", "--gb", "0.1", "--rounds", "1"]
    command += ["--trainer", "tp=2,pp=2", "--engine", "tp=2", "--bucket-mb", "8"]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    *report, last = done.stdout.splitlines()
    found = json.loads(last)
    assert set(found) == {"bytes_vs_minimum", "time_vs_broadcast", "trainer_stall_s"}
    assert 1.0 <= found["bytes_vs_minimum"] <= 1.02
    whole = json.loads("\n".join(report))
    assert whole["transport"] == "gloo" and 0.05e9 < whole["minimum_bytes"] < 0.2e9
    assert whole["max_received_bytes"]["broadcast"] > whole["max_received_bytes"]["ours"]
