"""The README's first command, as a user types it, on a cluster of its own."""

import json
import os
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1500)
def test_quickstart_learns(tmp_path: Path) -> None:
    """Held-out accuracy from <= 0.6 to >= 0.9; the cluster is gone afterwards."""
    state = tmp_path / "cluster"
    done = subprocess.run(
        ["tools/quickstart", "--json"],
        cwd=ROOT,
        env={**os.environ, "RELAX_CLUSTER_DIR": str(state)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result) == {"accuracy_before", "accuracy_after", "train_steps", "minutes"}
    assert result["accuracy_before"] <= 0.6
    assert result["accuracy_after"] >= 0.9
    recipe = tomllib.loads((ROOT / "recipes" / "tiny_dapo.toml").read_text())
    assert result["train_steps"] == recipe["run"]["train_steps"]
    assert not state.exists()
    # rollout, train and dcs on different nodes and partitions
    steps = [
        line.split() for line in done.stdout.splitlines() if "rollout" in line or "train" in line
    ]
    nodes = {row[1][:7]: row[-1] for row in steps if row and row[0].split(".")[0].isdigit()}
    assert nodes.get("rollout") in ("n02", "n03") and nodes.get("train-0") == "n01", done.stdout


def test_quickstart_says_why_it_failed(tmp_path: Path) -> None:
    recipe = tmp_path / "bad.sh"
    recipe.write_text("#!/bin/bash\n#SBATCH -p train\necho what went wrong\nexit 3\n")
    done = subprocess.run(
        ["tools/quickstart", "--recipe", str(recipe)],
        cwd=ROOT,
        env={**os.environ, "RELAX_CLUSTER_DIR": str(tmp_path / "cluster")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 1
    assert "what went wrong" in done.stdout and "ended as FAILED" in done.stdout
    assert "Traceback" not in done.stdout
    assert not (tmp_path / "cluster").exists()
    for path in (ROOT / "runs").glob("bad.sh-*.out"):
        path.unlink()
