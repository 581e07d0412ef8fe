import copy
import dataclasses
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.errors import ConfigError
from relax_hpc.launcher.allocation import Allocation, Group
from relax_hpc.launcher.container import Container
from relax_hpc.launcher.plan import build_plan
from relax_hpc.launcher.render import render_script
from relax_hpc.launcher.site import Site, find_recipe, load_site
from relax_hpc.launcher.slurm_steps import srun_command
from relax_hpc.launcher.steps import StepLaunch
from relax_hpc.runfolder import RunFolder
from tests.launcher_samples import HEADLINE, ROOT, config_of


@pytest.mark.parametrize("path", sorted((ROOT / "sbatch").glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_profiles_load(path: Path) -> None:
    assert load_site(path.stem).name == path.stem


def test_unknown_profile_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"no sbatch/moon.toml; known: .*local"):
        load_site("moon")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gress = 1", "gress: unknown key; valid here: account, address_prefix"),
        ("gres = 1", "Expected `str`"),
        ("signal_lead_s = 70000", "must be in 1..65535"),
        ('directives = ["exclusive"]', "is no option"),
        ("gres = ", "cannot be read as TOML"),
    ],
)
def test_bad_profiles_name_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    (tmp_path / "sbatch").mkdir()
    (tmp_path / "sbatch" / "mine.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says) as caught:
        load_site("mine")
    assert "mine.toml" in str(caught.value)


def test_a_bare_recipe_name_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "own.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert find_recipe("own") == Path("recipes/own.toml")
    assert find_recipe("other.toml") == Path("other.toml")


# --- rendered text -------------------------------------------------------------------------------

EXAMPLES = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "sites.md").read_text(), re.DOTALL)


def site_of(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    (folder / "sbatch").mkdir()
    (folder / "sbatch" / "mine.toml").write_text(text)
    monkeypatch.chdir(folder)
    return load_site("mine")


def rendered(site: Site, **changes: Any) -> str:
    tree = copy.deepcopy(HEADLINE)
    for role in ("train", "rollout"):
        del tree["resources"][role]["partition"]
    config = config_of(tree, **changes)
    return render_script(config, build_plan(config, site), site, ["tiny"], "r")


def srun_of(site: Site, role: str) -> list[str]:
    config = config_of(HEADLINE)
    plan = build_plan(config, site)
    step = next(step for step in plan.steps if step.role == role)
    groups = tuple(
        Group(job_id=str(40 + n), partition=c.partition, nodes=(f"n{n}",), cpus_per_node=64)
        for n, c in enumerate(plan.components)
    )
    allocation = Allocation(job_id="40", is_het=True, groups=groups)
    launch = StepLaunch(
        plan=step, nodes=allocation.node_names(step), run=RunFolder(Path("/runs/a-40")), attempt=1,
        incarnation=1, address_prefix="", extra_environment={}, program=("/v/python", "-m", "x"),
    )  # fmt: skip
    return srun_command(launch, plan, site, allocation, [Path("/home/me"), Path("/runs/a-40")])


def test_modules_and_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = rendered(site_of(EXAMPLES[0], tmp_path, monkeypatch))
    assert "#SBATCH --account=proj42\n" in script
    assert script.count("#SBATCH --partition=gpu\n") == 2
    assert script.count("#SBATCH --gres=gpu:a100:8\n") == 2
    assert (
        "command -v module > /dev/null || . /etc/profile\n"
        "module load gcc/12.3 cuda/12.8 nccl/2.27 || exit 2\n"
        'PYTHON="${RELAX_PYTHON:-/project/proj42/relax/.venv/bin/python}"\n'
    ) in script


def test_pyxis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = site_of(EXAMPLES[1], tmp_path, monkeypatch)
    script = rendered(site)
    partitions = re.findall(r"^#SBATCH --partition=(\S+)$", script, re.MULTILINE)
    assert partitions == ["cpu", "h800", "h800"]
    leader, train, rollout = script.split("#SBATCH hetjob\n")
    assert "--gres" not in leader and "--gres=gpu:h800:8" in train and "--exclusive" in rollout
    command = srun_of(site, "train")
    assert "--container-image=/shared/images/relax.sqsh" in command
    mounts = next(word for word in command if word.startswith("--container-mounts="))
    assert mounts == (
        "--container-mounts=/scratch:/scratch,/etc/libibverbs.d:/etc/libibverbs.d:ro,"
        "/dev/shm:/dev/shm,/home/me:/home/me,/runs/a-40:/runs/a-40"
    )
    assert "--container-workdir=/home/me" in command
    assert command[-3:] == ["python3", "-m", "x"]
    dcs = srun_of(site, "dcs")  # a section per component, each in the container
    assert dcs.count("--container-image=/shared/images/relax.sqsh") == dcs.count(":") + 1 == 3


def test_apptainer_and_no_requeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = site_of(EXAMPLES[2], tmp_path, monkeypatch)
    script = rendered(site)
    assert "#SBATCH --no-requeue\n" in script
    assert script.count("#SBATCH --gpus-per-node=8\n") == 2
    command = srun_of(site, "rollout")
    start = command.index("apptainer")
    assert command[start : start + 3] == ["apptainer", "exec", "--nv"]
    assert command[-4:] == ["/shared/images/relax.sif", "python3.11", "-m", "x"]
    assert not any(word.startswith("--container") for word in command)


def test_what_the_recipe_says_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = site_of(EXAMPLES[1], tmp_path, monkeypatch)
    script = rendered(
        site, resources__account="mine", resources__qos="high", resources__partition="own"
    )
    assert "--account=mine" in script and "--account=llm" not in script
    assert "--qos=high" in script
    assert re.findall(r"--partition=(\S+)", script) == ["cpu", "own", "own"]


def test_modules_with_signs_are_quoted(tmp_path: Path) -> None:
    """The script is run with a `module` that shows what it was asked for, and one that fails."""
    site = Site(name="x", modules=("a b", "c'd"), python='odd "$HOME"/python', setup=("echo set",))
    script = tmp_path / "s.sh"
    script.write_text(rendered(site))
    fake = tmp_path / "python3"
    fake.write_text('#!/bin/bash\necho "python3 $*"\n')
    fake.chmod(0o755)
    for body, code, lines in (
        ('printf "%s|" "$@"; echo', 0, ["load|a b|c'd|", "set"]),
        ("return 1", 2, []),
    ):
        done = subprocess.run(
            ["bash", "-c", f"module() {{ {body}; }}; export -f module; bash {script}"],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/h"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert done.stdout.splitlines()[: len(lines)] == lines


def test_the_page_names_every_key() -> None:
    text = (ROOT / "docs" / "sites.md").read_text()
    for field in dataclasses.fields(Site):
        assert field.name == "name" or f"`{field.name}`" in text, field.name
    for field in dataclasses.fields(Container):
        assert f"`{field.name}`" in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[partitions]\ntrane = 'x'", "partitions.trane: no role; valid: dcs, train"),
        ("account = 'a b'", "has a blank"),
        ("python = ''", "name an interpreter"),
        ("[container]\nkind = 'pyxis'", "missing required field `image`"),
        ("[container]\nkind = 'pyxis'\nimage = ''", "container.image=''"),
        ("[container]\nkind = 'pyxis'\nimage = 'x'\nmount = []", "container.mount: unknown key"),
        ("container = 'x'", "container"),
    ],
)
def test_impossible_profiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        site_of(text, tmp_path, monkeypatch)
