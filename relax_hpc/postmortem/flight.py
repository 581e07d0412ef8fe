"""Flight-recorder dumps of PyTorch (NCCL, gloo, ...): read every version, whole or not.

    bytes --pickle or JSON--> plain containers --> Dump(rank, entries, groups)

A dump does not say whose it is: the rank stands in the name of its file only, as the number behind
`rank` or at the end (`nccl_trace_rank_node02_5` is rank 5 of node02). Numbers of collectives count
inside their process group; record numbers count per process and mean nothing to other ranks.

Sources: torch/csrc/distributed/c10d/FlightRecorder*.{hpp,cpp}, versions 1.x to 2.10 of its format.
"""

import gzip
import json
import re
import typing
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from relax_hpc.postmortem.plain_pickle import BrokenPickleError, UnsafePickleError, read_pickle

MAX_BYTES = 1 << 30
"""A larger file is no dump: 2000 entries with stacks are about 3 MB."""
MAX_ENTRIES = 1_000_000
"""Kept over all dumps; each keeps its newest when there are more."""
JsonValue = typing.Any


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One recorded operation of one rank."""

    record_id: int
    pg_id: int
    """Number of the group in this process: the key of `Dump.enqueued`."""
    group: str
    """Name of the process group (a number or hash), the same on all its members."""
    desc: str
    """`default_pg`, `TENSOR_MODEL_PARALLEL_GROUP`, ..."""
    seq: int
    """Number in its group, from 1: of collectives, or of point-to-point operations if `is_p2p`."""
    op_id: int
    op: str
    """Lower case, without backend and peer: all_reduce, _allgather_base, coalesced, send, ..."""
    backend: str
    peer: int | None
    """Group rank of the other side of a send or recv."""
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]
    state: str
    """scheduled | started | completed; gloo never leaves `scheduled`."""
    retired: bool
    created_ns: int
    completed_ns: int
    timeout_ms: int
    is_p2p: bool
    site: str
    """`file:line function` of the innermost frame outside torch; empty if not recorded."""

    def is_complete(self) -> bool:
        """Whether the recorder saw it end."""
        return self.state == "completed"

    def describe(self) -> str:
        """Write it as evidence."""
        sizes = " ".join(str(list(size)) for size in self.input_sizes[:4])
        number = "p2p_seq_id" if self.is_p2p else "collective_seq_id"
        peer = "" if self.peer is None else f" with group rank {self.peer}"
        dtypes = " ".join(dict.fromkeys(self.input_dtypes[:4]))
        parts = [
            f"record_id {self.record_id}, group {self.group} ({self.desc}), {number} {self.seq}:",
            f"{self.backend}:{self.op}{peer}",
            sizes,
            dtypes,
            self.state + (", retired" if self.retired else ""),
            f"at {self.site}" if self.site else "",
        ]
        return " ".join(part for part in parts if part)


class Dump(msgspec.Struct):
    """What one rank's recorder left."""

    file: str
    rank: int | None = None
    """Global rank, from the file name."""
    host: str = ""
    """From the file name, if it has one."""
    version: str = ""
    entries: list[Entry] = []
    """In the order of recording."""
    groups: dict[str, tuple[int, ...]] = {}
    """Name -> global ranks of the members; gloo does not tell them."""
    descs: dict[str, str] = {}
    enqueued: dict[int, int] = {}
    """Number of the group in this process -> newest collective, also if its entry is not there."""
    problem: str = ""
    """Why nothing, or not all, could be read; empty if all is well."""

    def is_readable(self) -> bool:
        """Whether it says anything about its rank."""
        return bool(self.entries or self.groups or self.version)


_NAME = re.compile(r"(?:trace|fr|flight|dump|recorder)[\w.-]*rank|(?:nccl|gloo)[\w.-]*trace", re.I)
_MARKS = (b"pg_config", b"collective_seq_id", b"record_id", b"nccl_version", b"comm_lib_version")


def is_dump(head: bytes, name: str) -> bool:
    """Whether a file is a flight-recorder dump, from its first few KB and its name.

    An empty file counts by its name: a rank that died while it wrote is a finding.
    """
    if head[:2] == b"\x1f\x8b":
        head = _gunzip(head)
    if not head.strip(b"\0 \r\n\t"):
        return bool(_NAME.search(Path(name).name))
    if head[:1] == b"\x80" or head.lstrip()[:1] in (b"{", b"["):
        return any(mark in head[:65536] for mark in _MARKS) or (
            head[:1] == b"\x80" and bool(_NAME.search(Path(name).name))
        )
    if head[:1] in (b"(", b"}", b"]", b"c"):  # pickle before protocol 2 is text
        return bool(_NAME.search(Path(name).name)) and b"pg_config" in head
    return False


def read_dump(data: bytes, file: str) -> Dump:
    """Read one dump; never raises for its content, `problem` says what was wrong."""
    dump = Dump(file=file)
    if data[:2] == b"\x1f\x8b":
        data = _gunzip(data)
    if not data.strip(b"\0 \r\n\t"):
        dump.problem = "the file is empty"
        return dump
    try:
        value, is_whole = _parse(data)
    except UnsafePickleError as err:
        dump.problem = f"refused, nothing was executed: {err}"
    except BrokenPickleError as err:
        dump.problem = f"not readable: {err}"
    else:
        _fill(dump, value)
        if not is_whole:
            dump.problem = f"cut off after {len(dump.entries)} entries"
        elif not dump.is_readable():
            dump.problem = "no flight-recorder dump"
    return dump


def read_dumps(files: Sequence[str]) -> list[Dump]:
    """Read dumps from files and tell their ranks. Unreadable ones carry a `problem`."""
    keep = max(100, MAX_ENTRIES // max(1, len(files)))
    dumps = []
    for file in files:
        try:
            with Path(file).open("rb") as stream:
                dump = read_dump(stream.read(MAX_BYTES), file)
        except OSError as err:
            dump = Dump(file=file, problem=f"not readable: {err.strerror}")
        dump.entries = dump.entries[-keep:]
        dumps.append(dump)
    return assign_ranks(dumps)


def _gunzip(data: bytes) -> bytes:
    """Return what can be unpacked, also of a cut-off file."""
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        return unpacker.decompress(data, MAX_BYTES)
    except (zlib.error, gzip.BadGzipFile):
        return b""


# --------------------------------------------------------------------------------------------
# Content
# --------------------------------------------------------------------------------------------


def _parse(data: bytes) -> tuple[JsonValue, bool]:
    if data.lstrip()[:1] in (b"{", b"["):
        return _parse_json(data.decode("utf-8", "replace").strip("\0 \r\n\t"))
    return read_pickle(data)


def _parse_json(text: str) -> tuple[JsonValue, bool]:
    try:
        return json.loads(text), True
    except (ValueError, RecursionError):
        return {"entries": list(_json_objects(text)), "version": "?"}, False


_JSON_START = re.compile(r"\{\s*\"(?=[a-z_0-9]+\"\s*:)")


def _json_objects(text: str) -> Iterable[JsonValue]:
    """Yield the whole entries of a cut-off file."""
    decoder = json.JSONDecoder()
    position = max(0, text.find('"entries"'))
    while start := _JSON_START.search(text, position):
        try:
            value, position = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            return
        yield value


def _fill(dump: Dump, value: JsonValue) -> None:
    if isinstance(value, list):  # version 1: entries only
        value = {"entries": value, "version": "1"}
    if not isinstance(value, dict):
        return
    entries = value.get("entries")
    config = value.get("pg_config")
    if not isinstance(entries, list) and not isinstance(config, dict):
        return
    dump.version = str(value.get("version", "?"))[:20]
    cache: dict[JsonValue, JsonValue] = {}
    for item in entries if isinstance(entries, list) else []:
        if isinstance(item, dict):
            dump.entries.append(_entry(item, cache))
    dump.entries.sort(key=lambda entry: entry.record_id)
    _fill_groups(dump, config if isinstance(config, dict) else {})
    status = value.get("pg_status")
    for key, item in status.items() if isinstance(status, dict) else ():
        if isinstance(item, dict):
            dump.enqueued[_integer(key)] = _integer(item.get("last_enqueued_collective"))


def _fill_groups(dump: Dump, config: dict[JsonValue, JsonValue]) -> None:
    for key, item in config.items():
        if not isinstance(item, dict):
            continue
        name = str(item.get("name", key))
        ranks = item.get("ranks", "")
        numbers = ranks if isinstance(ranks, (list, tuple)) else re.findall(r"\d{1,7}", str(ranks))
        members = sorted({_integer(number) for number in numbers} - {-1})
        if members:
            dump.groups[name] = tuple(members)
            dump.descs[name] = str(item.get("desc", ""))


_PEER = re.compile(r"(\d+)\s*(?:->|<-)\s*(\d+)")


def _entry(item: dict[str, JsonValue], cache: dict[JsonValue, JsonValue]) -> Entry:
    """Read an entry of any version; what is absent or of a wrong type counts as unknown."""
    name, desc = _group(item)
    backend, _, op = str(item.get("profiling_name", "")).rpartition(":")
    op, _, route = op.strip().lower().partition(" ")
    is_p2p = item.get("is_p2p") is True
    peers = _PEER.search(route)
    seq = item.get("p2p_seq_id") if is_p2p else item.get("collective_seq_id")
    fields = (
        _integer(item.get("record_id", item.get("id"))),
        _integer(item.get("pg_id")),
        _shared(cache, name),
        _shared(cache, desc),
        _integer(item.get("seq_id") if seq is None else seq),
        _integer(item.get("op_id")),
        _shared(cache, op[:80]),
        _shared(cache, backend[:20]),
        int(peers[2][:9]) if peers else None,
        _shared(cache, _sizes(item.get("input_sizes"))),
        _shared(cache, _sizes(item.get("output_sizes"))),
        _shared(cache, _words(item.get("input_dtypes"))),
        _shared(cache, _words(item.get("output_dtypes"))),
        _shared(cache, str(item.get("state", ""))[:20]),
        item.get("retired") is True,
        _integer(item.get("time_created_ns")),
        _integer(item.get("time_discovered_completed_ns")),
        _integer(item.get("timeout_ms")),
        is_p2p,
        _shared(cache, _site(item.get("frames"))),
    )
    return Entry(*fields)


def _shared(cache: dict[JsonValue, JsonValue], value: JsonValue) -> JsonValue:
    return cache.setdefault(value, value)


def _group(item: dict[str, JsonValue]) -> tuple[str, str]:
    group = item.get("process_group")
    if isinstance(group, (list, tuple)) and group:
        return str(group[0]), str(group[1]) if len(group) > 1 else ""
    return str(item.get("pg_name", item.get("pg_id", ""))), str(item.get("pg_desc", ""))


def _integer(value: JsonValue) -> int:
    """Return a number that may be written as text (JSON), -1 if there is none."""
    if isinstance(value, (int, float)) and abs(value) < 1 << 63:
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
        return int(value)
    return -1


def _sizes(value: JsonValue) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, (list, tuple)):
        return ()
    return tuple(
        tuple(_integer(n) for n in size[:16]) for size in value if isinstance(size, (list, tuple))
    )


def _words(value: JsonValue) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, (list, tuple)) else ()


_LIBRARY = re.compile(r"[/\\]torch[/\\](?:distributed|_|nn|utils|autograd)|^<|c10d_logger")


def _site(frames: JsonValue) -> str:
    """Return the innermost frame that is not of torch itself, else the innermost one."""
    if not isinstance(frames, (list, tuple)):
        return ""
    innermost = ""
    for frame in frames:
        file = str(frame.get("filename", "")) if isinstance(frame, dict) else ""
        if not file:
            continue
        site = f"{file[-120:]}:{_integer(frame.get('line'))} {str(frame.get('name', ''))[:60]}"
        if not _LIBRARY.search(file):
            return site.strip()
        innermost = innermost or site.strip()
    return innermost


# --------------------------------------------------------------------------------------------
# Whose dump is it
# --------------------------------------------------------------------------------------------

_ENDING = re.compile(r"\.(?:json|pickle|pkl|pt|bin|dump|trace|txt|gz|zst|log)$", re.IGNORECASE)
_LAST = re.compile(r"(\d{1,7})(?!.*\d)")
_BEHIND_RANK = re.compile(r"rank[_.=-]?(\d{1,7})(?![\d.]*\d)", re.IGNORECASE)
_HOST = re.compile(
    r"^.*(?:rank|trace|dump)[_-](?!rank[_-])([A-Za-z0-9][\w.-]*?)[_-]\d+$", re.IGNORECASE
)


def assign_ranks(dumps: Iterable[Dump]) -> list[Dump]:
    """Tell ranks and hosts from the file names; of several dumps of a rank the newest stays.

    Folders with the same ranks are attempts: only the newest one counts, also where it lacks the
    dump of a rank, which is the finding. Folders of different ranks (one per node) belong together.
    """
    dumps = list(dumps)
    stems = [_stem(dump.file) for dump in dumps]
    readers = (_BEHIND_RANK, _LAST) if _tells_apart(stems) else (_LAST, _BEHIND_RANK)
    folders: dict[str, dict[int | str, Dump]] = {}
    for dump, stem in zip(dumps, stems, strict=True):
        found = readers[0].search(stem) or readers[1].search(stem)
        dump.rank = int(found[1]) if found else None
        host = _HOST.search(stem)
        dump.host = host[1] if host and not host[1].isdigit() else ""
        key = dump.file if dump.rank is None else dump.rank
        folder = folders.setdefault(str(Path(dump.file).parent), {})
        if key not in folder or _age(folder[key]) <= _age(dump):
            folder[key] = dump
    newest: dict[int | str, Dump] = {}
    for folder in sorted(folders.values(), key=lambda f: -max(map(_age, f.values()))):
        if not newest.keys() & folder.keys():
            newest |= folder
    return sorted(newest.values(), key=lambda dump: -1 if dump.rank is None else dump.rank)


def _stem(file: str) -> str:
    name = Path(file).name
    while (short := _ENDING.sub("", name)) != name:
        name = short
    return name


def _tells_apart(stems: Sequence[str]) -> bool:
    """Whether the numbers behind `rank` name every file, so that they are no host's."""
    found = [_BEHIND_RANK.search(stem) for stem in stems]
    return all(found) and len({match[1] for match in found if match}) == len(set(stems))


def _age(dump: Dump) -> int:
    return max((entry.created_ns for entry in dump.entries), default=-1)
