"""`relax-hpc postmortem PATH...`: arguments, output, exit codes. Everything else is imported late.

Exit codes: 0 a verdict, 1 undetermined, 2 wrong use, 70 a bug in here (never one of the first two).
"""

import argparse
import ipaddress
import json
import math
import os
import re
import sys
import traceback
import typing
from collections.abc import Iterable
from pathlib import Path

from relax_hpc.errors import ConfigError

if typing.TYPE_CHECKING:
    from relax_hpc.postmortem.verdict import Report

TEXT = "say which rank or node failed first, why, and what to do, from the logs of a dead job"
"""One line for `relax-hpc --help`."""

EXIT_VERDICT = 0
EXIT_UNDETERMINED = 1

_DESCRIPTION = f"""{TEXT}.

Reads logs and flight-recorder dumps of any framework: files, folders (all files below), a run
folder, - for stdin; .gz too."""

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""What may stand in a host list; a name from a log must not become an option of sbatch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = _DESCRIPTION
    parser.add_argument("paths", nargs="+", metavar="PATH", help="file, folder, run, or - (stdin)")
    parser.add_argument(
        "--history",
        action="store_true",
        help="the paths are several jobs or attempts: name what fails again and again",
    )
    parser.add_argument("--html", default="", metavar="FILE", help="also write one HTML page")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument(
        "--exclude",
        action="store_true",
        help="print only the nodes to avoid, as a host list for sbatch --exclude; may be empty",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code.

    Raises:
        ConfigError: a path does not exist, or the HTML file cannot be written.
    """
    check_paths(args.paths)
    paths = [log for path in args.paths for log in logs_of(path, args.history)]
    try:
        report = _analyse(paths, args.history)
    except Exception:  # noqa: BLE001 - the process boundary: 1 would mean "undetermined"
        traceback.print_exc()
        sys.stderr.write(
            "relax-hpc postmortem: this is a bug in the post-mortem, please report it together "
            "with the input; the logs themselves are untouched\n"
        )
        return os.EX_SOFTWARE
    if args.html:
        _write_page(Path(args.html), report)
    _print(report, args)
    return exit_code(report)


def check_paths(paths: Iterable[str]) -> None:
    """Refuse paths that are not there.

    Raises:
        ConfigError: names the first.
    """
    for path in paths:
        if path != "-" and not Path(path).exists():
            raise ConfigError(f"{path}: no such file or folder")


def logs_of(path: str, history: bool) -> list[str]:
    """Return the logs of a run folder: its state, plan and metrics are not what a job said.

    Of its attempts the newest is read; with `history` all, each as a job of its own.
    """
    logs = Path(path) / "logs"
    if not (Path(path) / "config.json").is_file() or not logs.is_dir():
        return [path]
    attempts = sorted(logs.glob("attempt_*"), key=lambda folder: (len(folder.name), folder.name))
    if not attempts:
        return [str(logs)]
    return [str(attempt) for attempt in (attempts if history else attempts[-1:])]


def _analyse(paths: list[str], history: bool) -> "Report":
    from relax_hpc.postmortem.diagnose import analyse

    return analyse(paths, history=history)


def exit_code(report: "Report") -> int:
    """Return 0 for a verdict, 1 when the data does not tell."""
    is_verdict = report.verdict.confidence.value != "undetermined"
    return EXIT_VERDICT if is_verdict else EXIT_UNDETERMINED


def _print(report: "Report", args: argparse.Namespace) -> None:
    if args.json:
        sys.stdout.write(report_json(report) + "\n")
    elif args.exclude:
        sys.stdout.write(host_list(report) + "\n")
        verdict = report.verdict
        sys.stderr.write(f"{verdict.confidence.value}: {ascii(verdict.sentence)[1:-1]}\n")
    else:
        from relax_hpc.postmortem.terminal import print_report

        print_report(report, sys.stdout)


def report_json(report: "Report") -> str:
    """Render the `--json` document: ASCII, whatever bytes the logs held."""
    import msgspec

    return json.dumps(_finite(msgspec.to_builtins(report)), indent=1, allow_nan=False)


def _finite(value: typing.Any) -> typing.Any:
    """Replace infinities and NaN, which JSON has not, by null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def host_list(report: "Report") -> str:
    """Return the nodes that the next job should avoid, in Slurm's notation; "" for none.

    Only nodes of the verdict, and of what is established beside it, if the class blames nodes: one
    where a program had a bug, ran out of memory or was merely waited for is as good as any other.
    """
    from relax_hpc.postmortem.classes import lookup
    from relax_hpc.postmortem.verdict import Confidence
    from relax_hpc.slurm import compress_hostlist

    verdict = report.verdict
    blamed = [
        (finding.class_, finding.nodes)
        for finding in report.findings
        if finding.confidence is Confidence.ESTABLISHED
    ]
    if verdict.confidence is not Confidence.UNDETERMINED:
        blamed.append((verdict.class_, verdict.nodes))
    guilty = {
        node
        for name, nodes in blamed
        if lookup(name).blames_node
        for node in nodes
        if _is_node_name(node)
    }
    return compress_hostlist(sorted(guilty))


def _is_node_name(text: str) -> bool:
    if not _NODE.fullmatch(text):
        return False
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return True
    return False  # Slurm knows names, not addresses


def _write_page(path: Path, report: "Report") -> None:
    from relax_hpc.postmortem.page import render_html

    try:
        path.write_text(render_html(report), encoding="ascii")
    except OSError as err:
        raise ConfigError(f"--html {path}: {err.strerror}") from err
