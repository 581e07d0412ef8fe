import json
from pathlib import Path

import pytest

from relax_hpc.errors import ConfigError
from relax_hpc.launcher import preflight
from tests.launcher_samples import SMALL, config_of, write_inputs


@pytest.fixture(autouse=True)
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)


def test_good_inputs_pass() -> None:
    preflight.check_inputs(config_of(SMALL))
    assert preflight.missing_inputs(config_of(SMALL)) == []


@pytest.mark.parametrize(
    ("gone", "says"),
    [
        ("model/config.json", "has no config.json"),
        ("model/model.safetensors", r"has no \*.safetensors"),
        ("train.jsonl", "train.jsonl"),
    ],
)
def test_each_missing_file_is_named(gone: str, says: str) -> None:
    Path(gone).unlink()
    with pytest.raises(ConfigError, match=says):
        preflight.check_inputs(config_of(SMALL))
    assert len(preflight.missing_inputs(config_of(SMALL))) == 1


def test_paths_become_absolute_but_generated_tasks_stay(tmp_path: Path) -> None:
    config = config_of(SMALL, data__eval="reasoning_gym:basic_arithmetic")
    resolved = preflight.resolve_inputs(config)
    assert resolved.model.path == str(tmp_path / "model")
    assert resolved.data.train == str(tmp_path / "train.jsonl")
    assert resolved.data.eval == "reasoning_gym:basic_arithmetic"
    assert resolved.run.folder == str(tmp_path / "runs")
    assert preflight.resolve_inputs(resolved) == resolved


def test_init_from_takes_the_exported_weights(tmp_path: Path) -> None:
    weights = tmp_path / "runs" / "a-1" / "checkpoints" / "step_20" / "hf"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text(json.dumps({}))
    resolved = preflight.resolve_inputs(config_of(SMALL, run__init_from="runs/a-1@20"))
    assert resolved.model.path == str(weights)
    with pytest.raises(ConfigError, match="exported weights exist for step 20"):
        preflight.resolve_inputs(config_of(SMALL, run__init_from="runs/a-1@40"))


def test_a_local_run_needs_no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    from relax_hpc.launcher.plan import build_plan
    from relax_hpc.launcher.site import Site

    monkeypatch.setenv("PATH", "/nowhere")
    config = config_of(SMALL)
    preflight.check_slurm(config, build_plan(config, Site(name="test")))
