"""Stacks: py-spy dumps grouped or not, `Stack trace of the failed collective`, faulthandler."""

import re
from collections.abc import Iterator, Sequence

from relax_hpc.postmortem.evidence import Event, EventKind
from relax_hpc.postmortem.parse.record import Parser, Record

_THREAD = re.compile(
    r"Thread (?:0x)?(?P<pid>[0-9A-Fa-f]+) \((?P<state>\w+(?:\+\w+)?)\)(?:: \"(?P<name>[^\"]*)\")?"
)
_PROCESS = re.compile(r"Process (?P<pid>\d+): ")
_FRAME = re.compile(
    r"\s*(?P<function>[\w<>.]+)(?: \(|\s+from\s+)(?P<file>[^():\s]+\.(?:py|pyx|c|cpp|"
    r"cu|h|cc)|<\w+>):(?P<line>\d+)\)?"
)
_NODE = re.compile(r"^\s*(?:Node|Host|node|host)\s+(?P<node>[\w.-]+)\s*:?\s*$")


def parse_pyspy(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`Thread 688514 (idle): "MainThread"` with frames below; several threads may share frames."""
    found = _THREAD.match(records[index].text.strip())
    if found is None or (found["name"] or "MainThread") != "MainThread":
        return
    frames: list[str] = []
    for record in records[index + 1 : index + 60]:
        if (frame := _FRAME.match(record.text)) and "Thread " not in record.text[:12]:
            frames.append(f"{frame['function']} {frame['file']}")
        elif frames or not _THREAD.match(record.text.strip()):
            break
    node = _node_above(records, index) or records[index].node
    pid = int(found["pid"]) if found["pid"].isdigit() else None
    yield records[index].event(
        EventKind.PHASE,
        node=node,
        pid=pid,
        attrs={"stack": " < ".join(frames[:40]), "state": found["state"]},
    )


def _node_above(records: Sequence[Record], index: int) -> str:
    for record in reversed(records[max(0, index - 200) : index]):
        if found := _NODE.match(record.text):
            return found["node"]
    return ""


def parse_failed_collective(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`Stack trace of the failed collective:` and its `#0 function from file:line` lines."""
    if "not found" in records[index].text:
        return
    frames = []
    for record in records[index + 1 : index + 40]:
        if not (found := re.match(r"#\d+ (?P<function>\S+) from (?P<file>\S+?):\d+", record.text)):
            break
        frames.append(f"{found['function']} {found['file']}")
    if frames:
        yield records[index].event(
            EventKind.CONFIG_NOTE, attrs={"note": "failed-stack", "stack": " < ".join(frames)}
        )


PARSERS = (
    Parser("pyspy", ("MainThread", "(active)", "(idle)"), parse_pyspy),
    Parser(
        "failed_collective",
        ("Stack trace of the failed collective",),
        parse_failed_collective,
        "2.7-",
    ),
)
