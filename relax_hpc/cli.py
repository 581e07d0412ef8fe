"""`relax-hpc`: validate, plan, render, submit, supervise, status, logs, cancel, doctor, preflight,
postmortem.

Exit codes: 0 fine, 1 the thing failed, 2 wrong use or bad input (nothing was started), 75 try again
or requeued; postmortem has its own. Modules are imported where they are used: `relax-hpc --help` on
a login node is quick.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from relax_hpc import __version__
from relax_hpc.errors import ConfigError, RelaxError
from relax_hpc.postmortem import command as postmortem

_INTERRUPTED = 130
"""Exit code of shells after SIGINT."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        code = command(args)
        sys.stdout.flush()  # here, not at exit: a reader that left is handled below
        return code
    except RelaxError as err:
        sys.stderr.write(f"relax-hpc {args.name}: {err}\n")
        return err.exit_code
    except BrokenPipeError:  # `relax-hpc logs RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as err:
        sys.stderr.write(f"relax-hpc {args.name}: {err}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"relax-hpc {args.name}: interrupted\n")
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="relax-hpc", description="RL post-training of large models on Slurm."
    )
    parser.add_argument("--version", action="version", version=f"relax-hpc {__version__}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    _add_recipe_commands(commands)
    _add_submit(commands)
    _add_supervise(commands)
    _add_run_commands(commands)
    _add_health_commands(commands)
    postmortem.add_arguments(_add(commands, "postmortem", _postmortem, postmortem.TEXT))
    return parser


Commands = Any  # argparse's sub-parser action has no public type


def _add(
    commands: Commands, name: str, command: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=command)
    return parser


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="A.B=C",
        help="override a key of the recipe; may be repeated",
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_recipe_commands(commands: Commands) -> None:
    for name, command, text in (
        ("validate", _validate, "check a recipe and its plan"),
        ("plan", _plan, "show components and steps"),
        ("render", _render, "print the sbatch script of a recipe"),
    ):
        parser = _add(commands, name, command, text)
        parser.add_argument("recipe", help="recipes/NAME.toml, or NAME of a shipped recipe")
        _add_set(parser)
        if name == "validate":
            parser.add_argument(
                "--inputs", action="store_true", help="a missing model or data set is an error"
            )
        if name == "plan":
            parser.add_argument(
                "--weights", action="store_true", help="show what a weight sync moves instead"
            )
        if name != "render":
            _add_json(parser)


def _add_submit(commands: Commands) -> None:
    parser = _add(commands, "submit", _submit, "submit a run (launcher = local: start it here)")
    parser.add_argument("recipe", nargs="?", default="", help="recipes/NAME.toml")
    _add_set(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the script, submit nothing")
    parser.add_argument("--resume", default="", metavar="RUN", help="go on with a run")
    parser.add_argument(
        "--steps", type=int, default=0, metavar="N", help="train steps in all (with --resume)"
    )
    parser.add_argument("--wait", action="store_true", help="until the run has ended")
    parser.add_argument("--step-program", default="", help=argparse.SUPPRESS)
    _add_json(parser)


def _add_supervise(commands: Commands) -> None:
    parser = _add(
        commands, "supervise", _supervise, "run the steps (what the sbatch script starts)"
    )
    parser.add_argument("recipe", nargs="?", default="")
    _add_set(parser)
    parser.add_argument("--config", default="", metavar="FILE", help="resolved configuration")
    parser.add_argument("--resume", default="", metavar="RUN", help="go on with a run")
    parser.add_argument("--steps", type=int, default=0, metavar="N")
    parser.add_argument("--step-program", default="", help=argparse.SUPPRESS)


def _at_least_1(text: str) -> int:
    """Read a number for argparse, which names the option."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number, 1 or more")
    return int(text)


def _add_run_commands(commands: Commands) -> None:
    run = "run folder, its name in runs/, or job id"
    parser = _add(commands, "status", _status, "show steps, nodes, progress and the curve of a run")
    parser.add_argument("run", help=run)
    _add_json(parser)
    parser = _add(commands, "logs", _logs, "print the end of a run's logs")
    parser.add_argument("run", help=run)
    parser.add_argument("role", nargs="?", default="", help="dcs, train, ref, logprob or rollout")
    parser.add_argument("--attempt", type=int, help="of the job; default: the newest")
    parser.add_argument("--lines", type=_at_least_1, default=20, help="of each file [20]")
    _add_json(parser)
    parser = _add(commands, "cancel", _cancel, "end a run")
    parser.add_argument("run", help=run)
    _add_json(parser)


def _add_health_commands(commands: Commands) -> None:
    text = "find what would make a run fail, and what dead runs left on this node"
    parser = _add(commands, "doctor", _doctor, text)
    parser.add_argument("recipe", nargs="?", default="", help="check this run, before it is queued")
    _add_set(parser)
    parser.add_argument(
        "--clean", action="store_true", help="remove what dead runs left, and nothing else"
    )
    parser.add_argument(
        "--folder", action="append", default=[], help="also look here (transfer.spill_folder)"
    )
    parser.add_argument(
        "--min-age", type=_at_least_1, default=30, metavar="MIN",
        help="a run is dead when nothing changed for this long [30]; younger ones may restart",
    )  # fmt: skip
    _add_json(parser)
    text = "test the nodes of this job (or of a recipe, or a list) in under a minute"
    parser = _add(commands, "preflight", _preflight, text)
    parser.add_argument("recipe", nargs="?", default="", help="its partitions, folder and needs")
    _add_set(parser)
    parser.add_argument("--nodes", default="", metavar="LIST", help="these: 'n[01-04]'")
    parser.add_argument("--partition", default="", help="of --nodes")
    parser.add_argument("--site", default="local", help="site profile, without a recipe [local]")
    parser.add_argument(
        "--mpi", default="auto", choices=("auto", "pmi2", "pmix", "none"), help="of srun [auto]"
    )
    parser.add_argument(
        "--wait", type=_at_least_1, default=120, metavar="S", help="outside of a job: for nodes"
    )
    parser.add_argument("--step-program", default="", help=argparse.SUPPRESS)
    _add_json(parser)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


def _print_json(value: object) -> None:
    _print(json.dumps(value, indent=2))


# ---------------------------------------------------------------------------------------------
# Recipes
# ---------------------------------------------------------------------------------------------


def _load(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    from relax_hpc.config import load_recipe
    from relax_hpc.launcher.plan import build_plan
    from relax_hpc.launcher.site import find_recipe, load_site

    config = load_recipe(find_recipe(args.recipe), args.overrides)
    site = load_site(config.resources.site)
    return config, site, build_plan(config, site)


def _validate(args: argparse.Namespace) -> int:
    from relax_hpc.launcher import preflight

    config, _, plan = _load(args)
    if args.inputs:
        preflight.check_inputs(preflight.resolve_inputs(config))
    missing = preflight.missing_inputs(config)
    if args.json:
        _print_json({"valid": True, "name": config.run.name, "missing_inputs": missing})
        return 0
    _print(f"{config.run.name}: valid; {len(plan.steps)} steps")
    for fault in missing:
        _print(f"not here yet: {fault}")
    return 0


def _plan(args: argparse.Namespace) -> int:
    config, _, plan = _load(args)
    if args.weights:
        return _plan_weights(args, config, plan)
    if args.json:
        sys.stdout.write(plan.to_json())
        return 0
    for line in _plan_lines(plan):
        _print(line)
    return 0


def _plan_weights(args: argparse.Namespace, config: Any, plan: Any) -> int:
    from relax_hpc.dcs.weights_summary import summary_lines
    from relax_hpc.launcher.weight_plan import read_model_config, weights_summary

    found = weights_summary(config, read_model_config(config), plan)
    if args.json:
        _print_json(found)
        return 0
    for line in summary_lines(found):
        _print(line)
    return 0


def _join(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _plan_lines(plan: Any) -> list[str]:
    lines = []
    for number, component in enumerate(plan.components):
        lines.append(
            f"component {number}: {', '.join(component.roles)}  "
            f"partition {component.partition or '(default)'}  nodes {component.nodes}  "
            f"CPUs/node {component.cpus_per_node}  GPUs/node {component.gpus_per_node}"
        )
    for step in plan.steps:
        places = "; ".join(
            f"component {part.component} nodes {_join(part.nodes)} x {part.tasks_per_node}"
            for part in step.parts
        )
        gpus = f"  GPUs {';'.join(map(_join, step.gpus))}" if step.gpus else ""
        lines.append(f"step {step.name}: {step.num_tasks} tasks  {places}{gpus}")
    return lines


def _render(args: argparse.Namespace) -> int:
    from relax_hpc.launcher.render import render_script

    config, site, plan = _load(args)
    if args.overrides:
        arguments = [args.recipe, *(part for item in args.overrides for part in ("--set", item))]
    else:
        arguments = [args.recipe]
    name = str(Path(args.recipe).with_suffix(""))
    sys.stdout.write(render_script(config, plan, site, arguments, name))
    return 0


# ---------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------


def _submit(args: argparse.Namespace) -> int:
    from relax_hpc.config import load_recipe
    from relax_hpc.launcher import preflight
    from relax_hpc.launcher.executor import RelaxExecutor, prepare
    from relax_hpc.launcher.site import find_recipe

    if bool(args.recipe) == bool(args.resume):
        raise ConfigError("give a recipe or --resume RUN, one of both")
    if args.resume:
        if args.dry_run or args.overrides:
            raise ConfigError("--resume goes on with RUN/config.json: no --set, no --dry-run")
        from relax_hpc.report.read import find_run

        folder = find_run(args.resume)
        executor = RelaxExecutor(folder.path.parent, args.step_program)
        return _report_job(executor.resume(folder.path, args.steps), args)
    if args.steps:
        raise ConfigError("--steps belongs to --resume; a new run takes --set run.train_steps=N")
    config = load_recipe(find_recipe(args.recipe), args.overrides)
    if args.dry_run:
        resolved = preflight.resolve_inputs(config)
        return _report_dry_run(resolved, prepare(resolved))
    executor = RelaxExecutor(config.run.folder, args.step_program)
    return _report_job(executor.submit(config), args)


def _report_dry_run(config: Any, prepared: Any) -> int:
    """Print what would be submitted; on stderr what was not done, and why it would be refused."""
    from relax_hpc.launcher import preflight

    sys.stdout.write(prepared.script or "\n".join(_plan_lines(prepared.plan)) + "\n")
    if prepared.script:
        files = f"{prepared.config_file} and {prepared.script_file}"
        sys.stderr.write(f"relax-hpc submit: dry run: {files} were not written\n")
    faults = preflight.missing_inputs(config)
    unchecked = preflight.partition_faults(config, prepared.plan, faults)
    if unchecked:
        sys.stderr.write(f"relax-hpc submit: dry run: partitions were not checked ({unchecked})\n")
    for fault in faults:
        sys.stderr.write(f"relax-hpc submit: would be refused: {fault}\n")
    return ConfigError.exit_code if faults else 0


def _report_job(job: Any, args: argparse.Namespace) -> int:
    told = {"job_id": job.job_id, "run": str(job.run_folder.path), "log": str(job.paths.stdout)}
    if not args.wait:
        if args.json:
            _print_json(told)
        else:
            _print(f"submitted {job.job_id}\nrun {told['run']}\nlog {told['log']}")
        return 0
    from submitit.core.utils import UncompletedJobError  # FailedJobError is one too

    if not args.json:
        _print(f"submitted {job.job_id}\nrun {told['run']}\nlog {told['log']}")
    try:
        result = job.result()
    except UncompletedJobError:
        code, sentence = job.failure()
        sys.stderr.write(f"relax-hpc submit: {sentence}\n")
        return int(code)
    except KeyboardInterrupt:
        run = told["run"]
        goes_on = f"the run goes on: relax-hpc status {run}, relax-hpc cancel {run}"
        sys.stderr.write(f"relax-hpc submit: interrupted; {goes_on}\n")
        return _INTERRUPTED
    _print_json({**result, **told})
    return 0


def _supervise(args: argparse.Namespace) -> int:
    from relax_hpc.launcher.session import Request, open_session, supervise
    from relax_hpc.log import setup_logging

    if sum(map(bool, (args.recipe, args.config, args.resume))) != 1:
        raise ConfigError("give one of: a recipe, --config FILE, --resume RUN")
    request = Request(
        recipe=args.recipe,
        config_file=args.config,
        resume=args.resume,
        overrides=tuple(args.overrides),
        steps=args.steps,
        step_program=args.step_program,
    )
    setup_logging("supervisor")
    return supervise(open_session(request, os.environ), request, os.environ)


def _status(args: argparse.Namespace) -> int:
    from relax_hpc.report.read import find_run, read_run
    from relax_hpc.report.status import print_status

    report = read_run(find_run(args.run))
    if args.json:
        _print_json(report.to_dict())
    else:
        print_status(report, sys.stdout)
    return 0


def _logs(args: argparse.Namespace) -> int:
    from relax_hpc.launcher.steps import tail
    from relax_hpc.report.read import find_logs, find_run

    files = find_logs(find_run(args.run), args.attempt, args.role)
    if args.json:
        _print_json([str(path) for path in files])
        return 0
    for path in files:
        _print(f"==> {path} <==")
        for line in tail(path, args.lines, limit_bytes=200 * max(1, args.lines)):
            _print(line)
    return 0


def _cancel(args: argparse.Namespace) -> int:
    from relax_hpc.launcher.session import cancel_run
    from relax_hpc.report.read import find_run

    folder = find_run(args.run)
    who = cancel_run(folder, timeout_s=60.0)
    if args.json:
        _print_json({"run": str(folder.path), "cancelled": who, "time": time.time()})
    else:
        _print(f"cancelled {who}")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from relax_hpc.launcher import diagnosis, doctor
    from relax_hpc.launcher.check_list import would_fail

    if args.recipe and (args.clean or args.folder):
        raise ConfigError("--clean and --folder look at what dead runs left: give no recipe")
    if args.overrides and not args.recipe:
        raise ConfigError("--set changes a recipe: give one")
    leftovers, advice = [], []
    if not args.recipe:
        folders = [Path(folder) for folder in args.folder]
        leftovers = doctor.examine(folders, clean=args.clean, min_age_s=60.0 * args.min_age)
        advice = doctor.hints()
    told = {"folders": [left.to_dict() for left in leftovers], "hints": advice}
    findings = []
    if not args.clean:
        config, site, plan = _load(args) if args.recipe else (None, None, None)
        findings = diagnosis.diagnose(diagnosis.gather(config, site, plan, os.environ))
    if args.json:
        _print_json(told | {"findings": [f.to_dict() for f in findings]})
    else:
        for line in doctor.report(leftovers, advice) if not args.recipe else ():
            _print(line)
        for line in diagnosis.lines(findings) if not args.clean else ():
            _print(line)
    return int(would_fail(findings))


def _preflight(args: argparse.Namespace) -> int:
    from relax_hpc.launcher import preflight, preflight_step
    from relax_hpc.launcher.preflight_target import Target, test_nodes
    from relax_hpc.launcher.site import load_site

    if args.recipe:
        config, site, plan = _load(args)
        config = preflight.resolve_inputs(config)
    else:
        config, site, plan = None, load_site(args.site), None
    target = Target(config=config, plan=plan, site=site, nodes=args.nodes, partition=args.partition)
    outcome = test_nodes(
        target, os.environ, mpi=args.mpi, queue_s=args.wait, step_program=args.step_program
    )
    if args.json:
        _print_json(outcome.to_dict())
    else:
        for line in preflight_step.lines(outcome):
            _print(line)
    return int(not outcome.is_good)


def _postmortem(args: argparse.Namespace) -> int:
    args.paths = [_path_or_run(path) for path in args.paths]
    return postmortem.run(args)


def _path_or_run(text: str) -> str:
    """Return a path as it is; for the name or job id of a run its folder."""
    if text == "-" or Path(text).exists():
        return text
    from relax_hpc.report.read import find_run

    try:
        return str(find_run(text).path)
    except ConfigError as err:
        raise ConfigError(f"{text}: no such file or folder, and no run: {err}") from err


if __name__ == "__main__":
    sys.exit(main())
