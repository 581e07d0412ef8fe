"""A report for eyes: plain lines, the same with colour on a terminal."""

import shutil
import textwrap
import typing
from collections.abc import Iterator

from relax_hpc.postmortem.printable import number_ranges, printable
from relax_hpc.postmortem.verdict import Confidence, Finding, Report, Verdict

if typing.TYPE_CHECKING:
    from relax_hpc.postmortem.evidence import Source

Line = tuple[str, str]
"""Style for rich, text."""

_MAX_EVIDENCE = 12
_MAX_ECHOES = 8
_MAX_NOTES = 8
_TEXT_LENGTH = 300
_PLAIN_WIDTH = 100

_STYLES = {
    Confidence.ESTABLISHED: "bold green",
    Confidence.LIKELY: "bold yellow",
    Confidence.UNDETERMINED: "bold magenta",
}

BLAME = {
    Confidence.ESTABLISHED: "at fault",
    Confidence.LIKELY: "most likely at fault",
    Confidence.UNDETERMINED: "look here first, nothing is proven",
}
"""What naming ranks and nodes means."""


def print_report(report: Report, out: typing.TextIO) -> None:
    """Print a report; with colour when `out` is a terminal."""
    if not out.isatty():
        for _, text in report_lines(report, _PLAIN_WIDTH):
            out.write(_encodable(text, out) + "\n")
        return
    import rich.console  # 0.1 s: only where it is seen
    import rich.text

    width = max(40, shutil.get_terminal_size((_PLAIN_WIDTH, 24)).columns)
    console = rich.console.Console(file=out, highlight=False, markup=False, width=width)
    for style, text in report_lines(report, width):
        console.print(rich.text.Text(text, style=style), soft_wrap=True)


def _encodable(text: str, out: typing.TextIO) -> str:
    """Return text that the stream can write: `LANG=C` must not end a post-mortem."""
    encoding = out.encoding or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def report_lines(report: Report, width: int) -> Iterator[Line]:
    """Yield the report's lines; long sentences are wrapped, evidence is not."""
    verdict = report.verdict
    yield _STYLES[verdict.confidence], f"{verdict.confidence.value}: {printable(verdict.class_)}"
    yield from _wrapped("bold", verdict.sentence, width)
    yield from _at_fault(verdict)
    yield from _evidence(verdict.evidence)
    if verdict.alternatives:
        yield "", ""
        yield "bold", "other explanations, and why they rank lower"
        for other in verdict.alternatives:
            yield from _wrapped("", f"{other.class_}: {other.reason}", width, "  - ")
    if verdict.next_steps:
        yield "", ""
        yield "bold", "what to do"
        for number, step in enumerate(verdict.next_steps, 1):
            yield from _wrapped("", step, width, f"  {number}. ")
    yield from _echoes(report.cascade, width)
    yield "", ""
    yield from _footer(report, width)


def _wrapped(style: str, text: str, width: int, head: str = "") -> Iterator[Line]:
    lines = textwrap.wrap(
        printable(text),
        width=max(40, width),
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
    yield from ((style, line) for line in lines)


def _at_fault(verdict: Verdict) -> Iterator[Line]:
    parts = (
        ("ranks", number_ranges(verdict.ranks)),
        ("nodes", ", ".join(map(printable, verdict.nodes))),
        ("links", ", ".join(map(printable, verdict.links))),
    )
    named = [f"{name} {value}" for name, value in parts if value]
    if named:
        yield "bold red", f"{BLAME[verdict.confidence]}: {'; '.join(named)}"


def _evidence(evidence: "list[Source]") -> Iterator[Line]:
    if not evidence:
        return
    yield "", ""
    yield "bold", "evidence"
    for source in evidence[:_MAX_EVIDENCE]:
        place = f"{source.file}:{source.line}" if source.line else source.file
        yield "cyan", f"  {printable(place)}"
        yield "", f"    {printable(source.text, _TEXT_LENGTH)}"
    if len(evidence) > _MAX_EVIDENCE:
        yield "dim", f"  and {len(evidence) - _MAX_EVIDENCE} more (--json has them all)"


def _echoes(cascade: list[Finding], width: int) -> Iterator[Line]:
    if not cascade:
        return
    yield "", ""
    yield "bold", "echoes of it, not to be chased"
    for finding in cascade[:_MAX_ECHOES]:
        yield from _wrapped("dim", f"{finding.class_}: {finding.sentence}", width, "  - ")
    if len(cascade) > _MAX_ECHOES:
        yield "dim", f"  and {len(cascade) - _MAX_ECHOES} more"


def _footer(report: Report, width: int) -> Iterator[Line]:
    ranks = f"; ranks seen {number_ranges(report.ranks_seen)}" if report.ranks_seen else ""
    yield (
        "dim",
        f"read {report.num_files:,} files, {report.num_lines:,} lines, "
        f"{report.num_events:,} events{ranks}",
    )
    for note in report.notes[:_MAX_NOTES]:
        yield from _wrapped("dim", note, width, "note: ")
    if len(report.notes) > _MAX_NOTES:
        yield "dim", f"and {len(report.notes) - _MAX_NOTES} more notes (--json has them all)"
