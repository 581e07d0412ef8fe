"""Sweeps: one recipe, a run per entry."""

from pathlib import Path
from typing import Any

import pytest

from relax_hpc.config import (
    Config,
    config_from_json,
    config_from_tree,
    config_of_task,
    config_to_json,
    load_recipe,
)
from relax_hpc.errors import ConfigError
from relax_hpc.launcher.plan import build_plan
from relax_hpc.launcher.session import choose_task
from relax_hpc.launcher.site import Site
from tests.launcher_samples import ROOT, SMALL, config_of

ENTRIES = [
    {"train": {"lr": 1e-4}, "run": {"seed": 7}},
    {"train": {"lr": 2e-4}},
    {"algorithm": {"name": "grpo"}, "rollout": {"sglang_args": {"a": 1}}},
]


def sweep_of(entries: list[dict[str, Any]] = ENTRIES, **changes: Any) -> Config:
    return config_of({**SMALL, "sweep": {"runs": entries}}, run__seed=40, **changes)


def test_each_task_has_its_keys_and_its_seed() -> None:
    config = sweep_of()
    runs = [config_of_task(config, task) for task in range(3)]
    assert [run.train.lr for run in runs] == [1e-4, 2e-4, config.train.lr]
    assert [run.run.seed for run in runs] == [7, 41, 42]
    assert runs[2].algorithm.name == "grpo" and runs[2].rollout.sglang_args == {"a": 1}
    assert all(run.sweep.runs == () for run in runs)
    assert runs[1].rollout == config.rollout


def test_an_array_of_a_recipe_without_a_sweep_differs_in_seeds_only() -> None:
    config = config_of(SMALL)
    assert config_of_task(config, 0) == config
    assert config_of_task(config, 5).run.seed == config.run.seed + 5


def test_the_sweep_survives_the_way_to_the_job() -> None:
    config = sweep_of()
    assert config_from_json(config_to_json(config)) == config


def test_what_the_command_line_says_holds_for_all_tasks(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        '[run]\nname = "x"\ntrain_steps = 1\n[model]\npath = "m"\n[data]\ntrain = "d.jsonl"\n'
        "[rollout]\ngroups_per_step = 4\ngroup_size = 2\nmax_response_tokens = 8\n"
        '[resources]\nlayout = "single"\n'
        "[sweep]\nruns = [{ train.lr = 1e-4, run.seed = 3 }, { train.lr = 2e-4 }]\n"
    )
    config = load_recipe(recipe, ["train.lr=5e-5", "run.seed=100"])
    runs = [config_of_task(config, task) for task in range(2)]
    assert [(run.train.lr, run.run.seed) for run in runs] == [(5e-5, 100), (5e-5, 101)]
    kept = load_recipe(recipe, ["train.tp=1"])
    assert [config_of_task(kept, task).train.lr for task in range(2)] == [1e-4, 2e-4]


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (
            {"train": {"lrr": 1}},
            r"sweep\.runs\[1\]\.train\.lrr: unknown key; .*adam_eps",
        ),
        ({"trian": {"lr": 1}}, r"sweep\.runs\[1\]\.trian: unknown key"),
        ({"train": {"lr": "x"}}, r"sweep\.runs\[1\]: "),
        ({"train": {"lr": -1.0}}, r"sweep\.runs\[1\]: train\.lr"),
        ({"train": 3}, r"sweep\.runs\[1\]\.train\.: must be a table"),
        (
            {"resources": {"nodes": 2}},
            r"sweep\.runs\[1\]\.resources\.nodes: .* a recipe of its own",
        ),
        ({"run": {"name": "y"}}, r"sweep\.runs\[1\]\.run\.name"),
        ({"sweep": {"runs": []}}, r"sweep\.runs\[1\]\.sweep\.runs"),
    ],
)
def test_a_bad_entry_is_named(entry: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        sweep_of([ENTRIES[0], entry])


@pytest.mark.parametrize("sweep", [3, [1], {"runs": 3}, {"runs": [1]}, {"runs": {"a": 1}}])
def test_what_is_no_sweep(sweep: Any) -> None:
    with pytest.raises(ConfigError, match="sweep"):
        config_from_tree({**SMALL, "sweep": sweep}, "test")


def test_a_het_job_cannot_be_an_array() -> None:
    with pytest.raises(ConfigError, match="no arrays of heterogeneous jobs"):
        sweep_of(resources__launcher="slurm")


def test_choosing_a_task() -> None:
    config = sweep_of()
    chosen, overrides = choose_task(config, 0)
    assert overrides == {"train.lr": 1e-4, "run.seed": 7}
    assert chosen.train.lr == 1e-4
    assert choose_task(config_of(SMALL), None) == (config_of(SMALL), {})
    with pytest.raises(ConfigError, match="tasks 0 to 2; there is none for task 3"):
        choose_task(config, 3)
    with pytest.raises(ConfigError, match=r"sbatch recipes/NAME\.sh"):
        choose_task(config, None)


def test_every_entry_of_the_recipe_fits_its_allocation() -> None:
    config = load_recipe(ROOT / "recipes" / "sweep.toml")
    site = Site(name="x")
    for task in range(len(config.sweep.runs)):
        run = config_of_task(config, task)
        assert build_plan(run, site).components == build_plan(config, site).components
    assert len({repr(config_of_task(config, task)) for task in range(8)}) == 8
