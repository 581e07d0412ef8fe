import re
import typing
from pathlib import Path

import pytest

from relax_hpc import config as config_module
from relax_hpc.config import (
    Layout,
    Mode,
    Sampler,
    StalePolicy,
    config_from_json,
    config_to_json,
    load_recipe,
)
from relax_hpc.errors import ConfigError
from relax_hpc.ranges import RANGES
from relax_hpc.transfer.queue_rules import QueueRulesConfig

RECIPE = """
[run]
name = "unit"
train_steps = 3
[model]
path = "models/tiny"
[data]
train = "train.jsonl"
[rollout]
groups_per_step = 8
group_size = 4
max_response_tokens = 32
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "unit.toml"
    path.write_text(RECIPE)
    return path


def test_defaults_and_round_trip(recipe: Path) -> None:
    config = load_recipe(recipe)
    assert config.run.mode is Mode.ASYNC
    assert config.resources.layout is Layout.HET
    assert config.dp == 1
    assert config_from_json(config_to_json(config)) == config


def test_overrides_keep_types(recipe: Path) -> None:
    config = load_recipe(
        recipe, ["train.lr=3e-4", "run.mode=async_on_policy", "rollout.max_staleness=0"]
    )
    assert config.train.lr == 3e-4
    assert config.run.mode is Mode.ASYNC_ON_POLICY


@pytest.mark.parametrize("text", ["inf", "nan", "7", "1e3", "true", "2024-01-01", '"7"'])
def test_a_text_key_takes_any_word(recipe: Path, text: str) -> None:
    assert load_recipe(recipe, [f"run.name={text}"]).run.name == text.strip('"')


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.group_sise=4", "unknown key; valid here"),
        ("nosuch.key=1", "nosuch: unknown key"),
        ("run=3", "write section.key=value"),
        ("run.name.x=3", "is a value, not a section"),
        ("run.train_steps=0", "run.train_steps=0: must be >= 1"),
        ("run.train_steps=many", "Expected `int`"),
        ("run.mode=sideways", "Invalid enum value"),
        ("rollout.group_size=1", "use 2 or more"),
        ("algorithm.overlong_buffer_tokens=32", "must be smaller than rollout.max_response_tokens"),
        ("rollout.max_staleness=0", "mode async needs 1 or more"),
        ("run.mode=async_on_policy", "trains on fresh samples only"),
        ("train.tp=2", "must be a multiple of TP x PP"),
        ("rollout.num_engines=2", "must be rollout.num_engines x engine_tp"),
        ("train.chunks_per_step=3", "must divide rollout.groups_per_step"),
        ("algorithm.kl_coef=0.1", "needs a reference"),
        ("rollout.top_p=0.7", "biases the probability ratio"),
        ("rollout.temperature=0", "greedy samples teach nothing"),
        ("train.sequence_parallel=true", "needs train.tp > 1"),
        ("run.init_from=runs/a", "write RUN_FOLDER@STEP"),
        ("run.name='a b'", "use 1 to 100 letters"),
        ("run.name=..", "the first of them a letter"),
        ("run.name=-x", "the first of them a letter"),
        ("run.seed=-1", "must be in 0 .. "),
        ("run.train_steps=2000000000", "must be >= 1"),
        ("train.lr=inf", "must be > 0 and < 1"),
        ("train.lr=nan", "must be > 0 and < 1"),
        ("train.min_lr=nan", "must be in -1 .. 1"),
        ("train.min_lr=1e-3", "must be -1 (constant) or in 0 .. lr"),
        ("train.adam_beta1=2", "must be in 0 .. 0.999999"),
        ("train.clip_grad=-1", "must be >= 0"),
        ("train.lr_warmup_steps=-1", "must be >= 0"),
        ("rollout.eval_temperature=-1", "must be >= 0"),
        ("rollout.eval_top_p=7", "must be in 0 .. 1"),
        ("algorithm.clip_high=inf", "must be > 0"),
        ("recovery.heartbeat_timeout_s=inf", "must be > 0"),
        ("recovery.max_role_restarts=-1", "must be >= 0"),
        ("transfer.extent_mb=0", "must be >= 1"),
        ("transfer.extent_mb=8192", "larger than arena_mb=4096"),
        ("transfer.streams=65", "must be in 1 .. 64"),
        ("transfer.put_timeout_s=nan", "must be > 0"),
        ("transfer.rdma=maybe", "Invalid enum value"),
        ("train.sampler=random", "Invalid enum value"),
        ("rollout.stale_policy=keep", "Invalid enum value"),
        ("model.dtype=float8", "valid are float32, bfloat16"),
    ],
)
def test_impossible_values_say_what_is_valid(recipe: Path, override: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)) as error:
        load_recipe(recipe, [override])
    assert error.value.exit_code == 2


def test_the_queue_gets_its_part_of_the_recipe(recipe: Path) -> None:
    choices = ["train.sampler=fifo", "rollout.stale_policy=drop", "train.chunks_per_step=2"]
    rules = QueueRulesConfig.from_config(load_recipe(recipe, choices))
    assert (rules.sampler, rules.stale_policy) == (Sampler.FIFO, StalePolicy.DROP)
    assert (rules.groups_per_step, rules.group_size, rules.chunks_per_step) == (8, 4, 2)


def test_every_number_has_a_range() -> None:
    """A new number in a section without a line in the table would accept anything."""
    numbers = {int, float}
    for section, hint in typing.get_type_hints(config_module.Config).items():
        hints = typing.get_type_hints(hint)
        names = {name for name, kind in hints.items() if kind in numbers}
        assert names == set(RANGES.get(section, {})), section
    roles = typing.get_type_hints(config_module.RoleResources)
    assert {n for n, kind in roles.items() if kind in numbers} == set(RANGES["resources.*"])


@pytest.mark.parametrize("text", ["", "[run", "\x00", "run = 3", "[run]\nname = 'x'\n"])
def test_garbage_recipes_are_config_errors(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.toml|run"):
        load_recipe(path)


def test_missing_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_recipe(tmp_path / "none.toml")


def test_gpu_count_of_a_single_allocation(recipe: Path) -> None:
    single = [
        "resources.layout=single",
        "resources.gpus_per_node=8",
        "resources.nodes=2",
        "resources.train.ranks=4",
        "resources.rollout.ranks=12",
        "rollout.num_engines=12",
        "train.chunks_per_step=2",
    ]
    assert load_recipe(recipe, single).dp == 4
    with pytest.raises(ConfigError, match="17 ranks"):
        load_recipe(recipe, [*single, "resources.rollout.ranks=13", "rollout.num_engines=13"])
