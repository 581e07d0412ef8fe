import json
from pathlib import Path

import pytest

from relax_hpc.errors import ConfigError
from relax_hpc.launcher import preflight
from tests.launcher_samples import MODEL, SMALL, config_of, safetensors_bytes, write_inputs


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
        ("model/tokenizer.json", "has no tokenizer"),
    ],
)
def test_each_missing_file_is_named(gone: str, says: str) -> None:
    Path(gone).unlink()
    with pytest.raises(ConfigError, match=says):
        preflight.check_inputs(config_of(SMALL))
    assert len(preflight.missing_inputs(config_of(SMALL))) == 1


INDEX = {"weight_map": {"w": "model.safetensors", "v": "model-2.safetensors"}}


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", b"{nope", "config.json is not JSON"),
        ("config.json", b"\xff\xfe", "config.json is not JSON"),
        ("config.json", b"[1]", "must hold a JSON object, is list"),
        ("config.json", b"{}", "model_type=None; supported: qwen3"),
        ("config.json", json.dumps({**MODEL, "model_type": "mamba"}).encode(), "'mamba'"),
        ("config.json", b'{"model_type": "qwen3"}', "has no 'num_attention_heads'"),
        ("config.json", json.dumps({**MODEL, "vocab_size": "x"}).encode(), "is damaged"),
        ("config.json", json.dumps({**MODEL, "num_attention_heads": 0}).encode(), "is damaged"),
        ("config.json", json.dumps({**MODEL, "rope_scaling": 3}).encode(), "is damaged"),
        ("model.safetensors", b"", r"\(0 bytes\) is no safetensors file"),
        ("model.safetensors", b"not a safetensors file at all", "is no safetensors file"),
        ("model.safetensors", b"\x02\0\0\0\0\0\0\0[]", "header of model.safetensors is damaged"),
        ("model.safetensors", b"\x02\0\0\0\0\0\0\0{x", "header of model.safetensors is damaged"),
        ("model.safetensors", safetensors_bytes(bytes(7)), "copied in part"),
        ("model-2.safetensors", safetensors_bytes(bytes(99)), "model-2.safetensors has"),
        ("model.safetensors.index.json", json.dumps(INDEX).encode(), "not there: model-2.safe"),
        ("model.safetensors.index.json", b"{}", "has no weight_map"),
        ("tokenizer.json", b"{nope", "tokenizer.json is not JSON"),
    ],
)  # fmt: skip
def test_a_damaged_model_folder_is_refused(file: str, content: bytes, says: str) -> None:
    (Path("model") / file).write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        preflight.check_inputs(config_of(SMALL))


def test_a_model_file_that_cannot_be_read() -> None:
    Path("model/config.json").unlink()
    Path("model/config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        preflight.check_inputs(config_of(SMALL))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("foo", "valid are math, dapo, exact, reasoning_gym, or package.module.function"),
        ("a b.c", "valid are"),
        ("no_such_package.f", "no package or module 'no_such_package'"),
        ("reasoning_gym", "must be reasoning_gym:TASK"),
    ],
)
def test_an_unknown_reward_is_refused(kind: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        preflight.check_inputs(config_of(SMALL, reward__kind=kind))


def test_a_reward_function_of_ones_own_is_not_run() -> None:
    Path("mine.py").write_text("raise SystemExit('imported')\n")
    preflight.check_inputs(config_of(SMALL, reward__kind="mine.score"))
    preflight.check_inputs(config_of(SMALL, reward__kind="json.loads"))
    for kind in ("math", "dapo", "exact"):
        preflight.check_inputs(config_of(SMALL, reward__kind=kind))


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


def test_a_folder_to_replay_is_looked_at_before_the_queue(tmp_path: Path) -> None:
    """A relative one is that of the submission, also when the run is resumed from elsewhere."""
    changes = {"rollout__replay": "old/trajectories", "transfer__spill_folder": "disk"}
    config = preflight.resolve_inputs(config_of(SMALL, **changes))
    assert config.rollout.replay == str(tmp_path / "old" / "trajectories")
    assert config.transfer.spill_folder == str(tmp_path / "disk")
    with pytest.raises(ConfigError, match="holds no archived groups"):
        preflight.check_inputs(config)
    (tmp_path / "old" / "trajectories" / "step_000000").mkdir(parents=True)
    preflight.check_inputs(config)
