"""GPU, PCIe, NVLink and host memory faults as kernel, driver, NVML and CUDA name them."""

import re
from collections.abc import Iterator, Sequence

from relax_hpc.postmortem.evidence import Event, EventKind
from relax_hpc.postmortem.parse.record import Parser, Record

_XID = re.compile(
    r"\bX(?:id|ID)s?\b(?:\s*\((?:PCI:)?(?P<gpu>[0-9A-Fa-f:.]+)\))?\s*(?:[Ee]rrors?|code|event)?"
    r"\s*[:=#]?\s*(?P<xid>[1-9]\d{0,2})\b(?!\.\d)"
)
_XID_DENIED = re.compile(r"\b(?:no|without|any|not an?) X(?:id|ID)", re.I)
_PID = re.compile(r"pid='?(\d+)")

CONSEQUENCES = frozenset({13, 31, 43, 45})
"""Xids of the program (13, 31, 43) or of the clean-up after another fault (45)."""

NVLINK_XIDS = frozenset({74, 144, 145, 146, 147, 148, 149, 150})
ECC_XIDS = frozenset({48, 63, 64, 92, 94, 95, 160, 161, 171, 172})
LOST_XIDS = frozenset({79, 154})


def parse_xid(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`NVRM: Xid (PCI:0000:dc:00): 149, pid=..., name=...` and monitors that quote it."""
    record = records[index]
    gpu = ""
    if _XID_DENIED.search(record.text):
        return
    for found in _XID.finditer(record.text):
        xid = int(found["xid"])
        gpu = found["gpu"] or gpu  # "Xid (PCI:...): 45, ... caused by previous Xid 149"
        pid = _PID.search(record.text)
        yield record.event(
            EventKind.GPU_FAULT,
            pid=int(pid[1]) if pid else None,
            attrs={"xid": xid, "gpu": gpu, "what": _xid_kind(xid)},
        )


def _xid_kind(xid: int) -> str:
    if xid in LOST_XIDS:
        return "lost"
    if xid in NVLINK_XIDS:
        return "nvlink"
    return "ecc" if xid in ECC_XIDS else "xid"


_FAULTS = (
    (
        "ecc",
        re.compile(
            r"uncorrectable (?:NVLink|ECC) error|(?:double.bit|uncorrectable|"
            r"DBE)\s+ECC\s+errors?(?!s?\s*[:=]?\s*0\b)|"
            r"cudaErrorECCUncorrectable|ECC error encountered",
            re.I,
        ),
    ),
    (
        "lost",
        re.compile(
            r"[Gg][Pp][Uu] has fallen off the bus|"
            r"Unable to determine the device handle|GPU is lost|GPU_IS_LOST|"
            r"cudaErrorDeviceUnavailable|GPU at PCI:\S+ has fallen|"
            r"No devices were found|nvmlDeviceGetHandle\w* failed"
        ),
    ),
    (
        "nvlink",
        re.compile(
            r"cudaErrorNvlinkUncorrectable|uncorrectable NVLink error|"
            r"NVLink.{0,40}(?:fatal|uncorrectable|link failure)|SXid.{0,60}|"
            r"nvidia-nvswitch\d*:.{0,60}[Ff]atal|NVLink: Link \d+ (?:error|down)",
            re.I,
        ),
    ),
    (
        "xid",
        re.compile(
            r"cudaErrorHardwareStackError|unspecified hardware (?:failure|error)|"
            r"GSP (?:RPC )?(?:timeout|task)|Timeout waiting for RPC from GSP",
            re.I,
        ),
    ),
)
_BUS = re.compile(
    r"(?:GPU|PCI:?|gpu )\s*:?((?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.\d)?)"
)


def parse_fault(records: Sequence[Record], index: int) -> Iterator[Event]:
    """ECC, lost GPU, NVLink in words, from CUDA, NVML, nvidia-smi or the driver."""
    record = records[index]
    if _XID.search(record.text):
        return
    for what, pattern in _FAULTS:
        if found := pattern.search(record.text):
            if what == "ecc" and "nvlink" in found[0].lower():
                continue
            bus = _BUS.search(record.text)
            yield record.event(
                EventKind.GPU_FAULT,
                node=record.node or _node_near(records, index),
                attrs={"what": what, "gpu": bus[1] if bus else "", "words": found[0][:80]},
            )
            return


def _node_near(records: Sequence[Record], index: int) -> str | None:
    for record in reversed(records[max(0, index - 5) : index]):
        if record.node:
            return record.node
    return None


_AER = re.compile(
    r"AER: (?P<soft>Corrected |Multiple Corrected )?(?P<hard>Uncorrect\w+ \((?:Fatal|"
    r"Non-Fatal)\)|Fatal)?.*?error(?: message)? received|"
    r"PCIe Bus Error: severity=(?P<severity>\w+)"
)
_DEVICE = re.compile(r"(?P<dev>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d)")


def parse_aer(records: Sequence[Record], index: int) -> Iterator[Event]:
    """PCIe advanced error reporting; a storm of corrected errors is a bad link, one is noise."""
    record = records[index]
    found = _AER.search(record.text)
    if found is None:
        return
    soft = bool(found["soft"]) or (found["severity"] or "").startswith("Corrected")
    device = _DEVICE.search(record.text)
    yield record.event(
        EventKind.GPU_FAULT,
        node=record.node or _node_near(records, index),
        attrs={
            "what": "aer-corrected" if soft else "aer-fatal",
            "gpu": device["dev"] if device else "",
        },
    )


_FABRIC = re.compile(
    r"Failed to bind NVLink SHARP|error in the Fabric Manager|"
    r"fabric ?manager.{0,60}(?:fail|not running|error|inactive|degraded)|"
    r"CUDA error 802|system not yet initialized|cudaErrorSystemNotReady|"
    r"NVSwitch.{0,40}(?:fail|fatal|not ready)|Fabric State.{0,30}(?:not|fail)",
    re.I,
)


def parse_fabric(records: Sequence[Record], index: int) -> Iterator[Event]:
    """Fabric manager and NVSwitch set-up: NVLS binding, error 401/802."""
    record = records[index]
    if found := _FABRIC.search(record.text):
        yield record.event(
            EventKind.GPU_FAULT, attrs={"what": "fabric", "words": found[0][:80], "gpu": ""}
        )


_HOST_MEMORY = re.compile(
    r"Uncorrect(?:ed|able) (?:hardware )?memory error|UNCORRECTABLE MEMORY ERROR|"
    r"EDAC .*\bUE\b|Hardware Error.*Uncorrected|mce: .*Machine [Cc]heck.*[Uu]ncorrect"
)


def parse_host_memory(records: Sequence[Record], index: int) -> Iterator[Event]:
    """Uncorrectable errors of host memory (MCE, EDAC, Slurm)."""
    record = records[index]
    if _HOST_MEMORY.search(record.text):
        yield record.event(EventKind.GPU_FAULT, attrs={"what": "host-memory", "gpu": ""})


PARSERS = (
    Parser("xid", ("Xid ", "Xid:", "Xid(", "XID ", "XID:"), parse_xid),
    Parser(
        "fault",
        (
            " ECC",
            "ErrorECC",
            "allen off the bus",
            "device handle",
            "GPU is lost",
            "GPU_IS_LOST",
            "DeviceUnavailable",
            "No devices were found",
            "nvmlDevice",
            "NVLink",
            "Nvlink",
            "nvswitch",
            "SXid",
            "hardware failure",
            "HardwareStack",
            "GSP ",
            "ecc error",
        ),
        parse_fault,
    ),
    Parser("aer", ("AER:", "PCIe Bus Error"), parse_aer),
    Parser(
        "fabric",
        (
            "NVLink SHARP",
            "abric",
            "CUDA error 802",
            "SystemNotReady",
            "not yet initialized",
            "NVSwitch",
        ),
        parse_fabric,
    ),
    Parser("host_memory", ("ncorrect", "UNCORRECTABLE MEMORY", "EDAC"), parse_host_memory),
)
