"""Set-up: rendezvous, stores, ports, devices, environments."""

import re
from collections.abc import Iterator, Sequence

from relax_hpc.postmortem.evidence import Event, EventKind
from relax_hpc.postmortem.parse.record import Parser, Record, rx

_BARRIER = rx(
    r"store based barrier on rank: (?P<rank>\d+).*?\(world_size=(?P<world>\d+), "
    r"worker_count=(?P<count>\d+)"
)
_BARRIER_NEW = rx(
    r"Timed out (?:after [\d:]+ )?(?:initializing process group|waiting for clients)|"
    r"(?P<joined>\d+)/(?P<world>\d+) clients joined"
)


def parse_barrier(records: Sequence[Record], index: int) -> Iterator[Event]:
    """Store barrier: more workers than the world has, or fewer."""
    record = records[index]
    if found := _BARRIER.search(record.text):
        yield record.event(
            EventKind.RANK_ABSENT,
            rank=int(found["rank"]),
            attrs={
                "reason": "store-barrier",
                "world": int(found["world"]),
                "count": int(found["count"]),
            },
        )
    elif (found := _BARRIER_NEW.search(record.text)) and found["joined"]:
        yield record.event(
            EventKind.RANK_ABSENT,
            attrs={
                "reason": "store-barrier",
                "world": int(found["world"]),
                "count": int(found["joined"]),
            },
        )


_STORE = rx(
    r"(?:recvValue(?:WithTimeout)?|sendBytes|recvBytes|recvVector|doWait|doGet|wait|"
    r"get|check)? ?(?:failed|TCPStore).{0,60}?SocketImpl\(fd=\d+, "
    r"addr=\[?(?P<addr>[^\]\s,]+?)\]?:\d+, "
    r"remote=\[?(?P<host>[^\]\s,]+?)\]?:(?P<port>\d+)\): ?(?P<what>[^\n]+)"
)
_STORE_WORDS = re.compile(
    r"(?:TCPStore|\[c10d\]).{0,160}?(?P<what>Connection reset by peer|Broken pipe|"
    r"Connection was likely closed|server socket .*closed|failed to recv|"
    r"Failed to check the \"should dump\" flag)",
    re.S,
)


def parse_store(records: Sequence[Record], index: int) -> Iterator[Event]:
    """TCPStore connections that broke: its host (rank 0) is gone."""
    record = records[index]
    found = _STORE.search(record.text)
    words = _STORE_WORDS.search(record.text)
    if found is None and words is None:
        return
    what = found["what"] if found else words["what"] if words else ""
    yield record.event(
        EventKind.PEER_LOST,
        attrs={
            "layer": "store",
            "what": what[:80],
            "peer": found["host"] if found else "",
            "port": int(found["port"]) if found else 0,
        },
    )


_CLIENT = re.compile(
    r"client socket has (?:timed out|failed to connect)|(?:socket|"
    r"DNS).{0,60}?(?:connect to|resolve|lookup).{0,120}(?:timed out|failed|refused)|"
    r"Timed? out (?:after [\d.:]+ \w+ )?waiting for (?:clients|clients to join)|"
    r"RendezvousTimeoutError|RendezvousConnectionError|RendezvousClosedError|"
    r"The client socket has|Init timed out|failed to connect to [\[\w.:\]-]+",
    re.I,
)
_PORT = re.compile(
    r"EADDRINUSE|[Aa]ddress already in use|port (?P<port>\d+) (?:is )?already in use|"
    r"failed to bind to .*?:(?P<port2>\d+)"
)
_DUPLICATE = rx(
    r"Duplicate GPU detected ?: ?rank (?P<a>\d+) and rank (?P<b>\d+) both on CUDA "
    r"device (?P<bus>[0-9a-fA-F]+)"
)
_ORDINAL = re.compile(
    r"invalid device ordinal|CUDA_VISIBLE_DEVICES.{0,80}(?:invalid|empty|not set|"
    r"does not)|device_count.{0,40}local_rank|no CUDA-capable device|"
    r"No CUDA GPUs are available|CUDA driver initialization failed|CUDA unknown error|"
    r"local rank .{0,40}GPU.{0,20}not (?:visible|available)|"
    r"CUDA error: (?:all CUDA-capable devices are busy)"
)
_ENV = re.compile(r"environment variable (?P<name>[A-Z_]+) expected, but not set")


def parse_setup(records: Sequence[Record], index: int) -> Iterator[Event]:
    """Ports, duplicate or invisible devices, rendezvous time-outs, missing variables."""
    record = records[index]
    if found := _DUPLICATE.search(record.text):
        ranks = (int(found["a"]), int(found["b"]))
        yield record.event(
            EventKind.LAUNCHER_ERROR,
            attrs={"reason": "duplicate-gpu", "ranks": ranks, "bus": found["bus"]},
        )
    elif found := _PORT.search(record.text):
        yield record.event(
            EventKind.LAUNCHER_ERROR, attrs={"reason": "port", "words": found[0][:80]}
        )
    elif found := _ORDINAL.search(record.text):
        yield record.event(
            EventKind.LAUNCHER_ERROR, attrs={"reason": "device", "words": found[0][:80]}
        )
    elif found := _ENV.search(record.text):
        yield record.event(
            EventKind.LAUNCHER_ERROR, attrs={"reason": "environment", "words": found["name"]}
        )
    elif found := _CLIENT.search(record.text):
        yield record.event(
            EventKind.LAUNCHER_ERROR, attrs={"reason": "rendezvous", "words": found[0][:80]}
        )


_FOREIGN = re.compile(
    r"(?:Permission denied|No such file or directory|Read-only file system|"
    r"Stale file handle)[^'\"\n]*['\"]?[^'\"\n]*?/(?P<id>\d{5,9})(?=[/'\"\s]|$)"
)


def parse_foreign_path(records: Sequence[Record], index: int) -> Iterator[Event]:
    """A path that holds a job id: compared later with the id of the job that failed."""
    record = records[index]
    if found := _FOREIGN.search(record.text):
        yield record.event(EventKind.CONFIG_NOTE, attrs={"note": "path-job-id", "job": found["id"]})


_WORLD = re.compile(
    r"\b(?:world[_ ]size|WORLD_SIZE|nranks|num_processes|nprocs)\s*[=:]\s*(?P<n>\d{1,6})\b"
)


def parse_world(records: Sequence[Record], index: int) -> Iterator[Event]:
    """World size, wherever a program prints it."""
    record = records[index]
    if found := _WORLD.search(record.text):
        yield record.event(EventKind.CONFIG_NOTE, attrs={"note": "world", "world": int(found["n"])})


PARSERS = (
    Parser("barrier", ("store based barrier", "clients joined"), parse_barrier, "1.8-"),
    Parser("store", ("SocketImpl", "TCPStore", "[c10d]"), parse_store, "2.0-"),
    Parser(
        "setup",
        (
            "Duplicate GPU",
            "EADDRINUSE",
            "already in use",
            "failed to bind",
            "device ordinal",
            "CUDA_VISIBLE_DEVICES",
            "CUDA-capable",
            "No CUDA GPUs",
            "driver initialization",
            "CUDA unknown error",
            "expected, but not set",
            "client socket",
            "endezvous",
            "waiting for clients",
            "failed to connect",
            "Init timed out",
            "not available",
        ),
        parse_setup,
    ),
    Parser(
        "foreign_path",
        ("Permission denied", "No such file", "Read-only file system", "Stale file handle"),
        parse_foreign_path,
    ),
    Parser(
        "world", ("world_size", "WORLD_SIZE", "world size", "nranks", "num_processes"), parse_world
    ),
)
