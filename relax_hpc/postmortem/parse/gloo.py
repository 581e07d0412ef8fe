"""Gloo (CPU collectives): time-outs, lost peers, sizes that do not fit, broken listeners.

The text comes as a Python exception of the rank that waited; the frames above it tell in which
collective. It never says who did not come: a peer's port is that of one connection. Versions: the
message bodies are the same since PyTorch 1.8; the path and line in front of them change.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from relax_hpc.postmortem.evidence import Event, EventKind
from relax_hpc.postmortem.parse.record import Parser, Record

_TIMEOUT = re.compile(
    r"Timed out waiting (?P<ms>\d+) ?ms for (?P<direction>send|recv|all) operations? to complete"
    r"|Application timeout caused pair closure"
)
_LOST = re.compile(
    r"(?:Read error|Write error|read|writev?|recv|send|Connection closed by peer|Socket closed)"
    r"\s*\[(?P<address>[0-9A-Fa-f.:]+)\]:(?P<port>\d{1,5})(?::\s*(?P<reason>[A-Z][A-Za-z ]{3,40}))?"
)
_SIZE = re.compile(
    r"op\.preamble\.(?:length|nbytes) <= op\.n?bytes\. (?P<got>\d+) vs\.? (?P<want>\d+)"
    r"|\(?(?:op\.)?nbytes (?:==|<=) [\w.()]+\)?\.? (?P<got2>\d+) vs\.? (?P<want2>\d+)"
)
_LISTENER = re.compile(r"transport/\w+/listener\.cc:\d+\]\s*(?P<what>.*accept: [A-Za-z ]+)")
_SET_UP = re.compile(
    r"(?P<what>Gloo connectFullMesh failed|makeDeviceFor\w+\(\): .{0,80}"
    r"|connect(?:FullMesh)? .{0,80}(?:Connection refused|timed out)"
    r"|Unable to (?:resolve|find) (?:hostname|address|interface).{0,80}"
    r"|unsupported gloo device|Rank \d+ is already in the store|rv\s*!=\s*-1.{0,60})"
)
_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_MAX_FRAMES = 120
_ATTRS = dict[str, str | int | float | tuple[int, ...]]


def parse_timeout(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`[.../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv ...`."""
    record = records[index]
    if found := _TIMEOUT.search(record.text):
        op, attrs = _called(records, index)
        yield record.event(
            EventKind.COLLECTIVE_TIMEOUT,
            op=op,
            timeout_s=int(found["ms"]) / 1e3 if found["ms"] else None,
            attrs=attrs | {"direction": found["direction"] or "", "vague": 1},
        )


def parse_lost(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`[.../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:54695`."""
    record = records[index]
    if "gloo" not in record.text and "remote worker" not in record.text:
        return
    if found := _LOST.search(record.text):
        op, attrs = _called(records, index)
        attrs |= {
            "peer": found["address"],
            "port": int(found["port"]),
            "reason": (found["reason"] or "closed").strip().lower(),
        }
        yield record.event(EventKind.PEER_LOST, op=op, attrs=attrs)


def parse_size(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`op.preamble.length <= op.nbytes. 668 vs 8. Received data size doesn't match expected size.`

    The process that says it received more than it waited for. Either it or the sender is odd.
    """
    record = records[index]
    found = _SIZE.search(record.text)
    if found is None or "gloo" not in record.text:
        return
    got, want = found["got"] or found["got2"], found["want"] or found["want2"]
    op, attrs = _called(records, index)
    yield record.event(
        EventKind.COLLECTIVE_MISMATCH, op=op, attrs=attrs | {"got": int(got), "want": int(want)}
    )


def parse_listener(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`[... gloo/transport/tcp/listener.cc:63] false. accept: Invalid argument`: its own socket."""
    record = records[index]
    if found := _LISTENER.search(record.text):
        yield record.event(
            EventKind.PEER_LOST,
            attrs={"by": "gloo", "reason": found["what"], "where": "listener"},
        )


def parse_set_up(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`Gloo connectFullMesh failed with ...`, `makeDeviceForHostname(): unsupported ...`."""
    record = records[index]
    if (found := _SET_UP.search(record.text)) and "loo" in record.text:
        yield record.event(
            EventKind.LAUNCHER_ERROR, attrs={"by": "gloo", "what": found["what"][:120]}
        )


def _called(records: Sequence[Record], index: int) -> tuple[str, _ATTRS]:
    """Return the collective, and the program's line that called it, from the frames above."""
    me = records[index]
    op, site = "", ""
    for record in reversed(records[max(0, index - _MAX_FRAMES) : index]):
        if (record.rank, record.local_rank, record.pid) != (me.rank, me.local_rank, me.pid):
            continue
        if record.text.startswith("Traceback (most recent"):
            break
        if not (found := _FRAME.match(record.text)):
            continue
        path = PurePosixPath(found["file"])
        if "/torch/" not in found["file"]:
            site = f"{path.name}:{found['line']} {found['function']}"
            break
        if path.name == "distributed_c10d.py":
            op = found["function"]
    return op, {"by": "gloo", "site": site}


PARSERS = (
    Parser(
        "gloo_timeout",
        ("Timed out waiting", "Application timeout caused"),
        parse_timeout,
        "PyTorch 1.8-",
    ),
    Parser(
        "gloo_lost",
        ("Connection closed by peer", "Read error [", "Write error [", "gloo/transport"),
        parse_lost,
        "PyTorch 1.4-",
    ),
    Parser("gloo_size", ("op.preamble", "nbytes"), parse_size, "PyTorch 1.4-"),
    Parser("gloo_listener", ("listener.cc",), parse_listener),
    Parser("gloo_set_up", ("Gloo", "gloo device", "makeDeviceFor"), parse_set_up),
)
