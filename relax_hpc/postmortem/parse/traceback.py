"""Python tracebacks, torchrun's failure table, signals of crashed processes."""

import re
from collections.abc import Iterator, Sequence

from relax_hpc.postmortem.evidence import Event, EventKind
from relax_hpc.postmortem.parse.record import Parser, Record, read_stamp

_FRAME = re.compile(r"\s*File \"(?P<file>[^\"]+)\", line (?P<line>\d+), in (?P<function>\S+)")
_END = re.compile(
    r"^(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Failure|Timeout|"
    r"Killed|Warning|StopIteration|Expired|OutOfMemory|Violation|Abort|Failed|"
    r"Cancelled)\w*)(?::\s?(?P<message>.*))?$"
)
MAX_FRAMES = 100


def parse_traceback(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`Traceback (most recent call last):` to the line with the exception's type.

    Lines of other ranks may stand in between; they are told apart by their prefix.
    """
    head = records[index]
    key = (head.rank, head.local_rank, head.pid)
    frames: list[str] = []
    for record in records[index + 1 : index + 3 * MAX_FRAMES]:
        if (record.rank, record.local_rank, record.pid) != key:
            continue
        if found := _FRAME.match(record.text):
            frames.append(f"{found['function']} {found['file']}:{found['line']}")
        elif record.text.startswith("Traceback (most recent"):
            break
        elif (
            frames
            and (end := _END.match(record.text.strip()))
            and not record.text.startswith("    ")
        ):
            yield record.event(
                EventKind.EXCEPTION,
                time=record.time or head.time,
                attrs={
                    "type": end["type"].rpartition(".")[2],
                    "message": (end["message"] or "")[:500],
                    "frames": " < ".join(reversed(frames[-MAX_FRAMES:])),
                    "traceback": 1,
                },
            )
            return


def parse_bare(records: Sequence[Record], index: int) -> Iterator[Event]:
    """An exception's last line whose traceback is not in the log."""
    record = records[index]
    end = _END.match(record.text.strip())
    if end is None or record.text.startswith("    ") or _below_traceback(records, index):
        return
    yield record.event(
        EventKind.EXCEPTION,
        attrs={
            "type": end["type"].rpartition(".")[2],
            "message": (end["message"] or "")[:500],
            "frames": "",
            "traceback": 0,
        },
    )


def _below_traceback(records: Sequence[Record], index: int) -> bool:
    me = records[index]
    for record in reversed(records[max(0, index - 3 * MAX_FRAMES) : index]):
        if (record.rank, record.local_rank, record.pid) != (me.rank, me.local_rank, me.pid):
            continue
        if record.text.startswith("Traceback (most recent"):
            return True
        if _END.match(record.text.strip()):
            return False
    return False


_TABLE = re.compile(r"^\s*\[\d+\]:\s*$")
_FIELD = re.compile(
    r"^\s*(?P<name>time|host|rank|exitcode|error_file|traceback)\s*:\s*(?P<value>.*?)\s*$"
)


def parse_torchrun(records: Sequence[Record], index: int) -> Iterator[Event]:
    """One entry of the table `Failures:` / `Root Cause (first observed failure):`."""
    fields: dict[str, str] = {}
    for record in records[index + 1 : index + 12]:
        found = _FIELD.match(record.text)
        if found is None:
            if fields:
                break
            continue
        fields[found["name"]] = found["value"]
    if "rank" not in fields or "exitcode" not in fields:
        return
    rank = re.match(r"(\d+)(?: \(local_rank: (\d+)\))?", fields["rank"])
    code = re.match(r"(-?\d+)(?: \(pid: (\d+)\))?", fields["exitcode"])
    if rank is None or code is None:
        return
    root = any("Root Cause" in r.text for r in records[max(0, index - 2) : index + 1])
    yield records[index].event(
        EventKind.PROCESS_EXIT,
        rank=int(rank[1]),
        node=fields.get("host", ""),
        pid=int(code[2]) if code[2] else None,
        time=read_stamp(fields.get("time", "")),
        attrs={
            "exit_code": int(code[1]),
            "end": f"exit code {code[1]}",
            "by": "torchrun",
            "root": int(root),
        },
    )


_ELASTIC = re.compile(
    r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)"
)
_CRASH = re.compile(
    r"(?P<what>Segmentation fault|SIGSEGV|SIGABRT|SIGBUS|Fatal Python error: [\w ]+|"
    r"Bus error|signal 11|SIGILL|Caught signal 11|SIGFPE)"
)
_SPAWN = re.compile(
    r"process (?P<rank>\d+) terminated with (?:signal (?P<signal>\S+)|exit code (?P<code>\d+))",
    re.I,
)
_MPI = re.compile(
    r"mpirun noticed that process rank (?P<rank>\d+) with PID \d+ on node "
    r"(?P<node>\S+) exited on signal (?P<signal>\d+)|"
    r"Process name: \[\[\d+,\d+\],(?P<rank2>\d+)\]"
)
_VLLM = re.compile(
    r"Worker proc (?P<name>\S+) died unexpectedly|EngineCore (?:process )?died|"
    r"Engine process failed|Scheduler hit an exception|"
    r"Rank (?P<rank>\d+) scheduler is dead"
)
_ATTRS = dict[str, str | int | float | tuple[int, ...]]


def parse_crash(records: Sequence[Record], index: int) -> Iterator[Event]:
    """Exits and signals: torch elastic, torch.multiprocessing, mpirun, segmentation faults."""
    record = records[index]
    if record.text.startswith(("srun:", "slurmstepd")):
        return
    attrs: _ATTRS
    if found := _ELASTIC.search(record.text):
        attrs = {
            "exit_code": int(found["code"]),
            "end": f"exit code {found['code']}",
            "by": "torchrun",
            "local_rank": int(found["local"]),
        }
        yield record.event(EventKind.PROCESS_EXIT, pid=int(found["pid"]), attrs=attrs)
    elif found := _MPI.search(record.text):
        rank = found["rank"] or found["rank2"]
        attrs = {"end": f"signal {found['signal']}", "by": "mpirun"}
        yield record.event(
            EventKind.PROCESS_EXIT, rank=int(rank), node=found["node"] or None, attrs=attrs
        )
    elif found := _SPAWN.search(record.text):
        attrs = {
            "end": f"signal {found['signal']}" if found["signal"] else f"exit code {found['code']}",
            "by": "spawn",
        }
        yield record.event(EventKind.PROCESS_EXIT, rank=int(found["rank"]), attrs=attrs)
    elif found := _CRASH.search(record.text):
        yield record.event(EventKind.PROCESS_EXIT, attrs={"end": found["what"], "by": "crash"})
    elif found := _VLLM.search(record.text):
        yield record.event(
            EventKind.PROCESS_EXIT,
            rank=int(found["rank"]) if found["rank"] else None,
            attrs={"end": found[0], "by": "engine"},
        )


PARSERS = (
    Parser("traceback", ("Traceback (most recent",), parse_traceback),
    Parser("bare", ("Error", "Exception", "Interrupt", "Expired"), parse_bare),
    Parser(
        "torchrun",
        ("[0]:", "[1]:", "[2]:", "[3]:", "[4]:", "[5]:", "[6]:", "[7]:", "[8]:", "[9]:"),
        parse_torchrun,
    ),
    Parser(
        "crash",
        (
            "exitcode:",
            "Segmentation fault",
            "SIGS",
            "SIGA",
            "SIGB",
            "SIGI",
            "SIGF",
            "SIGK",
            "Fatal Python",
            "Bus error",
            "signal 11",
            "terminated with",
            "mpirun noticed",
            "Process name:",
            "died",
            "scheduler is dead",
            "hit an exception",
            "process failed",
        ),
        parse_crash,
    ),
)
