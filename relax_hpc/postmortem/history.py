"""Several attempts or jobs of the same nodes: a node that is suspected again is news."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from relax_hpc.postmortem.evidence import Event
from relax_hpc.postmortem.verdict import Report

_ATTEMPT = re.compile(r"(attempt_\d+|(?:^|[/_.-])\d{4,10}(?=[_.-]\d|\.(?:out|err|log)))")


def attempt_of(path: str) -> str:
    """The attempt or job of a file: `attempt_N`, a job id in its name, or its folder."""
    found = _ATTEMPT.search(path)
    if found is None:
        return str(Path(path).parent)
    return path[: found.end()] if found[0].startswith("attempt") else found[0].strip("/_.-")


def compare(report: Report, events: Sequence[Event]) -> None:
    """Judge every attempt alone and note the nodes and ranks that come up more than once."""
    from relax_hpc.postmortem.diagnose import judge

    attempts: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        attempts[attempt_of(event.source.file)].append(event)
    if len(attempts) < 2:
        report.notes.append("history: only one attempt in these files")
        return
    suspects: dict[str, list[str]] = defaultdict(list)
    for name, part in attempts.items():
        verdict = judge(part).verdict
        report.notes.append(
            f"history: {name}: {verdict.class_} ({verdict.confidence}): {verdict.sentence}"
        )
        for suspect in [*verdict.nodes, *(f"rank {rank}" for rank in verdict.ranks)]:
            suspects[suspect].append(name)
    for suspect, names in sorted(suspects.items(), key=lambda item: -len(item[1])):
        if len(names) > 1:
            report.notes.append(
                f"history: {suspect} is suspected in {len(names)} of {len(attempts)} attempts"
            )
