import shlex
import subprocess
from pathlib import Path

import pytest

from relax_hpc.config import Config, LauncherKind, load_recipe
from relax_hpc.errors import ConfigError
from relax_hpc.launcher.plan import build_plan
from relax_hpc.launcher.render import render_script
from relax_hpc.launcher.site import GpuOption, Site, load_site
from tests.launcher_samples import HEADLINE, ROOT, SMALL, config_of, single_headline

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
SITE = Site(name="test")


def render(config: Config, site: Site = SITE, arguments: tuple[str, ...] = ("r.toml",)) -> str:
    return render_script(config, build_plan(config, site), site, list(arguments), "r")


def blocks_of(script: str) -> list[list[str]]:
    """#SBATCH options by het component; they must all come before the first command."""
    lines = script.splitlines()
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    options = [line.removeprefix("#SBATCH ") for line in lines[:first] if "#SBATCH" in line]
    blocks: list[list[str]] = [[]]
    for option in options:
        if option == "hetjob":
            blocks.append([])
        else:
            blocks[-1].append(option)
    return blocks


def test_het_job_has_one_block_per_component() -> None:
    config = config_of(HEADLINE, resources__dcs={"partition": "cpu"}, resources__account="proj")
    dcs, train, rollout = blocks_of(render(config))
    assert "--partition=cpu" in dcs
    assert not any(option.startswith("--gres") for option in dcs)
    for option in (
        "--job-name=headline",
        "--open-mode=append",
        "--signal=B:USR2@120",
        "--requeue",
        "--time=60",
        "--account=proj",
    ):
        assert option in dcs
    assert "--partition=train" in train
    assert "--gres=gpu:8" in train
    assert rollout[:2] == ["--partition=rollout", "--nodes=1"]


def test_one_partition_has_one_block() -> None:
    (block,) = blocks_of(render(single_headline()))
    assert "--nodes=2" in block
    assert "--partition=all" in block


def test_site_decides_gpus_requeue_and_setup() -> None:
    site = Site(
        name="test",
        gres="gpu:h800",
        gpu_option=GpuOption.GPUS_PER_NODE,
        requeue=False,
        signal_lead_s=300,
        directives=("--exclusive",),
        setup=("module load cuda",),
    )
    script = render(config_of(HEADLINE), site)
    train, rollout = blocks_of(script)
    assert "--gpus-per-node=h800:8" in train
    assert "--no-requeue" in train
    assert "--signal=B:USR2@300" in train
    assert "--exclusive" in train
    assert "--exclusive" in rollout
    assert script.index("module load cuda") < script.index("exec ")


def test_script_passes_on_what_follows_its_name_and_is_replaced(tmp_path: Path) -> None:
    """Run the script with a python that shows its arguments, from a folder with a blank."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    fake = folder / "fake python"
    fake.write_text('#!/bin/bash\nprintf "%s\\n" "$PWD" "$@"\nexit 7\n')
    fake.chmod(0o755)
    script = tmp_path / "script.sh"
    script.write_text(render(config_of(HEADLINE), arguments=("it's.toml",)))
    (folder / "it's.toml").touch()
    done = subprocess.run(
        ["bash", str(script), "--set", "a.b=c d"],
        env={"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(folder), "RELAX_PYTHON": str(fake)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7
    assert done.stdout.splitlines() == [
        str(folder),
        *("-m", "relax_hpc.cli", "supervise", "it's.toml", "--set", "a.b=c d"),
    ]


def test_script_in_another_folder_is_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(render(config_of(HEADLINE), arguments=("recipes/it's $HOME.toml",)))
    environment = {"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, check=False
    )
    said = f"no recipes/it's $HOME.toml in {tmp_path}: run sbatch in the project's folder\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_a_script_of_no_recipe_file_checks_nothing() -> None:
    for arguments in (("tiny_dapo",), ("--config", "/x/y.json"), ("--resume", "/runs/a.toml")):
        assert "run sbatch in" not in render(config_of(HEADLINE), arguments=arguments)


def test_local_recipe_has_no_script() -> None:
    with pytest.raises(ConfigError, match="relax-hpc submit"):
        render(config_of(SMALL))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_plans_and_its_script_is_rendered_from_it(path: Path) -> None:
    config = load_recipe(path)
    site = load_site(config.resources.site)
    plan = build_plan(config, site)
    assert plan.steps[0].role == "dcs"
    if config.resources.launcher is LauncherKind.LOCAL:
        return
    name = f"recipes/{path.stem}"
    wanted = render_script(config, plan, site, [f"{name}.toml"], name)
    script = path.with_suffix(".sh")
    assert script.read_text() == wanted, f"run: relax-hpc render {name}.toml > {name}.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert f"supervise {shlex.quote(name + '.toml')}" in wanted


def test_every_script_has_a_recipe() -> None:
    assert {p.stem for p in (ROOT / "recipes").glob("*.sh")} <= {p.stem for p in RECIPES}
