"""File systems: stalls, full disks and /dev/shm, errors."""

import re
from collections.abc import Iterator, Sequence

from relax_hpc.postmortem.evidence import Event, EventKind
from relax_hpc.postmortem.parse.record import Parser, Record

_STALL = re.compile(
    r"LustreError|Lustre: .*(?:Connection to \S+ .*lost|evicted|not responding|"
    r"timed out)|nfs: server (?P<server>\S+) not responding|mmfs.*(?:unresponsive|"
    r"expelled|unmount)|GPFS.*(?:expel|panic|unmount)|"
    r"INFO: task .{1,60}? blocked for more than \d+ seconds|BeeGFS.*(?:unreachable|"
    r"timed out)|ceph: .*(?:hung|timed out|session lost)|"
    r"\b(?:OSS|OST|MDS|MDT|metadata server|file ?system|filesystem|"
    r"storage)\b[^.\n]{0,80}(?:fail-?over|froze|frozen|stall|outage|hung|unresponsive|"
    r"not responding)|"
    r"(?:stalled?|frozen|hung|unresponsive)\s+(?:network\s+)?(?:file ?system|storage)",
    re.I,
)
_RESTORED = re.compile(r"Lustre: .*Connection restored|nfs: server \S+ OK")
_FULL = re.compile(r"No space left on device|ENOSPC|Disk quota exceeded|EDQUOT|quota exceeded")
_SHM = re.compile(
    r"/dev/shm|shared memory|\bshm\b|\(shm\)|torch_shm|/torch_\w+|DataLoader worker .*bus error",
    re.I,
)
_BUS = re.compile(
    r"DataLoader worker.*?killed by signal: Bus error|unexpected bus error|"
    r"insufficient shared memory|Error while (?:creating|"
    r"attaching to) shared memory segment|unable to (?:open|mmap|resize) shared memory",
    re.I,
)
_ERROR = re.compile(
    r"Stale file handle|Input/output error|Transport endpoint is not connected|"
    r"Remote I/O error|Cannot send after transport endpoint shutdown|"
    r"Read-only file system|EIO\b|Too many open files"
)


def parse_storage(records: Sequence[Record], index: int) -> Iterator[Event]:
    """Stall, full, error; /dev/shm apart from disks."""
    record = records[index]
    text = record.text
    if _BUS.search(text) or (_FULL.search(text) and _SHM.search(text)):
        yield record.event(EventKind.STORAGE, attrs={"what": "shm-full"})
    elif _FULL.search(text):
        yield record.event(EventKind.STORAGE, attrs={"what": "full"})
    elif found := _STALL.search(text):
        if not _RESTORED.search(text):
            yield record.event(EventKind.STORAGE, attrs={"what": "stall", "words": found[0][:100]})
    elif found := _ERROR.search(text):
        yield record.event(EventKind.STORAGE, attrs={"what": "error", "words": found[0][:100]})


_DF = re.compile(r"(?:\S+\s+){1,4}(?P<percent>100|99)%\s+(?P<mount>/\S*)\s*$")


def parse_df(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`df` rows of a full file system."""
    record = records[index]
    if found := _DF.search(record.text):
        what = "shm-full" if found["mount"] == "/dev/shm" else "full"
        yield record.event(EventKind.STORAGE, attrs={"what": what, "df": 1})


PARSERS = (
    Parser(
        "storage",
        (
            "No space left",
            "ENOSPC",
            "uota exceeded",
            "EDQUOT",
            "Lustre",
            "nfs: server",
            "GPFS",
            "mmfs",
            "blocked for more than",
            "BeeGFS",
            "ceph:",
            "ailover",
            "ail-over",
            "froze",
            "stall",
            "outage",
            "nresponsive",
            "not responding",
            "hung",
            "Stale file handle",
            "Input/output error",
            "Transport endpoint",
            "transport endpoint",
            "Remote I/O",
            "Read-only file",
            "us error",
            "shared memory",
            "Too many open files",
        ),
        parse_storage,
    ),
    Parser("df", ("100% /", "99% /"), parse_df),
)
