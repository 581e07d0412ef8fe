"""NCCL's network side: completion errors (four generations), async events, queue pairs, sockets."""

import re
from collections.abc import Iterator, Sequence

from relax_hpc.postmortem.evidence import Event, EventKind
from relax_hpc.postmortem.parse.record import Parser, Record, rx

_STATUS_NAMES = {
    "IBV_WC_LOC_LEN_ERR": 1,
    "IBV_WC_LOC_QP_OP_ERR": 2,
    "IBV_WC_LOC_PROT_ERR": 4,
    "IBV_WC_WR_FLUSH_ERR": 5,
    "IBV_WC_MW_BIND_ERR": 6,
    "IBV_WC_BAD_RESP_ERR": 7,
    "IBV_WC_LOC_ACCESS_ERR": 8,
    "IBV_WC_REM_INV_REQ_ERR": 9,
    "IBV_WC_REM_ACCESS_ERR": 10,
    "IBV_WC_REM_OP_ERR": 11,
    "IBV_WC_RETRY_EXC_ERR": 12,
    "IBV_WC_RNR_RETRY_EXC_ERR": 13,
    "IBV_WC_REM_ABORT_ERR": 16,
    "IBV_WC_FATAL_ERR": 19,
    "IBV_WC_RESP_TIMEOUT_ERR": 20,
    "IBV_WC_GENERAL_ERR": 21,
}
_COMPLETION = re.compile(
    r"Got completion (?:from|with)\s*(?:peer\s*(?P<peer>[^\s<]+)(?:<(?P<port>\d+)>)?)?.*?"
    r"(?:status\s*=\s*(?P<name>[A-Z_a-z ]*?)\(?(?P<status>\d+)\)?|error (?P<error>\d+))"
)
_HCA = re.compile(r"\bhca\s+(\S+)")
_LOCAL_GID = re.compile(r"localGid\s*:?\s*([0-9A-Fa-f:.]{4,})")
_REMOTE_GID = re.compile(r"remoteGids?\s*:?\s*([0-9A-Fa-f:.]{4,})")


def parse_completion(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`NET/IB : Got completion from peer ... with error 12|status=12|status=NAME(12)`."""
    record = records[index]
    found = _COMPLETION.search(record.text)
    if found is None:
        return
    number = int(found["status"] or found["error"])
    for name, value in _STATUS_NAMES.items():
        if found["name"] and name in found["name"]:
            number = value
    attrs: dict[str, str | int | float | tuple[int, ...]] = {
        "status": number,
        "peer": found["peer"] or "",
    }
    for key, pattern in (("hca", _HCA), ("local_gid", _LOCAL_GID), ("remote_gid", _REMOTE_GID)):
        if extra := pattern.search(record.text):
            attrs[key] = extra[1].removeprefix("::ffff:").removeprefix(":ffff:")
    if record.cuda_device is not None:
        attrs["cuda_device"] = record.cuda_device
    yield record.event(EventKind.NET_ERROR, attrs=attrs)


_ASYNC = re.compile(
    r"(?:(?P<hca>[\w.-]+)(?::(?P<port>\d+))? )?Got (?:(?P<soft>non-fatal) )?async "
    r"(?:event|error event)\s*:\s*(?P<what>[^\n]+)",
    re.I,
)
_FATAL_ASYNC = re.compile(
    r"catastrophic|device fatal|port error|port (?:is )?down|fatal|QP .*(?:error|access)", re.I
)
_RECOVERED = re.compile(
    r"port active|client reregist|LID change|GID (?:table )?change|pkey|SM change", re.I
)


def parse_async(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`NET/IB : [mlx5_0:1] Got async event : port error|local catastrophic error`."""
    record = records[index]
    found = _ASYNC.search(record.text)
    if found is None:
        return
    what = found["what"].strip()
    soft = bool(found["soft"]) or bool(_RECOVERED.search(what)) or not _FATAL_ASYNC.search(what)
    yield record.event(
        EventKind.LINK_EVENT,
        attrs={"what": what[:80], "hca": found["hca"] or "", "fatal": int(not soft), "layer": "ib"},
    )


_KERNEL_LINK = re.compile(
    r"(?P<hca>mlx\d_\w+|mlx5_core|\w*ib\d+|hfi1_\d|bnxt_re\d*|irdma\d*|efa_\d|en[ops]\w+|ib\d)\b.*?"
    r"(?P<what>link is not ready|Link (?:is )?[Dd]own|[Ll]ink down|health compromised|"
    r"device's health|Fatal(?: error)?|unexpected removal|Port \d+ (?:down|inactive)|"
    r"NIC Link is Down|CQE error|"
    r"link becomes? down|port module event.*(?:unplugged|error|disabled))"
)


def parse_kernel_link(records: Sequence[Record], index: int) -> Iterator[Event]:
    """Kernel lines about an adapter's link or health (mlx5_core, hfi1, bnxt, irdma)."""
    record = records[index]
    if found := _KERNEL_LINK.search(record.text):
        yield record.event(
            EventKind.LINK_EVENT,
            attrs={"what": found["what"][:80], "hca": found["hca"], "fatal": 1, "layer": "kernel"},
        )


_MODIFY = rx(
    r"Call to (?:wrap_)?ibv_modify_qp failed(?: with)?(?: error)? "
    r"(?P<errno>\d+)? ?(?P<what>[A-Z][a-z]+(?:\s[a-z]+){0,4})?"
)
_MODIFY_EXTRA = {
    "dev": re.compile(r"\bon dev (\S+?),"),
    "local_gid": re.compile(r"local GID (?!index)(\S+?)(?:,|$)"),
    "remote_gid": re.compile(r"remote GID (?!index)(\S+?)(?:,|$)"),
}


def parse_modify_qp(records: Sequence[Record], index: int) -> Iterator[Event]:
    """Queue pairs that cannot be connected: `ibv_modify_qp failed with [error|110] ...`."""
    record = records[index]
    found = _MODIFY.search(record.text)
    if found is None:
        return
    attrs: dict[str, str | int | float | tuple[int, ...]] = {
        "call": "modify_qp",
        "what": (found["what"] or "").strip(),
    }
    if found["errno"]:
        attrs["errno"] = int(found["errno"])
    for key, pattern in _MODIFY_EXTRA.items():
        if extra := pattern.search(record.text):
            attrs[key] = extra[1].removeprefix("::ffff:")
    yield record.event(EventKind.NET_ERROR, attrs=attrs)


_OPEN_DEVICE = rx(
    r"Unable to open device (?P<hca>[\w.-]+)|ibv_open_device\(?(?P<hca2>[\w.-]*)\)? failed"
)
_NO_DEVICE = re.compile(
    r"NET/IB : No device found|No IB devices? found|could not find (?:device|HCA) (?P<hca>[\w.-]+)",
    re.I,
)


def parse_nic_missing(records: Sequence[Record], index: int) -> Iterator[Event]:
    """An adapter that one node cannot open."""
    record = records[index]
    if found := _OPEN_DEVICE.search(record.text):
        hca = found["hca"] or found["hca2"] or ""
        yield record.event(
            EventKind.LINK_EVENT,
            attrs={"what": "cannot open", "hca": hca, "fatal": 1, "layer": "open"},
        )


_REGISTER = re.compile(
    r"Call to ibv_reg_(?:dmabuf_)?mr(?:_iova2)? failed(?: with error)? ?(?P<what>[^\n]*)"
)
_OTHER_IBV = re.compile(r"Call to (?P<call>ibv_\w+) failed(?: with error)? ?(?P<what>[^\n]*)")


def parse_register(records: Sequence[Record], index: int) -> Iterator[Event]:
    """Memory registration and other verbs calls that failed."""
    record = records[index]
    if found := _REGISTER.search(record.text):
        yield record.event(
            EventKind.NET_ERROR, attrs={"call": "reg_mr", "what": found["what"][:80]}
        )
    elif (found := _OTHER_IBV.search(record.text)) and found["call"] not in (
        "ibv_modify_qp",
        "ibv_get_async_event",
    ):
        yield record.event(
            EventKind.NET_ERROR, attrs={"call": found["call"], "what": found["what"][:80]}
        )


_CLOSED = re.compile(
    r"Connection closed by remote peer\s+(?P<peer>[^\s<]+)?(?:<(?P<port>\d+)>)?"
    r"|Call to (?:recv|send|connect|recvmsg|sendmsg)\w* (?:from|"
    r"to)\s+(?P<peer2>[^\s<]+)(?:<\d+>)?\s*"
    r"(?:failed|returned|timed?)\s*:?\s*(?P<what>[^\n,]*)"
    r"|socketPollConnect:? (?:connect to|"
    r"connecting to address)\s*(?P<peer3>[^\s<]+)<\d+>[^\n]*?(?P<what3>Connection "
    r"refused|timed out|No route to host|Connection reset)"
)


def parse_socket(records: Sequence[Record], index: int) -> Iterator[Event]:
    """NCCL sockets: `Connection closed by remote peer X`, `Call to recv from X failed : ...`."""
    record = records[index]
    found = _CLOSED.search(record.text)
    if found is None:
        return
    peer = found["peer"] or found["peer2"] or found["peer3"] or ""
    what = (found["what"] or found["what3"] or "closed").strip()
    own = record.node.split(".")[0]
    yield record.event(
        EventKind.PEER_LOST,
        attrs={
            "peer": peer,
            "what": what,
            "layer": "nccl",
            "self": int(bool(own) and peer.split(".")[0] == own),
            "connect": int("connect" in found[0].lower() and "closed" not in found[0].lower()),
        },
    )


_REMOTE = re.compile(r"ncclRemoteError:|remote process exited or there was a network error")


def parse_remote_error(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`ncclRemoteError: A call failed possibly due to a network error or a remote process ...`."""
    record = records[index]
    if _REMOTE.search(record.text):
        yield record.event(
            EventKind.PEER_LOST,
            attrs={"peer": "", "what": "ncclRemoteError", "layer": "nccl-remote"},
        )


_INIT = re.compile(
    r"(?:comm (?P<comm>0x[0-9a-f]+) )?rank (?P<rank>\d+) n[Rr]anks (?P<n>\d+)(?: "
    r"cudaDev (?P<dev>\d+))?"
    r"(?: nvmlDev \d+)?(?: busId (?P<bus>[0-9a-fA-F]+))?(?: commId (?P<id>0x[0-9a-f]+))?"
)


def parse_init(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`comm 0x.. rank r nranks n cudaDev d busId b commId 0x.. - Init COMPLETE`: rank to node."""
    record = records[index]
    if found := _INIT.search(record.text):
        yield record.event(
            EventKind.CONFIG_NOTE,
            attrs={
                "note": "comm-rank",
                "comm_rank": int(found["rank"]),
                "nranks": int(found["n"]),
                "bus": found["bus"] or "",
                "comm": found["id"] or "",
            },
        )


_BOOTSTRAP = re.compile(r"Bootstrap ?: Using [^\s:]+:(?P<ip>[0-9a-fA-F.:]+?)<\d+>")


def parse_bootstrap(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`Bootstrap : Using eth0:10.0.0.1<0>`: the address by which peers name this host."""
    record = records[index]
    if (found := _BOOTSTRAP.search(record.text)) and record.node:
        yield record.event(EventKind.CONFIG_NOTE, attrs={"note": "address", "ip": found["ip"]})


PARSERS = (
    Parser("completion", ("Got completion",), parse_completion, "NCCL 2.3-"),
    Parser("async", ("async event", "async error event"), parse_async),
    Parser(
        "kernel_link",
        (
            "ink down",
            "ink is Down",
            "ink Down",
            "ink is not ready",
            "ealth compromised",
            "device's health",
            "odule event",
            "unexpected removal",
            "becomes down",
            "CQE error",
        ),
        parse_kernel_link,
    ),
    Parser("modify_qp", ("ibv_modify_qp",), parse_modify_qp),
    Parser("nic_missing", ("Unable to open device", "ibv_open_device"), parse_nic_missing),
    Parser("register", ("Call to ibv_",), parse_register),
    Parser(
        "socket",
        (
            "closed by remote peer",
            "Call to recv",
            "Call to send",
            "Call to connect",
            "socketPollConnect",
        ),
        parse_socket,
    ),
    Parser("remote_error", ("ncclRemoteError", "remote process exited"), parse_remote_error),
    Parser("bootstrap", ("Bootstrap : Using", "Bootstrap: Using"), parse_bootstrap),
    Parser("init", ("nranks ", "nRanks "), parse_init),
)
