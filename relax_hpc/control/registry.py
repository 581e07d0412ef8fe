"""Who is alive, where, in which incarnation, how far; and a small key-value store.

server (service `control`)                 clients
  Registry: members, keys  <-- join/report -- Membership of every task (heartbeat thread)
  keys survive a restart   <-- publish ------ e.g. "train/3/store" = host:port
  (journal), members come  --> wait_for ----> long-poll, woken by the publish
  back with their next report --> members --> supervisor, status
"""

import asyncio
import logging
import os
import threading
import time

import msgspec

from relax_hpc.control.group_commit import GroupCommit
from relax_hpc.control.heartbeat import Heartbeat
from relax_hpc.control.identity import Identity
from relax_hpc.control.journal import GenerationalJournal
from relax_hpc.control.rpc import Caller, Empty, RpcClient, RpcServer
from relax_hpc.errors import ControlError, DeadlineError
from relax_hpc.log import kv

logger = logging.getLogger(__name__)

SERVICE = "control"
_LONG_POLL_S = 10.0
Value = int | float | str
_Key = tuple[str, int, int]


class MemberInfo(msgspec.Struct, kw_only=True):
    """One task as the registry knows it."""

    role: str
    index: int
    rank: int
    node: str
    pid: int
    attempt: int
    incarnation: int
    address_info: dict[str, str]
    """Addresses and anything else that the member told when it joined."""
    progress: dict[str, Value]
    """What it reported last: step=..., chunk=..., tokens=..."""
    last_seen_s: float
    """Seconds since its last report."""
    progress_age_s: float
    """Seconds since its progress last changed."""


class _Report(msgspec.Struct, kw_only=True):
    node: str
    pid: int
    address_info: dict[str, str]
    progress: dict[str, Value]


class _Members(msgspec.Struct):
    members: list[MemberInfo]


class _Pair(msgspec.Struct):
    key: str
    value: str


class _Wait(msgspec.Struct):
    key: str
    wait_s: float


class _Found(msgspec.Struct):
    value: str | None


class _Snapshot(msgspec.Struct):
    values: dict[str, str]


class _Member(msgspec.Struct, kw_only=True):
    caller: Caller
    report: _Report
    seen: float
    changed: float


class Registry:
    """Server side of service `control`. Give it a server, then run the server."""

    def __init__(self, server: RpcServer, identity: Identity) -> None:
        self._members: dict[_Key, _Member] = {}
        self._values: dict[str, str] = {}
        self._published = asyncio.Event()
        self._journal = GenerationalJournal(
            identity.run.journal, SERVICE, identity.attempt, identity.incarnation
        )
        self._commit = GroupCommit(self._journal)
        self._server = server
        server.register("report", _Report, self._report)
        server.register("leave", Empty, self._leave)
        server.register("publish", _Pair, self._publish)
        server.register("wait_for", _Wait, self._wait_for)
        server.register("members", Empty, self._list)
        server.on_newer(self._forget_older)
        server.on_start(self._restore)

    async def _restore(self) -> None:
        lines = self._journal.read()
        first = next(lines, None)
        if first is not None:
            self._values = msgspec.json.decode(first, type=_Snapshot).values
            for line in lines:
                pair = msgspec.json.decode(line, type=_Pair)
                self._values[pair.key] = pair.value
        self._journal.start(_Snapshot(self._values))

    def _forget_older(self, caller: Caller) -> None:
        older = [
            key
            for key, member in self._members.items()
            if key[:2] == (caller.role, caller.index)
            and (member.caller.attempt, member.caller.incarnation)
            < (caller.attempt, caller.incarnation)
        ]
        for key in older:
            del self._members[key]

    async def _report(self, caller: Caller, report: _Report) -> None:
        now = time.monotonic()
        key = (caller.role, caller.index, caller.rank)
        known = self._members.get(key)
        is_same = known is not None and known.report.progress == report.progress
        changed = known.changed if known is not None and is_same else now
        self._members[key] = _Member(caller=caller, report=report, seen=now, changed=changed)

    async def _leave(self, caller: Caller, request: Empty) -> None:
        self._members.pop((caller.role, caller.index, caller.rank), None)

    async def _publish(self, caller: Caller, pair: _Pair) -> None:
        self._values[pair.key] = pair.value
        self._commit.append(pair)
        try:
            await self._commit.flushed()
        except ControlError as err:
            self._server.fail(err)
            raise
        self._published.set()
        self._published = asyncio.Event()

    async def _wait_for(self, caller: Caller, request: _Wait) -> _Found:
        deadline = time.monotonic() + request.wait_s
        while request.key not in self._values:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return _Found(None)
            try:
                await asyncio.wait_for(self._published.wait(), left_s)
            except TimeoutError:
                continue  # the loop's head answers
        return _Found(self._values[request.key])

    async def _list(self, caller: Caller, request: Empty) -> _Members:
        now = time.monotonic()
        return _Members([_info(member, now) for _, member in sorted(self._members.items())])


def _info(member: _Member, now: float) -> MemberInfo:
    caller, report = member.caller, member.report
    return MemberInfo(
        role=caller.role,
        index=caller.index,
        rank=caller.rank,
        node=report.node,
        pid=report.pid,
        attempt=caller.attempt,
        incarnation=caller.incarnation,
        address_info=report.address_info,
        progress=report.progress,
        last_seen_s=now - member.seen,
        progress_age_s=now - member.changed,
    )


class Membership:
    """Client side: this task's place in the registry. Thread-safe."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._client = RpcClient(identity.run, SERVICE, identity)
        self._lock = threading.Lock()
        self._address_info: dict[str, str] = {}
        self._progress: dict[str, Value] = {}
        self._heartbeat: Heartbeat | None = None

    @property
    def is_replaced(self) -> bool:
        """True when a newer incarnation took this role: the process must end."""
        return self._heartbeat is not None and self._heartbeat.is_replaced

    def join(self, address_info: dict[str, str] | None = None, *, timeout_s: float = 120.0) -> None:
        """Register and start the heartbeat thread; a second call replaces the addresses.

        Raises:
            DeadlineError: the control service did not answer.
            StaleIncarnationError: a newer incarnation of this role is registered.
        """
        with self._lock:
            self._address_info = dict(address_info) if address_info is not None else {}
        self._send(timeout_s)
        if self._heartbeat is None:
            self._heartbeat = Heartbeat(lambda: self._send(10.0))
            self._heartbeat.start()
        logger.info("joined %s", kv(incarnation=self._identity.incarnation, **self._address_info))

    def report(self, **progress: Value) -> None:
        """Note progress (step=3, tokens=120); the next heartbeat carries it. Never blocks."""
        with self._lock:
            self._progress.update(progress)

    def leave(self, timeout_s: float = 5.0) -> None:
        """Stop the heartbeat and leave the registry. A missing service is only logged."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        try:
            self._client.call("leave", Empty(), Empty, timeout_s=timeout_s, why="leave the run")
        except ControlError as err:
            logger.info("left without goodbye %s", kv(note=str(err)))
        self._client.close()

    def publish(self, key: str, value: str, *, timeout_s: float = 120.0) -> None:
        """Store a value under a key; it survives restarts of the service."""
        why = f"publish {key}"
        self._client.call("publish", _Pair(key, value), Empty, timeout_s=timeout_s, why=why)

    def wait_for(self, key: str, timeout_s: float, why: str) -> str:
        """Wait until a key is published and return its value.

        Raises:
            DeadlineError: nobody published it in time; names the key and `why`.
        """
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            request = _Wait(key, min(left_s, _LONG_POLL_S))
            found = self._client.call("wait_for", request, _Found, timeout_s=left_s + 1, why=why)
            if found.value is not None:
                return found.value
        raise DeadlineError(f"nobody published {key!r} in {timeout_s:g} s ({why})")

    def _send(self, timeout_s: float) -> None:
        me = self._identity
        with self._lock:
            report = _Report(
                node=me.node,
                pid=os.getpid(),
                address_info=dict(self._address_info),
                progress=dict(self._progress),
            )
        self._client.call("report", report, Empty, timeout_s=timeout_s, why="heartbeat")


def members(client: RpcClient, *, timeout_s: float = 10.0) -> list[MemberInfo]:
    """List the members; `client` is an RpcClient of service `control`."""
    reply = client.call("members", Empty(), _Members, timeout_s=timeout_s, why="list members")
    return reply.members
