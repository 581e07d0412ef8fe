"""Ranks that disagree: DETAIL fingerprints, desync reports, monitored barriers."""

import re
from collections.abc import Iterator, Sequence

from relax_hpc.postmortem.evidence import Event, EventKind, Group
from relax_hpc.postmortem.parse.record import Parser, Record, rx

_FINGERPRINT = rx(
    r"(?:Rank (?P<rank>\d+) is running (?:inconsistent )?collective: "
    r")?CollectiveFingerPrint\((?:SequenceNumber=(?P<seq>\d+), )?OpType=(?P<op>\w+)"
    r"(?:, TensorShape=\[(?P<shape>[\d, ]*)\])?(?:, TensorDtypes=(?P<dtype>\w+))?"
)
_DIFFERS = rx(r"but Rank (?P<rank>\d+) is running (?:inconsistent )?collective: ")


def parse_fingerprint(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`Detected mismatch between collectives ... Rank 0 is running ... CollectiveFingerPrint(`."""
    record = records[index]
    before = 0
    for found in _FINGERPRINT.finditer(record.text):
        between = record.text[before : found.start()]
        other = _DIFFERS.search(between)
        rank = found["rank"] or (other["rank"] if other else None)
        before = found.end()
        yield record.event(
            EventKind.COLLECTIVE_MISMATCH,
            rank=int(rank) if rank is not None else None,
            seq=int(found["seq"]) if found["seq"] else None,
            op=found["op"].lower(),
            attrs={
                "shape": re.sub(r"\s", "", found["shape"] or ""),
                "dtype": found["dtype"] or "",
                "by": "fingerprint",
            },
        )


_DESYNC_COLLECTIVE = rx(
    r"\[(?P<ranks>\d+(?:, ?\d+)*)\] (?P<verb>joined but didn't finish|"
    r"finished) collective #(?P<seq>\d+)(?: ?\((?P<op>[A-Z_a-z]+))?"
)
_DESYNC_MISSING = rx(
    r"(?:our |my )?(?:last|ended at) collective|"
    r"Timeout at collective: (?P<op>[A-Z_a-z]+), #(?P<seq>\d+)"
)
_DESYNC_ABSENT = rx(
    r"\[(?P<ranks>\d+(?:, ?\d+)*)\] (?:did not join|didn't join|never entered|"
    r"hasn't started)|ranks? \[(?P<ranks2>\d+(?:, ?\d+)*)\] (?:did not join|"
    r"didn't join|are missing|have not)"
)
_DESYNC_SUMMARY = rx(
    r"To our best knowledge, (?:the lagging/dead/mismatched ranks that caused the "
    r"desync are:|ranks \[(?P<lag>\d+(?:, ?\d+)*)\] are the lagging ranks)"
)
_DESYNC_SUSPECT = re.compile(
    r"-?\s*\[(?P<ranks>\d+(?:,\s*\d+)*)\]\s*(?P<what>joined but didn't finish "
    r"collective|finished collective|joined collective|did(?:n't| not) join|"
    r"are the lagging ranks|is? ?the lagging)"
)


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))[:65536]


def parse_desync(records: Sequence[Record], index: int) -> Iterator[Event]:
    """TORCH_NCCL_DESYNC_DEBUG: who finished which collective, and PyTorch's own suspects."""
    record = records[index]
    if _DESYNC_SUMMARY.search(record.text):
        for below in records[index : index + 12]:
            if found := _DESYNC_SUSPECT.search(below.text):
                op = _DESYNC_COLLECTIVE.search(below.text)
                yield below.event(
                    EventKind.RANK_ABSENT,
                    rank=record.rank,
                    seq=int(op["seq"]) if op else None,
                    op=(op["op"] or "").lower() if op else "",
                    attrs={
                        "reason": "desync-suspect",
                        "ranks": _ranks(found["ranks"]),
                        "verb": found["what"],
                    },
                )
            if "Snapshot of ranks" in below.text:
                break
        return
    for found in _DESYNC_COLLECTIVE.finditer(record.text):
        yield record.event(
            EventKind.RANK_ABSENT,
            seq=int(found["seq"]),
            op=(found["op"] or "").lower(),
            attrs={
                "reason": "desync-"
                + ("joined" if found["verb"].startswith("joined") else "finished"),
                "ranks": _ranks(found["ranks"]),
            },
        )
    for found in _DESYNC_ABSENT.finditer(record.text):
        yield record.event(
            EventKind.RANK_ABSENT,
            attrs={
                "reason": "desync-suspect",
                "ranks": _ranks(found["ranks"] or found["ranks2"]),
                "verb": "did not join",
            },
        )


_MONITORED = rx(
    r"(?:\[Rank \d+\]: )?Ranks? (?P<ranks>\d+(?:, ?\d+)*) failed to pass "
    r"monitoredBarrier in (?P<ms>\d+) ms"
)
_MONITORED_PEER = rx(
    r"successfully reached monitoredBarrier, but received errors while waiting (?:for "
    r"send/recv from|to be unblocked by) rank (?P<rank>\d+)"
)


def parse_monitored_barrier(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`Rank 1 failed to pass monitoredBarrier in 30000 ms`."""
    record = records[index]
    if found := _MONITORED.search(record.text):
        yield record.event(
            EventKind.RANK_ABSENT,
            attrs={"reason": "monitored-barrier", "ranks": _ranks(found["ranks"])},
        )
    elif found := _MONITORED_PEER.search(record.text):
        yield record.event(
            EventKind.RANK_ABSENT,
            attrs={"reason": "monitored-barrier", "ranks": (int(found["rank"]),)},
        )


_NCCL_MISMATCH = re.compile(
    r"(?:NCCL WARN|Error|ncclInvalidUsage).{0,80}?(?P<what>[Mm]ismatched collective|"
    r"Message truncated : received (?P<got>\d+) bytes instead of (?P<want>\d+)|"
    r"[Cc]ollective mismatch)"
)
_SIZE = re.compile(
    r"(?:tensors? (?:size|shape)s? (?:mismatch|must be|of .*? differ)|size mismatch.*?collective)",
    re.I,
)


def parse_nccl_mismatch(records: Sequence[Record], index: int) -> Iterator[Event]:
    """NCCL's own check: `Message truncated : received X bytes instead of Y`."""
    record = records[index]
    if found := _NCCL_MISMATCH.search(record.text):
        yield record.event(
            EventKind.COLLECTIVE_MISMATCH,
            group=Group(),
            attrs={"by": "nccl", "what": found["what"][:100]},
        )


PARSERS = (
    Parser("fingerprint", ("CollectiveFingerPrint",), parse_fingerprint, "1.11-"),
    Parser(
        "desync",
        ("collective #", "To our best knowledge", "did not join", "didn't join"),
        parse_desync,
        "1.12-",
    ),
    Parser("monitored_barrier", ("monitoredBarrier",), parse_monitored_barrier, "1.9-"),
    Parser(
        "nccl_mismatch",
        ("Message truncated", "ismatched collective", "ollective mismatch"),
        parse_nccl_mismatch,
    ),
)
