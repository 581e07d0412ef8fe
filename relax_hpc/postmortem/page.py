"""A report as one HTML file: no network, no script, everything from logs escaped."""

import html
from collections.abc import Iterable

from relax_hpc.postmortem.picture import FAMILIES, draw
from relax_hpc.postmortem.printable import number_ranges, printable
from relax_hpc.postmortem.terminal import BLAME
from relax_hpc.postmortem.verdict import Finding, Report, Verdict

_MAX_EVIDENCE = 200
_MAX_FINDINGS = 200
_TEXT_LENGTH = 2000

_COLOURS = {
    "hardware": "#d62728",
    "network": "#e67e00",
    "memory": "#9b4fc9",
    "waiting": "#2f7ed8",
    "mismatch": "#c71585",
    "program": "#a83232",
    "scheduler": "#7f7f7f",
    "storage": "#8c6d31",
    "progress": "#5aa469",
}

_STYLE = """
:root { --ink: #1c1c1c; --paper: #ffffff; --faint: #d8d8d8; --soft: #f4f4f2; --alarm: #c0261c; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e4; --paper: #17181a; --faint: #44474b; --soft: #222427; --alarm: #ff6b5e; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1150px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: 0; } h2 { font-size: 1.1em; margin-top: 2em; }
.confidence { display: inline-block; border: 1px solid; border-radius: 4px; padding: 0 .5em; }
.established { color: #2e8b3d; } .likely { color: #b7791f; } .undetermined { color: #a34fc4; }
.sentence { font-size: 1.15em; } .fault { color: var(--alarm); }
code, pre { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere;
  white-space: pre-wrap; }
.evidence { background: var(--soft); padding: .4em .8em; margin: .4em 0; border-radius: 4px; }
.where { opacity: .7; } table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .25em .6em; overflow-wrap: anywhere;
  border-top: 1px solid var(--faint); }
.wide { overflow-x: auto; } svg { min-width: 900px; width: 100%; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg .small { font-size: 11px; }
svg line.lane { stroke: var(--faint); } svg line.fault { stroke: var(--alarm); stroke-width: 2; }
svg text.faulttext { fill: var(--alarm); font-weight: bold; }
svg .arrow { fill: none; stroke: var(--ink); opacity: .6; } svg .arrowtip { fill: var(--ink); }
.key { margin-right: 1.2em; white-space: nowrap; }
.key i { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .3em; }
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Of the page itself: even a hole in the escaping could load and run nothing."""


def render_html(report: Report) -> str:
    """Return the whole page. ASCII: it opens the same whatever encoding a server claims."""
    verdict = report.verdict
    title = f"post-mortem: {printable(verdict.class_)}"
    body = [
        *_verdict(verdict),
        *_picture(report),
        *_list("What to do", "ol", verdict.next_steps),
        *_evidence(verdict),
        *_alternatives(verdict),
        *_findings("Echoes of it, not to be chased", report.cascade),
        *_findings("All findings", report.findings),
        *_footer(report),
    ]
    page = "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{_escaped(title)}</title>",
            f"<style>{_STYLE}{_colours()}</style></head><body>",
            *body,
            "</body></html>",
            "",
        ]
    )
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _escaped(text: str, limit: int = _TEXT_LENGTH) -> str:
    return html.escape(printable(text, limit))


def _colours() -> str:
    return "".join(
        f"svg circle.{family} {{ fill: {colour}; }} .key i.{family} {{ background: {colour}; }}\n"
        for family, colour in _COLOURS.items()
    )


def _verdict(verdict: Verdict) -> list[str]:
    named = [
        ("ranks", number_ranges(verdict.ranks, 40)),
        ("nodes", ", ".join(verdict.nodes)),
        ("links", ", ".join(verdict.links)),
    ]
    lines = [
        f"<h1>{_escaped(verdict.class_)}</h1>",
        f'<p><span class="confidence {verdict.confidence.value}">{verdict.confidence.value}'
        "</span></p>",
        f'<p class="sentence">{_escaped(verdict.sentence)}</p>',
    ]
    at_fault = "; ".join(f"{name} {_escaped(value)}" for name, value in named if value)
    if not at_fault:
        return lines
    return [*lines, f'<p class="fault">{BLAME[verdict.confidence].capitalize()}: {at_fault}</p>']


def _picture(report: Report) -> list[str]:
    drawing = draw(report)
    if not drawing:
        return []
    keys = "".join(f'<span class="key"><i class="{name}"></i>{name}</span>' for name in FAMILIES)
    return [
        "<h2>Ranks over time, and who waited for whom</h2>",
        f'<div class="wide">{drawing}</div>',
        f"<p>{keys}</p>",
    ]


def _list(title: str, tag: str, items: Iterable[str]) -> list[str]:
    rows = [f"<li>{_escaped(item)}</li>" for item in items]
    return [f"<h2>{title}</h2>", f"<{tag}>", *rows, f"</{tag}>"] if rows else []


def _evidence(verdict: Verdict) -> list[str]:
    rows = []
    for source in verdict.evidence[:_MAX_EVIDENCE]:
        place = f"{source.file}:{source.line}" if source.line else source.file
        rows.append(
            f'<div class="evidence"><div class="where"><code>{_escaped(place)}</code></div>'
            f"<code>{_escaped(source.text)}</code></div>"
        )
    return ["<h2>Evidence</h2>", *rows] if rows else []


def _alternatives(verdict: Verdict) -> list[str]:
    rows = [
        f"<tr><td>{_escaped(other.class_)}</td><td>{_escaped(other.reason)}</td></tr>"
        for other in verdict.alternatives
    ]
    if not rows:
        return []
    return ["<h2>Other explanations, and why they rank lower</h2>", "<table>", *rows, "</table>"]


def _findings(title: str, findings: list[Finding]) -> list[str]:
    rows = [
        f"<tr><td>{_escaped(finding.class_)}</td><td>{finding.confidence.value}</td>"
        f"<td>{number_ranges(finding.ranks)}</td><td>{_escaped(', '.join(finding.nodes), 200)}</td>"
        f"<td>{_escaped(finding.sentence)}</td></tr>"
        for finding in findings[:_MAX_FINDINGS]
    ]
    if not rows:
        return []
    head = "<tr><th>class</th><th>confidence</th><th>ranks</th><th>nodes</th><th></th></tr>"
    return [f"<h2>{title}</h2>", '<div class="wide"><table>', head, *rows, "</table></div>"]


def _footer(report: Report) -> list[str]:
    read = (
        f"<p>Read {report.num_files:,} files, {report.num_lines:,} lines; "
        f"{report.num_events:,} events; ranks seen: "
        f"{number_ranges(report.ranks_seen) or 'none'}.</p>"
    )
    return [*_list("Notes", "ul", report.notes), read]
