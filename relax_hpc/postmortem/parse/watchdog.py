"""PyTorch's NCCL watchdog: time-outs, counters of groups, dump signals. Versions 1.8 to 2.14."""

import re
from collections.abc import Iterator, Sequence

from relax_hpc.postmortem.evidence import Event, EventKind, Group
from relax_hpc.postmortem.parse.record import Parser, Record, rx

UNKNOWN_NUMEL = 2**63
"""NumelIn of a coalesced operation is uint64(-1) in some builds."""

_WORK = rx(
    r"Work(?:NCCL|XCCL|HCCL|RCCL|MCCL|UCC)\((?:SeqNum=(?P<seq>\d+), )?OpType=(?P<op>[A-Za-z_ ]+?)"
    r"(?:, NumelIn=(?P<nin>\d+), NumelOut=(?P<nout>\d+))?(?:, [A-Z]\w*=[^,()]*)*, "
    r"Timeout \(ms\)=(?P<timeout>\d+)\)"
)
_CAUGHT = rx(r"\[Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: ")
_RAN = rx(r" ran for (?P<ran>\d+) milliseconds")
_BLOCKING = rx(r" timed out in blocking wait")
_PG = rx(
    r"\[PG (?:(?:ID )?(?P<id>\d+) )?(?:PG GUID (?P<uid>[\w:.-]+?) "
    r")?(?:\((?P<name>[^)]*)\) )?Rank (?P<rank>\d+)\]"
)
_COUNTERS = rx(
    r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), last completed (?:NCCL "
    r")?work: (?P<completed>-?\d+)",
    re.I,
)
_STARTED = rx(r"last started (?:NCCL )?work: (?P<started>-?\d+)", re.I)
_FAILED_AT = rx(
    r"(?:Timeout at NCCL work|detected by watchdog at work(?: sequence id)?): (?P<seq>\d+)"
)
_SIGNAL = rx(
    r"Received a dump signal due to a collective timeout from (?:(?P<self>this local "
    r"rank)|rank (?P<origin>\d+))"
)
_OBSERVED = rx(r"Observed flight recorder dump signal from another rank")
_FIRST = rx(
    r"First PG on this rank to signal dumping|First PG on this rank that detected no heartbeat"
)


def _int(text: str | None) -> int | None:
    return None if text is None else int(text)


def group_of(text: str) -> tuple[Group | None, int | None]:
    """Group and group-local rank of `[PG ID 2 PG GUID 9(name) Rank 4]`, all eras."""
    found = _PG.search(text)
    if found is None:
        return None, None
    name = (found["name"] or "").strip()
    uid = found["uid"] or (f"id{found['id']}" if found["id"] else "")
    # Before 2.5 there is no GUID; PG 0 is the default group there.
    return Group(uid=uid, name=name or ("default_pg" if found["id"] == "0" else "")), int(
        found["rank"]
    )


def global_rank(record: Record, group: Group | None, group_rank: int | None) -> int | None:
    """Rank of the prefix; without one, the number in brackets if the group allows that reading."""
    if record.rank is not None:
        return record.rank
    if group is None or group.name == "default_pg" or group.uid in ("0", "id0", "id1"):
        return group_rank
    return None


def parse_timeout(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`Watchdog caught collective operation timeout: WorkNCCL(...) ran for ...`."""
    record = records[index]
    for work in _WORK.finditer(record.text):
        before = record.text[: work.start()]
        after = record.text[work.end() :][:120]
        caught = list(_CAUGHT.finditer(before))
        bracket = re.findall(r"\[Rank\s*(\d+)\]", before)
        ran, blocking = _RAN.match(after), _BLOCKING.match(after)
        if not caught and not blocking and not ran:
            continue
        group, group_rank = group_of(before)
        if bracket:
            group_rank = int(bracket[-1])
        attrs: dict[str, str | int | float | tuple[int, ...]] = {}
        if blocking:
            attrs["blocking"] = 1
        if not work["seq"]:
            attrs["no_seq"] = 1
        yield record.event(
            EventKind.COLLECTIVE_TIMEOUT,
            rank=global_rank(record, group, group_rank),
            group_rank=group_rank,
            group=group,
            seq=_int(work["seq"]),
            op=re.sub(r"\s", "", work["op"]).lower().strip("_"),
            num_in=_numel(work["nin"]),
            num_out=_numel(work["nout"]),
            timeout_s=int(work["timeout"]) / 1000,
            duration_s=int(ran["ran"]) / 1000 if ran else None,
            attrs=attrs,
        )
    if not _WORK.search(record.text):
        yield from _cut_off(record)


def _cut_off(record: Record) -> Iterator[Event]:
    """The line ends inside WorkNCCL(...): keep what is there."""
    caught = _CAUGHT.search(record.text)
    if caught is None:
        return
    tail = record.text[caught.end() :]
    seq = rx(r"SeqNum=(\d+),").search(tail)
    op = rx(r"OpType=([A-Za-z_]+),").search(tail)
    size = rx(r"NumelIn=(\d+),").search(tail)
    yield record.event(
        EventKind.COLLECTIVE_TIMEOUT,
        rank=global_rank(record, None, int(caught["rank"])),
        group_rank=int(caught["rank"]),
        seq=_int(seq[1] if seq else None),
        op=op[1].lower().strip("_") if op else "",
        num_in=_numel(size[1] if size else None),
        attrs={"cut_off": 1},
    )


def _numel(text: str | None) -> int | None:
    value = _int(text)
    return None if value is None or value >= UNKNOWN_NUMEL else value


def parse_status(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`[PG ...] ... at work: N, last enqueued NCCL work: M, last completed NCCL work: K`."""
    record = records[index]
    counters, failed = _COUNTERS.search(record.text), _FAILED_AT.search(record.text)
    if counters is None and failed is None:
        return
    group, group_rank = group_of(record.text)
    if failed is None and _SIGNAL.search(record.text):
        return
    started = _STARTED.search(record.text)
    attrs: dict[str, str | int | float | tuple[int, ...]] = {"failed": 1} if failed else {}
    yield record.event(
        EventKind.WORK_STATUS,
        rank=global_rank(record, group, group_rank),
        group_rank=group_rank,
        group=group,
        seq=_int(failed["seq"] if failed else None),
        enqueued=_int(counters["enqueued"] if counters else None),
        completed=_int(counters["completed"] if counters else None),
        started=_int(started["started"] if started else None),
        attrs=attrs,
    )


_IDLE_ENQUEUED = rx(r"last enqueued (?:NCCL )?work: -1(?!\d)", re.I)


def parse_unused(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`Last enqueued NCCL work: -1` alone, as quoted in reports: no collective was in flight."""
    record = records[index]
    if _IDLE_ENQUEUED.search(record.text) and not _COUNTERS.search(record.text):
        yield record.event(EventKind.WORK_STATUS, enqueued=-1, completed=-1)


def parse_signal(records: Sequence[Record], index: int) -> Iterator[Event]:
    """Dump signals: who asked, who only observed."""
    record = records[index]
    group, group_rank = group_of(record.text)
    rank = global_rank(record, group, group_rank)
    if found := _SIGNAL.search(record.text):
        counters = _COUNTERS.search(record.text)
        origin = rank if found["self"] else int(found["origin"])
        yield record.event(
            EventKind.DUMP_SIGNAL,
            rank=rank,
            group=group,
            group_rank=group_rank,
            enqueued=_int(counters["enqueued"] if counters else None),
            completed=_int(counters["completed"] if counters else None),
            attrs={"local": 1} | ({} if origin is None else {"from_rank": origin})
            if found["self"]
            else {"from_rank": int(found["origin"])},
        )
    elif _OBSERVED.search(record.text):
        yield record.event(
            EventKind.DUMP_SIGNAL,
            rank=rank,
            group=group,
            group_rank=group_rank,
            attrs={"observed": 1},
        )
    elif _FIRST.search(record.text):
        yield record.event(
            EventKind.DUMP_SIGNAL,
            rank=rank,
            group=group,
            group_rank=group_rank,
            attrs={"local": 1} | ({} if rank is None else {"from_rank": rank}),
        )


_STUCK = rx(r"watchdog got stuck for (?P<seconds>\d+) seconds without making progress")
_MONITOR = rx(r"Heartbeat monitor timed out!")
_PENDING = rx(r"workMetaList_\.size\(\) = (?P<pending>\d+)")


def parse_heartbeat(records: Sequence[Record], index: int) -> Iterator[Event]:
    """The heartbeat monitor: the watchdog thread made no progress."""
    record = records[index]
    stuck = _STUCK.search(record.text)
    if stuck is None and not _MONITOR.search(record.text):
        return
    group, group_rank = group_of(record.text)
    pending = _PENDING.search(record.text)
    yield record.event(
        EventKind.HEARTBEAT,
        rank=global_rank(record, group, group_rank),
        group=group,
        group_rank=group_rank,
        duration_s=float(stuck["seconds"]) if stuck else None,
        attrs={} if pending is None else {"pending": int(pending["pending"])},
    )


_NO_RECORDER = rx(r"Stack trace of the failed collective not found|FlightRecorder is disabled")


def parse_note(records: Sequence[Record], index: int) -> Iterator[Event]:
    """Settings that decide what a post-mortem can know."""
    record = records[index]
    if _NO_RECORDER.search(record.text):
        yield record.event(EventKind.CONFIG_NOTE, attrs={"note": "flight-recorder-off"})


_WHOLE = re.compile(
    r"(?:timing out|completed\s*(?:NCCL\s*)?work:\s*-?\d+|process\s*down|data|value|trace:\s*\d|"
    r"collectives:\s*\d|call first\):?|hang|etc|TCPStore|blocking\s*wait|exception.*|\))[.\s]*$"
)


def parse_cut_off(records: Sequence[Record], index: int) -> Iterator[Event]:
    """The log ends in the middle of a message: that a rank is absent proves little then."""
    record = records[index]
    last = not any(after.text.strip() for after in records[index + 1 : index + 4])
    if last and record.level and not _WHOLE.search(record.text):
        yield record.event(EventKind.CONFIG_NOTE, attrs={"note": "cut-off"})


_ANY_FAILURE = rx(
    r"\[Rank (\d+)\] (?:Some NCCL operations have failed|To avoid data inconsistency|"
    r"ProcessGroupNCCL preparing to dump)|"
    r"PG [^\]]*Rank (\d+)\] ProcessGroupNCCL preparing to dump"
)


def parse_teardown(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`Some NCCL operations have failed or timed out`: this rank reports, position unknown."""
    record = records[index]
    if found := _ANY_FAILURE.search(record.text):
        yield record.event(
            EventKind.COLLECTIVE_TIMEOUT,
            rank=global_rank(record, None, int(found[1] or found[2])),
            attrs={"no_seq": 1, "vague": 1},
        )


PARSERS = (
    Parser(
        "timeout", ("WorkNCCL", "Watchdog caught", "WorkXCCL", "WorkHCCL"), parse_timeout, "1.8-"
    ),
    Parser(
        "status",
        (
            "last enqueued",
            "Last enqueued",
            "at work sequence id",
            "Timeout at NCCL",
            "detected by watchdog",
        ),
        parse_status,
        "2.2-",
    ),
    Parser("unused", ("enqueued NCCL work: -1", "enqueued work: -1"), parse_unused, "2.4-"),
    Parser("signal", ("dump signal", "First PG on this rank"), parse_signal, "2.7-"),
    Parser(
        "heartbeat",
        ("watchdog got stuck", "Heartbeat monitor timed", "watchdog", "got stuck"),
        parse_heartbeat,
        "2.2-",
    ),
    Parser("cut_off", ("ProcessGroup",), parse_cut_off),
    Parser("note", ("Stack trace of the failed", "FlightRecorder is"), parse_note, "2.7-"),
    Parser(
        "teardown",
        ("Some NCCL operations", "To avoid data inconsistency", "preparing to dump"),
        parse_teardown,
        "1.8-",
    ),
)
