"""`relax-hpc plan --weights`: the figures of a recipe's weight sync, from config.json alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.dcs.architectures import read_model
from relax_hpc.errors import ConfigError
from relax_hpc.launcher.plan import build_plan
from relax_hpc.launcher.site import load_site
from relax_hpc.launcher.weight_plan import weights_summary
from tests.launcher_samples import HEADLINE, ROOT, SMALL, config_of, relax, write_recipe

MODEL = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 1000,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_recipe(tmp_path, HEADLINE)
    (tmp_path / "net").mkdir()
    (tmp_path / "net/config.json").write_text(json.dumps(MODEL))
    return tmp_path


def planned(folder: Path, *more: str) -> dict[str, Any]:
    done = relax(
        *("plan", "recipe.toml", "--weights", "--json", "--set", "model.path=net"),
        *more,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_every_engine_gets_the_model_and_nothing_more(folder: Path) -> None:
    found = planned(folder, "--set", "model.dtype=bfloat16")
    model = sum(spec.nbytes for spec in read_model(MODEL).specs())
    assert found["bytes"] == found["minimum_bytes"]
    assert model * 4 <= found["bytes"] <= model * 4 * 1.01  # 4 engines of TP 2: norms twice
    assert found["max_rank_bytes_vs_mean"] <= 1.2
    assert {"plan_s", "node_bytes", "link_bytes"} <= set(found)
    assert found["link_bytes"]["node"] == 0  # trainer and engines are on different nodes


def test_as_text(folder: Path) -> None:
    done = relax("plan", "recipe.toml", "--weights", "--set", "model.path=net", cwd=folder)
    assert done.stdout.startswith("weights: ")
    assert "x the mean" in done.stdout


def test_a_shared_node_counts_as_near(tmp_path: Path) -> None:
    write_recipe(tmp_path, SMALL)
    (tmp_path / "net").mkdir()
    (tmp_path / "net/config.json").write_text(json.dumps(MODEL))
    found = planned(tmp_path)
    assert found["link_bytes"]["node"] == found["bytes"] > 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "needs the model's config.json"),
        ("{", "cannot be read"),
        ("[]", "holds list, not an object"),
        ('{"model_type": "gpt2"}', "has no table; known: llama"),
    ],
)
def test_a_model_that_cannot_be_planned(folder: Path, text: str | None, says: str) -> None:
    path = folder / "net/config.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
    done = relax("plan", "recipe.toml", "--weights", "--set", "model.path=net", cwd=folder)
    assert done.returncode == 2
    assert says in done.stderr and len(done.stderr.splitlines()) == 1


def summed(**changes: object) -> dict[str, object]:
    config = config_of(HEADLINE, **changes)
    moe = MODEL | {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 32}
    return weights_summary(config, moe, build_plan(config, load_site(config.resources.site)))


def test_options_of_sglang_that_change_the_layout() -> None:
    plain = summed()["bytes"]
    assert summed(rollout__sglang_args={"ep-size": "2"})["bytes"] == plain  # cut in another way
    copies = {"enable-dp-attention": "", "dp-size": "2"}
    assert summed(rollout__sglang_args=copies)["bytes"] > plain  # attention is not cut
    assert summed(rollout__sglang_args={"dp-size": "2"})["bytes"] == plain
    with pytest.raises(ConfigError, match="ep-size='two' is no number"):
        summed(rollout__sglang_args={"ep-size": "two"})


def test_a_run_without_engines_moves_nothing() -> None:
    found = summed(rollout__replay="runs/a-1/trajectories")
    assert (found["engine_ranks"], found["bytes"]) == (0, 0)
    assert found["max_rank_bytes_vs_mean"] == 1.0


MEASURED = """
import resource, sys
from relax_hpc import cli
code = cli.main(["plan", "--weights", "--json", "recipes/qwen3_235b_a22b.toml"])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)
sys.exit(code)
"""


def test_the_sync_of_1536_gpus_without_the_model() -> None:
    """The command that a user runs where nobody downloaded 470 GB: seconds, memory and balance."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["trainer_ranks"], found["engine_ranks"]) == (1024, 512)
    assert found["bytes"] == found["minimum_bytes"] > 64 * 470e9
    assert found["max_rank_bytes_vs_mean"] <= 1.2
    assert "config.json is not here" in found["shapes_from"]
    assert found["plan_s"] < 10 and int(done.stderr.splitlines()[-1]) < 2e9


def test_a_folder_that_is_here_counts_before_the_known_sizes(folder: Path) -> None:
    (folder / "Qwen3-235B-A22B").mkdir()
    (folder / "Qwen3-235B-A22B/config.json").write_text(json.dumps(MODEL))
    found = planned(folder, "--set", "model.path=Qwen3-235B-A22B")
    assert found["shapes_from"] == "Qwen3-235B-A22B/config.json"
    assert 0 < found["bytes"] < 1e9
