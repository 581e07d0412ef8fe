"""The promise of tools/bench_topology, on few seeds; 20 seeds and 16,384 GPUs with --long."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "bench_topology"


def bench(*options: str) -> dict[str, float]:
    told = subprocess.run(
        [sys.executable, TOOL, "--json", *options],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found = json.loads(told.stdout.splitlines()[-1])
    # Names that follow leaves: Slurm's order is good already, and no plan may be worse.
    assert all(row["worst_seed"] <= 0 for row in found["rows"])
    assert len(found["rows"]) == 4
    return {key: value for key, value in found.items() if key != "rows"}


@pytest.mark.parametrize("gpus", [128, 1024])
def test_a_third_less_crosses_the_spine(gpus: int) -> None:
    found = bench("--gpus", str(gpus), "--seeds", "5")
    assert set(found) == {"plan_s", "spine_bytes_vs_block_order", "peak_rss_gb"}
    assert found["spine_bytes_vs_block_order"] <= -0.3


@pytest.mark.long
def test_sixteen_thousand_gpus() -> None:
    found = bench("--gpus", "16384")
    assert found["spine_bytes_vs_block_order"] <= -0.3
    assert found["plan_s"] < 5
    assert found["peak_rss_gb"] < 1


def test_sizes_that_make_no_tree_are_refused() -> None:
    told = subprocess.run([sys.executable, TOOL, "--gpus", "100"], capture_output=True, check=False)
    assert told.returncode == 2
