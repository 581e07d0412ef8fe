"""One logical line: joined where a terminal wrapped it, its prefixes read and taken off.

    physical lines --split--> --join wrapped--> Record(text without prefixes, rank, node, time ...)

Prefixes nest in any order: shipper's time stamp, mpirun, Ray, torchrun, `srun --label`, syslog,
`[rank3]:`, glog stamp, NCCL head. `[rankN]` is the global rank; `[Rank N]` in a text counts inside
its process group.
"""

import datetime
import functools
import re
from collections.abc import Callable, Iterator, Sequence

import msgspec

from relax_hpc.postmortem.evidence import Event, EventKind, Source

MAX_TEXT = 16_384
"""Characters of a record that parsers see: a corrupt file may hold a line of gigabytes."""

MAX_RANK = 1 << 18
"""Larger numbers are damage: what counts ranks up to one must not eat the memory."""

_SHOWN = 2_000
"""Characters of a line that a Source quotes."""


class Record(msgspec.Struct):
    """A logical line. Parsers search in `text`; nothing in it is trusted."""

    file: str
    line: int
    """Of the first physical line, 1-based."""
    raw: str
    """As it stands in the file, joined where it was wrapped."""
    text: str
    """Without prefixes."""
    rank: int | None = None
    """Global, from `[rankN]:`, mpirun, `srun --label`, Ray's actor name or the file's name."""
    local_rank: int | None = None
    node: str = ""
    pid: int | None = None
    time: float | None = None
    cuda_device: int | None = None
    level: str = ""
    """glog level letter, if any."""

    def source(self) -> Source:
        """Provenance of what this record says."""
        return Source(self.file, self.line, self.raw[:_SHOWN].strip())

    def event(self, kind: EventKind, **fields: object) -> Event:
        """Make an event; `fields` win over what the prefixes say, None does not."""
        known: dict[str, object] = {
            "rank": self.rank,
            "node": self.node,
            "pid": self.pid,
            "time": self.time,
        }
        known |= {name: value for name, value in fields.items() if value is not None}
        if isinstance(known["rank"], int) and not 0 <= known["rank"] < MAX_RANK:
            known["rank"] = None
        return Event(kind=kind, source=self.source(), **known)  # type: ignore[arg-type]


class Parser(msgspec.Struct, frozen=True):
    """A function of a record's neighbourhood and the literals that must stand in the record."""

    name: str
    literals: tuple[str, ...]
    function: Callable[[Sequence[Record], int], Iterator[Event]]
    """Gets the records of a window and the index of the one that holds a literal."""
    versions: str = ""


@functools.cache
def rx(pattern: str, flags: int = 0) -> re.Pattern[str]:
    r"""Compile a pattern whose blanks also match a wrap: every blank stands for `\s*`."""
    return re.compile(re.sub(r"(?<!\\) ", r"\\s*", pattern), flags)


# --------------------------------------------------------------------------------------------
# Prefixes
# --------------------------------------------------------------------------------------------

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-Z\\-_]|\[(?:\d{1,3})(?:;\d{1,3})*m")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f\u200b\ufeff]")

_HEADS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("mpi", re.compile(r"\[(?P<job>\d+),(?P<rank>\d+)\]<(?:stdout|stderr|stddiag)>:\s?")),
    (
        "ray",
        re.compile(
            r"[`'\"]?\((?P<name>[A-Za-z_][\w.:-]*)(?:\[(?P<tags>[^\]]*)\])?[^()"
            r"]{0,80}?\s?pid=(?P<pid>\d+)"
            r"(?:,\s*ip=(?P<node>[^)\s,]+))?[^)]*\)\s?"
        ),
    ),
    ("rank", re.compile(r"`?\[rank(?P<rank>\d+)[\[\]\s]*\]?:\s?")),
    ("torchrun", re.compile(r"\[[A-Za-z_]+?(?P<local>\d+)\]:(?=\S|\s|$)")),
    (
        "glog",
        re.compile(
            r"\[(?P<level>[EWIF])(?P<month>\d{1,2}?)(?P<day>\d{2}) "
            r"(?P<clock>\d\d:\d\d:\d\d(?:\.\d+)?)"
            r"\s+(?:\d+\s+)?(?=[\w./])"
        ),
    ),
    (
        "sglang",
        re.compile(
            r"\[(?P<stamp>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?: DP\d+)?"
            r"(?: TP(?P<rank>\d+))(?: \w+\d+)*\]\s?"
        ),
    ),
    ("elastic_role", re.compile(r"\[[\w.-]+\|(?P<rank>\d+)\]:\s?")),
    ("numbered", re.compile(r"\[\d+\] (?=\[|\()")),
    ("glog_old", re.compile(r"\[(?P<level>[EWIF])(?= [\w./]+\.(?:cpp|cu|hpp):\d)\s")),
    (
        "elastic",
        re.compile(
            r"(?P<level>[EWIF])(?P<month>\d{2})(?P<day>\d{2}) (?P<clock>\d\d:\d\d:\d\d\.\d+)\s+"
            r"(?P<pid>\d+)\s+(?=\S+\.py:\d)"
        ),
    ),
    (
        "syslog",
        re.compile(
            r"(?P<stamp>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|"
            r"\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d))"
            r" (?P<node>[A-Za-z0-9][\w.-]*) (?=kernel:|[\w./-]+(?:\[\d+\])?:\s)"
        ),
    ),
    (
        "stamp",
        re.compile(
            r"\[?(?P<stamp>\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?"
            r"(?:Z|[+-]\d\d:?\d\d)?)\]?"
            r"(?:\s*[:|]\s?|\s+|(?=\[))"
        ),
    ),
    ("clock", re.compile(r"(?P<clock>\d\d:\d\d:\d\d(?:\.\d+)?)\s+(?=\S)")),
    (
        "nccl",
        re.compile(
            r"(?P<node>[A-Za-z0-9.][\w.-]*):(?P<pid>\d+|X+)(?::(?:\d+|X+))? \[(?P<dev>-?\d+)\] "
        ),
    ),
    ("label", re.compile(r"(?P<rank>\d{1,5}): (?=\S)")),
    (
        "pdsh",
        re.compile(
            r"(?P<node>(?:[A-Za-z][\w-]*\d[\w.-]*|\d+\.\d+\.\d+\.\d+)): "
            r"(?=\[|NVRM|slurmstepd|srun:|kernel|nvidia|Traceback|[\w.-]+:\d+:\d+ )"
        ),
    ),
)
_LONG_RUN = 600
_RUN = re.compile(r"(?<![\w./+=:-])[\w./+=:-]{600,}+|(?<!\s)\s{600,}+")
"""A word or a gap of thousands of characters (base64, a damaged block) says nothing, and patterns
that begin with a name try each of its characters: 14 s for one line."""
_MAX_DIGITS = 40
_NUMBER = re.compile(r"(\d{40})\d+")
"""Python refuses to read numbers of thousands of digits; no message has one of forty."""
_LATE_RANK = re.compile(r"[^\[]{1,120}(?:\[\w+\] )?\[rank(?P<rank>\d+)[\[\]\s]*\]?:\s?(?=\[[EWIF])")
_GLOG = dict(_HEADS)["glog"]
_PROMPT = re.compile(r"^\S*?\b[a-z_][\w-]*@(?P<node>[A-Za-z0-9][\w.-]*)[ :][^$#%>]{0,80}[$#%>] ")
_FILE_RANK = re.compile(r"(?:^|[/_.-])(?:global_?)?rank[_-]?(\d{1,6})(?=\D|$)", re.IGNORECASE)
_FILE_LOCAL = re.compile(r"/attempt_\d+/(\d+)/std(?:err|out)(?:\.log)?$")


def rank_of_file(path: str) -> int | None:
    """Global rank that a file name tells (`rank_3.log`), if it does."""
    found = _FILE_RANK.findall(path)
    return int(found[-1]) if found else None


def clean(text: str) -> str:
    """Take off colours and control characters."""
    if "\x1b" in text or "m(" in text or "m[" in text:
        text = _ANSI.sub("", text)
    text = _CONTROL.sub("", text) if not text.isprintable() else text
    if len(text) > _LONG_RUN:
        text = _RUN.sub(lambda run: f"{run[0][:200]}...{run[0][-200:]}", text)
    return _NUMBER.sub(r"\1", text) if len(text) > _MAX_DIGITS else text


def make_record(file: str, line: int, raw: str, year: int, rank: int | None = None) -> Record:
    """Read the prefixes of one logical line."""
    text = clean(raw[:MAX_TEXT])
    record = Record(file=file, line=line, raw=raw, text=text, rank=rank)
    rest = text.lstrip(" `'\"|>")
    if prompt := _PROMPT.match(rest):
        record.node = prompt["node"]
    for _ in range(8):
        for name, pattern in _HEADS:
            if found := pattern.match(rest):
                _fill(record, name, found, year)
                rest = rest[found.end() :]
                break
        else:
            break
    if "[rank" in rest[:200] and (found := _LATE_RANK.match(rest)):
        # A prefix of somebody's own launcher before it.
        record.rank = int(found["rank"])
        rest = rest[found.end() :]
        if found := _GLOG.match(rest):
            _fill(record, "glog", found, year)
            rest = rest[found.end() :]
    record.text = rest
    return record


def _fill(record: Record, name: str, found: re.Match[str], year: int) -> None:
    part = {key: value for key, value in found.groupdict().items() if value is not None}
    if name == "ray":
        tags = re.search(r"\brank=(\d+)", part.get("tags", ""))
        if tags:
            record.rank = int(tags[1])
    if "rank" in part:
        record.rank = int(part["rank"])
    if "local" in part:
        record.local_rank = int(part["local"])
    if "node" in part:
        record.node = part["node"]
    if "pid" in part and part["pid"].isdigit():
        record.pid = int(part["pid"])
    if "dev" in part:
        record.cuda_device = int(part["dev"])
    if "level" in part:
        record.level = part["level"]
    stamp = _time(part, year)
    if stamp is not None:
        record.time = stamp


def _time(part: dict[str, str], year: int) -> float | None:
    try:
        if "month" in part:
            clock = datetime.time.fromisoformat(part["clock"][:15])
            day = datetime.date(year, int(part["month"]), int(part["day"]))
            return _unix(datetime.datetime.combine(day, clock))
        if "stamp" in part:
            return read_stamp(part["stamp"], year)
    except ValueError:
        return None
    return None


def read_stamp(text: str, year: int = 1970) -> float | None:
    """Unix time of an ISO or syslog stamp; without a zone it is taken as UTC. None if invalid."""
    try:
        if text[:1].isalpha():
            return _unix(datetime.datetime.strptime(f"{year} {text}", "%Y %b %d %H:%M:%S"))
        found = re.match(
            r"(\d{4}-\d\d-\d\d)[T_ ](\d\d:\d\d(?::\d\d)?)(?:[.,](\d{1,6}))?\d*(.*)", text
        )
        if found is None:
            return None
        zone = found[4].strip().replace("Z", "+00:00")
        fraction = f".{found[3]:0<6}" if found[3] else "" if found[2].count(":") == 2 else ":00"
        return _unix(datetime.datetime.fromisoformat(f"{found[1]}T{found[2]}{fraction}{zone}"))
    except ValueError:
        return None


def _unix(when: datetime.datetime) -> float:
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.UTC)
    return when.timestamp()


# --------------------------------------------------------------------------------------------
# Physical lines to records
# --------------------------------------------------------------------------------------------

_SPLIT = re.compile(
    r"(?<=\S)(?=\[rank\d+\]:\s?\[[EWIF])|(?<=[^:\s])(?=\[[EWIF] ProcessGroup)|(?<=\.)(?=slurmstepd)"
)
"""Two processes wrote into one line, or a progress bar had no newline."""

_NEW = re.compile(
    r"\s*(?:`?\[rank\d|\[[A-Za-z_]*\d+\]:|\[\d+,\d+\]<|\x1b|"
    r"`?\([A-Za-z_][\w.]*[^()]{0,60}pid=|slurm|srun|"
    r"sbatch|\[[EWIF] |\[[EWIF]\d|[EWIF]\d{4} \d\d:|\[?\d{4}-\d\d-\d\d|\d\d/\d\d/|\d\d:\d\d:\d\d|"
    r"Traceback|  File \"|frame #|Exception raised|terminate called|==>|#\d+ |[\w.-]+:\d+:\d+ \[|"
    r"[\w.]*(?:Error|Exception|Interrupt|Warning)\b:?|NCCL|Thread \d|Rank \d|Process \d|"
    r"[-=]{8,}|\[ *\+?\d+\.\d+\]|[A-Z][a-z]{2} [ \d]\d \d\d:|ncclremote|Last error|what\(\):|"
    r"\s*what\(\))"
)
_NEW_AFTER_PREFIX = re.compile(
    r".{0,150}?(?:\[rank\d+\]:|ProcessGroup\w+\.cpp:\d+\] ?\[|NCCL (?:INFO|WARN) |"
    r"slurmstepd: |srun: )"
)
_OPEN = (
    re.compile(
        r"WorkNCCL\([^)]*$|WorkNCCL\((?:[^()]|\(ms\))*\)(?! *(?:ran for \d+ mil|"
        r"timed out in))[^.]*$"
    ),
    re.compile(r"\.(?:cpp|cu|hpp):\d+\]\s*$"),
    re.compile(
        r"(?:operation timeout:|error or timeout\)|\) detected|detected by|"
        r"last enqueued|last completed|"
        r"NCCL work:?|collective timeout from|watchdog got stuck) *$"
    ),
    re.compile(r"CollectiveFingerPrint\((?:(?!memory_format).)*$"),
    re.compile(r"\[PG (?:ID )?[^\]]*(?:\]\s*)?$"),
    re.compile(
        r"(?:last (?:enqueued|completed)[a-zA-Z ]{0,14}|PG status:[^.]{0,80}|at work: ?\d*,?)$"
    ),
)
_JOINS = 14


def records(
    file: str,
    lines: Sequence[tuple[int, str]],
    year: int,
    width: int = 0,
    rank: int | None = None,
) -> Iterator[Record]:
    """Make records of consecutive physical lines (number, text without newline).

    A line of exactly `width` characters (what a terminal wrapped at, 0 = unknown) or one that
    ends inside a known construct continues on the next line unless that begins a record itself.
    `rank` is what the file's name tells; a prefix in the line wins.
    """
    index = 0
    while index < len(lines):
        number, text = lines[index]
        index += 1
        joined = 1
        while index < len(lines) and joined < _JOINS and _continues(lines, index, text, width):
            text = text + lines[index][1]
            index += 1
            joined += 1
        for piece in _SPLIT.split(text) if "[" in text or "slurmstepd" in text else (text,):
            yield make_record(file, number, piece, year, rank)


def _continues(lines: Sequence[tuple[int, str]], index: int, text: str, width: int) -> bool:
    after = lines[index][1]
    if not after.strip() or lines[index][0] != lines[index - 1][0] + 1:
        return False
    if (_NEW.match(after) or _NEW_AFTER_PREFIX.match(after)) and not _OPEN[1].search(text):
        return False
    if len(text) > MAX_TEXT:
        return False
    # A terminal is at least this wide; `abs` because a paste may lose or add a quote at one end.
    if width >= 72 and abs(len(lines[index - 1][1]) - width) <= 1:
        return True
    tail = text[-2000:]
    return any(pattern.search(tail) for pattern in _OPEN)


def wrap_width(lines: Sequence[str]) -> int:
    """Width at which a terminal wrapped these lines: the longest one, if it occurs often. Or 0."""
    lengths = [len(line) for line in lines if line]
    if not lengths:
        return 0
    longest = max(lengths)
    near = sum(1 for length in lengths if longest - 1 <= length <= longest)
    return longest - 1 if near >= 3 and longest <= 400 else 0
