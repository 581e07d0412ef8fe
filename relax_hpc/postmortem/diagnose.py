"""Events to a verdict: ordered rules propose, the judge picks, the rest are echoes and rivals."""

import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping, Sequence

from relax_hpc.postmortem import classes, collect, flight, flight_rules
from relax_hpc.postmortem.evidence import Event, EventKind
from relax_hpc.postmortem.facts import Facts, gather
from relax_hpc.postmortem.flight import Dump
from relax_hpc.postmortem.marks import add_picture
from relax_hpc.postmortem.parse import registry
from relax_hpc.postmortem.rules import (
    collective,
    gloo,
    launching,
    machine,
    network,
    process,
    reports,
)
from relax_hpc.postmortem.rules.proposal import UNDETERMINED, Proposal, propose
from relax_hpc.postmortem.timeline import order
from relax_hpc.postmortem.verdict import Alternative, Confidence, Finding, Report, Verdict

RULES = (
    *machine.RULES,
    *launching.RULES,
    *process.RULES,
    *network.RULES,
    *gloo.RULES,
    *reports.RULES,
    *collective.RULES,
)

PARALLEL_BYTES = 32 << 20
"""Below this, starting processes costs more than it saves."""

MAX_EVENTS_PER_FILE = 20_000
_SURE = {Confidence.ESTABLISHED: 0, Confidence.LIKELY: 1, Confidence.UNDETERMINED: 2}


def analyse(paths: Sequence[str], history: bool = False) -> Report:
    """Read everything below `paths` and say what failed first.

    Raises:
        FileNotFoundError: none of the paths exists.
    """
    corpus = collect.read(paths)
    events, num_lines, notes = read_events(corpus)
    dumps = _read_dumps(corpus.dumps, notes)
    report = judge(events, dumps, collect.file_ranks(corpus.logs))
    report.num_files = len(corpus.logs) + len(corpus.dumps)
    report.num_lines = num_lines
    report.notes = [*corpus.notes, *notes, *report.notes]
    if history:
        from relax_hpc.postmortem.history import compare

        compare(report, events)
    return report


# --------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------


def read_events(corpus: collect.Corpus) -> tuple[list[Event], int, list[str]]:
    """Events of all logs in order of the files; lines; notes."""
    ranks = collect.file_ranks(corpus.logs)
    tasks = [(path, ranks.get(path)) for path in corpus.logs]
    workers = min(os.cpu_count() or 1, 8, len(tasks))
    if corpus.num_bytes > PARALLEL_BYTES and workers > 1 and "-" not in corpus.logs:
        with multiprocessing.get_context(_start_method()).Pool(workers) as pool:
            parts = list(pool.imap(_read_one, tasks, chunksize=max(1, len(tasks) // (workers * 8))))
    else:
        parts = [_read_one(task) for task in tasks]
    events = [event for part in parts for event in part[0]]
    return events, sum(part[1] for part in parts), [note for part in parts for note in part[2]]


def _start_method() -> str:
    # Fork is quick and needs no importable main; beside other threads it could inherit a held lock.
    return "fork" if threading.active_count() == 1 else "spawn"


def _read_one(task: tuple[str, int | None]) -> tuple[list[Event], int, list[str]]:
    path, rank = task
    status = collect.ReadStatus()
    events: list[Event] = []
    for window in collect.windows(path, registry.LITERALS, status, rank):
        if len(events) < MAX_EVENTS_PER_FILE:
            events += registry.parse(window.records)
    return events, status.num_lines, status.notes


def _read_dumps(paths: Sequence[str], notes: list[str]) -> list[Dump]:
    dumps = flight.read_dumps(paths)
    notes += [f"{dump.file}: {dump.problem}" for dump in dumps if dump.problem]
    return dumps


# --------------------------------------------------------------------------------------------
# Judging
# --------------------------------------------------------------------------------------------


def judge(
    events: Sequence[Event],
    dumps: Sequence[Dump] = (),
    rank_of_file: Mapping[str, int] | None = None,
) -> Report:
    """Order events, ask every rule, take the best proposal.

    `rank_of_file` has the logs of single ranks, also of those that say nothing.
    """
    timeline = order(events)
    facts = gather(timeline.events)
    facts.rank_files = {rank: file for file, rank in (rank_of_file or {}).items()}
    proposals = [found for rule in RULES for found in rule(facts)]
    if dumps:
        from_dumps = flight_rules.flight_findings(dumps, facts.world)
        proposals += [_from_dump(finding, place) for place, finding in enumerate(from_dumps)]
    proposals.sort(key=lambda p: (p.order, _SURE[p.finding.confidence], p.finding.time or 0.0))
    if not proposals:
        proposals = [_nothing(facts)]
    best, rest = proposals[0], proposals[1:]
    report = Report(
        verdict=_verdict(facts, best, rest),
        findings=[p.finding for p in proposals],
        cascade=_echoes(facts, best, rest),
        num_events=len(events),
        ranks_seen=sorted({e.rank for e in events if e.rank is not None}),
    )
    report.notes += [
        f"clock of {name} was {skew:+.0f} s off; corrected"
        for name, skew in timeline.skew_s.items()
    ]
    if dumps:
        report.waits = flight_rules.flight_waits(dumps)
    return add_picture(report, timeline.events)


def _from_dump(finding: Finding, place: int) -> Proposal:
    """Dumps know positions of all ranks: they beat text about collectives, not hardware evidence.

    Only the first finding does: the others are what it would be if the first were wrong.
    """
    order_ = 69 if place == 0 else 77
    return Proposal(order=order_ if finding.confidence is not UNDETERMINED else 79, finding=finding)


def _nothing(facts: Facts) -> Proposal:
    finished = [e for e in facts.phases if e.attrs.get("phase") == "finished"]
    if facts.vague:
        return propose(
            99,
            "all-ranks",
            UNDETERMINED,
            "Ranks report a failed collective, but not where they stand.",
            events=list(facts.vague.values()),
        )
    if finished:
        return propose(
            99,
            "no-failure",
            UNDETERMINED,
            "The program says it finished; nothing speaks of a failure.",
            events=finished,
        )
    return propose(
        99,
        "unknown",
        UNDETERMINED,
        "Nothing in these files tells what failed.",
        events=facts.events[:4] if facts.events else [],
    )


def _verdict(facts: Facts, best: Proposal, rest: Sequence[Proposal]) -> Verdict:
    finding = best.finding
    entry = classes.lookup(finding.class_)
    alternatives = list(best.alternatives)
    named = {finding.class_} | {a.class_ for a in alternatives}
    for other in rest[:6]:
        if other.finding.class_ not in named:
            named.add(other.finding.class_)
            alternatives.append(
                Alternative(class_=other.finding.class_, reason=other.finding.sentence)
            )
    return Verdict(
        class_=finding.class_,
        confidence=finding.confidence,
        sentence=finding.sentence,
        ranks=finding.ranks,
        nodes=finding.nodes,
        links=finding.links,
        evidence=finding.evidence,
        alternatives=alternatives,
        next_steps=_next_steps(facts, entry, finding),
    )


def _next_steps(facts: Facts, entry: classes.FailureClass, finding: Finding) -> list[str]:
    steps = [entry.remedy]
    if finding.confidence is not Confidence.ESTABLISHED:
        steps += entry.next_steps
    if facts.notes("flight-recorder-off") and not any("TORCH_FR" in step for step in steps):
        steps.append(classes.RECORDER)
    return steps


_ECHO_WORDS = {
    EventKind.COLLECTIVE_TIMEOUT: "ranks that waited until the time-out",
    EventKind.DUMP_SIGNAL: "ranks that dumped on another rank's signal",
    EventKind.PEER_LOST: "connections to processes that had already ended",
    EventKind.PROCESS_EXIT: "exits after the first failure",
    EventKind.NET_ERROR: "network errors after the first failure",
    EventKind.EXCEPTION: "exceptions that only report somebody else's failure",
}


def _echoes(facts: Facts, best: Proposal, rest: Sequence[Proposal]) -> list[Finding]:
    used = set(best.finding.evidence)
    echoes = [p.finding for p in rest]
    for kind, words in _ECHO_WORDS.items():
        events = [e for e in facts.of(kind) if e.source not in used]
        if events:
            ranks = sorted({r for e in events if (r := facts.rank(e)) is not None})
            echoes.append(
                propose(
                    99,
                    best.finding.class_,
                    best.finding.confidence,
                    f"Echo: {words}.",
                    events=events[:6],
                    ranks=ranks,
                ).finding
            )
    return echoes


def iter_rules() -> Iterator[str]:
    """Names of the rules, in the order in which they are asked."""
    for rule in RULES:
        yield f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}"
