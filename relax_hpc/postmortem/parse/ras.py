"""NCCL RAS (`ncclras`, NCCL >= 2.24): summary table and the sections about incomplete groups."""

import re
from collections.abc import Iterator, Sequence

from relax_hpc.postmortem.evidence import Event, EventKind, Group
from relax_hpc.postmortem.parse.record import Parser, Record

_ROW = re.compile(
    r"^\s*(?P<group>\d+)\s+(?P<comms>\d+)\s+(?P<nodes>\d+)\s+(?P<per_node>\d+)"
    r"(?:-\d+)?\s+(?P<ranks>\d+)(?:-\d+)?\s+(?P<total>\d+)\s+"
    r"(?P<status>INIT|RUNNING|FINALIZE|ABORT|NOCOMM|MIXED)(?:,\w+)*\s+(?P<errors>OK|[A-Z,]+)\s*$"
)
_PROCESS = re.compile(r"Process (?P<pid>\d+) on node (?P<node>\S+) managing GPUs? (?P<gpu>[\d,]+)")
_RANK = re.compile(
    r"Rank (?P<rank>\d+)\s*--(?: GPU (?P<gpu>\d+) managed by process (?P<pid>\d+) on "
    r"node (?P<node>\S+))?"
)
_SECTION = re.compile(
    r"^\s*(?:#(?P<group>\d+)-(?P<comm>\d+) \((?P<hash>[0-9a-f]+)\) "
    r")?(?P<what>INCOMPLETE|DEAD|TIMEOUT|MISMATCH|ERROR)\s*$"
)
_LAUNCHED = re.compile(r"(?P<n>\d+) ranks? ha(?:ve|s) launched up to operation (?P<op>\d+)")
MAX_RANK = 1_000_000
"""RAS 2.27.3 prints garbage for groups that do not exist; no job has this many ranks."""


def parse_row(records: Sequence[Record], index: int) -> Iterator[Event]:
    """One line of the table of communicators."""
    record = records[index]
    if found := _ROW.match(record.text):
        garbage = (
            found["status"] == "NOCOMM" or int(found["total"]) == 0 or int(found["nodes"]) == 0
        )
        yield record.event(
            EventKind.RAS,
            attrs={
                "what": "row",
                "group": int(found["group"]),
                "status": found["status"],
                "errors": found["errors"],
                "ranks": int(found["total"]),
                "garbage": int(garbage),
            },
        )


def parse_section(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`#0-0 (hash) INCOMPLETE`, `DEAD`, `MISMATCH` and the processes or ranks below it."""
    record = records[index]
    head = _SECTION.match(record.text)
    if head is None:
        return
    what, launched = head["what"].lower(), 0
    group = Group(uid=f"{head['group']}-{head['comm']}") if head["group"] else None
    for below in records[index + 1 : index + 400]:
        if _SECTION.match(below.text) or re.match(r"^[=-]{4,}", below.text):
            break
        if found := _LAUNCHED.search(below.text):
            launched = int(found["op"])
            yield below.event(
                EventKind.RAS,
                group=group,
                attrs={"what": "launched", "count": int(found["n"]), "operation": launched},
            )
        elif found := _PROCESS.search(below.text):
            yield below.event(
                EventKind.RAS,
                node=found["node"],
                pid=int(found["pid"]),
                group=group,
                attrs={"what": what, "gpu": found["gpu"]},
            )
        elif found := _RANK.search(below.text):
            rank = int(found["rank"])
            if rank < MAX_RANK and found["node"]:
                yield below.event(
                    EventKind.RAS,
                    rank=rank,
                    node=found["node"],
                    pid=int(found["pid"]),
                    group=group,
                    attrs={"what": what, "operation": launched},
                )
            elif rank >= MAX_RANK:
                yield below.event(EventKind.RAS, group=group, attrs={"what": "garbage"})


PARSERS = (
    Parser("row", ("RUNNING", "NOCOMM", "FINALIZE", "ABORT", "INIT"), parse_row, "NCCL 2.24-"),
    Parser(
        "section",
        ("INCOMPLETE", "DEAD", "TIMEOUT", "MISMATCH", "ERROR"),
        parse_section,
        "NCCL 2.24-",
    ),
)
