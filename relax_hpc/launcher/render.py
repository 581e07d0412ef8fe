"""The sbatch script of a run: `#SBATCH` blocks from the plan, then one `exec` of the supervisor.

All logic is in the supervisor; the script only finds it. Slurm runs a copy from its spool folder,
so nothing is found relative to the script; SLURM_SUBMIT_DIR is where sbatch was called.
"""

import shlex

from relax_hpc.config import Config, LauncherKind
from relax_hpc.errors import ConfigError
from relax_hpc.launcher.plan import Component, Plan
from relax_hpc.launcher.site import Site
from relax_hpc.launcher.slurm_steps import gpu_request

_BODY = """\
cd "${{SLURM_SUBMIT_DIR:-.}}" || exit 2
{check}{setup}PYTHON="${{RELAX_PYTHON:-{python}}}"
command -v "$PYTHON" > /dev/null || PYTHON=python3
exec "$PYTHON" -m relax_hpc.cli supervise {arguments} "$@"
"""


def render_script(config: Config, plan: Plan, site: Site, arguments: list[str], name: str) -> str:
    """Render the batch script.

    Args:
        config: the run.
        plan: its components, in het group order.
        site: the cluster's habits.
        arguments: of `relax-hpc supervise`: a recipe, or `--config FILE`, or `--resume RUN`.
        name: what the first lines call the script, e.g. `recipes/tiny_dapo`.

    Raises:
        ConfigError: the recipe runs without Slurm.
    """
    if config.resources.launcher is LauncherKind.LOCAL:
        raise ConfigError(
            "resources.launcher=local: there is no sbatch script; start the run with "
            "`relax-hpc submit RECIPE`"
        )
    blocks = [
        _block(number, component, config, site) for number, component in enumerate(plan.components)
    ]
    setup = "".join(f"{line}\n" for line in _setup(site))
    head = [
        "#!/bin/bash",
        f"# Rendered from {name}.toml by `relax-hpc render`; what follows the script's name goes",
        f"# to the supervisor: sbatch {name}.sh --set train.lr=2e-6",
        *_common(config, site),
    ]
    body = _BODY.format(
        check=_place_check(arguments),
        setup=setup,
        python=_in_quotes(site.python),
        arguments=shlex.join(arguments),
    )
    return "\n".join(head) + "\n" + "#SBATCH hetjob\n".join(blocks) + "\n" + body


def _setup(site: Site) -> list[str]:
    """Return the shell lines before the supervisor."""
    if not site.modules:
        return list(site.setup)
    # `module` is a function of login shells; sbatch's shell is none.
    define = "command -v module > /dev/null || . /etc/profile"
    return [define, f"module load {shlex.join(site.modules)} || exit 2", *site.setup]


def _in_quotes(text: str) -> str:
    """Return text as it stands in double quotes of a shell; `$HOME` and the like stay variables."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`")


def _place_check(arguments: list[str]) -> str:
    """Return the lines that refuse a wrong folder: there neither recipe nor package is found."""
    recipe = arguments[0]
    if not recipe.endswith(".toml"):  # the bare name of a shipped recipe, or --config, --resume
        return ""
    file = shlex.quote(recipe)
    return (
        f"if [ ! -e {file} ]; then\n"
        f'    echo "no "{file}" in $PWD: run sbatch in the project\'s folder" >&2\n'
        "    exit 2\n"
        "fi\n"
    )


def _common(config: Config, site: Site) -> list[str]:
    """Options of the first block that hold for all components (sbatch(1), heterogeneous jobs)."""
    resources = config.resources
    num_runs = len(config.sweep.runs)
    options = [
        f"--job-name={config.run.name}",
        *([f"--array=0-{num_runs - 1}"] if num_runs else []),
        "--output=%x-%A_%a.out" if num_runs else "--output=%x-%j.out",
        "--open-mode=append",  # a requeued job goes on in the same file
        f"--signal=B:USR2@{site.signal_lead_s}",
        "--requeue" if site.requeue else "--no-requeue",
        f"--time={resources.time_min}",
    ]
    if account := resources.account or site.account:
        options.append(f"--account={account}")
    if qos := resources.qos or site.qos:
        options.append(f"--qos={qos}")
    return [f"#SBATCH {option}" for option in options]


def _block(number: int, component: Component, config: Config, site: Site) -> str:
    host = "; the supervisor runs on its first node" if number == 0 else ""
    options = [
        f"--nodes={component.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={component.cpus_per_node}",
    ]
    if component.partition:
        options.insert(0, f"--partition={component.partition}")
    if component.gpus_per_node:
        options.append(gpu_request(site, component.gpus_per_node))
    if config.resources.mem_per_node_gb:
        options.append(f"--mem={config.resources.mem_per_node_gb}G")
    options += site.directives
    lines = [f"# {', '.join(component.roles)}{host}", *(f"#SBATCH {option}" for option in options)]
    return "\n".join(lines) + "\n"
