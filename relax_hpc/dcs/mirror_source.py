"""Weights across clusters: the trainer's side. Serves committed versions to mirrors over TCP.

    watcher thread   waits at the `weights` service for newer versions, tells who waits here
    loader thread    fetches the versions that a mirror needs: its target, its base
    connections      Open: wait for a version and its base; then chunks, encoded as they are asked
                     for, so that memory is bounded by connections x chunk

A version is fetched once for all mirrors and held until newer ones need its place. A source that
was killed starts empty: mirrors ask for what they had begun, and it is fetched again if the weight
service still has it. Nothing here can hold the trainer up.
"""

import collections
import dataclasses
import hashlib
import logging
import socket
import threading
import time

import msgspec
import xxhash

from relax_hpc.control.identity import Identity
from relax_hpc.dcs.client import WeightSubscriber
from relax_hpc.dcs.layout import HostTensor
from relax_hpc.dcs.mirror_chunks import Content, Segment, content_of, cut, encode_chunk
from relax_hpc.dcs.mirror_wire import (
    MAX_ASK_BYTES,
    MAX_OFFER_BYTES,
    Ask,
    Chunk,
    Offer,
    Open,
    Wanted,
)
from relax_hpc.dcs.store import VersionId
from relax_hpc.errors import ControlError, WeightSyncError
from relax_hpc.log import kv
from relax_hpc.transfer.connections import Connection, ConnectionServer, ServerLimits
from relax_hpc.transfer.frames import Channel, FrameError, welcome

_log = logging.getLogger(__name__)

MAX_WAIT_S = 30.0
"""Longest wait of one Open."""
_WATCH_S = 20.0
_PAUSE_S = 2.0
_SLICE_BYTES = 1 << 20


class Gone(Exception):
    """The weight service has that version no more."""


@dataclasses.dataclass(frozen=True, slots=True)
class _HeldVersion:
    tensors: dict[str, HostTensor]
    content: Content
    digest: int
    chunks: list[list[Segment]]


class _Shelf:
    """Versions in memory, the least recently used one goes first. Thread-safe."""

    def __init__(self, identity: Identity, max_versions: int, chunk_bytes: int) -> None:
        self._subscriber = WeightSubscriber(identity)
        self._max_versions, self._chunk_bytes = max_versions, chunk_bytes
        self._changed = threading.Condition()
        self._held: collections.OrderedDict[VersionId, _HeldVersion] = collections.OrderedDict()
        self._wanted: list[VersionId] = []
        self._gone: dict[VersionId, str] = {}
        self._newest: VersionId | None = None

    def announce(self, newest: VersionId) -> None:
        """Tell waiters of a newer version."""
        with self._changed:
            self._newest = newest
            self._changed.notify_all()

    def newer(self, than: VersionId | None, deadline: float) -> VersionId | None:
        """Wait for a version newer than that one; None at the deadline."""

        def is_there() -> bool:
            return self._newest is not None and (than is None or self._newest > than)

        with self._changed:
            left_s = max(deadline - time.monotonic(), 0.0)
            return self._newest if self._changed.wait_for(is_there, left_s) else None

    def get(self, version: VersionId, deadline: float) -> _HeldVersion | None:
        """Return a version, fetched if need be; None while it is being fetched.

        Raises:
            Gone: it cannot be fetched.
        """
        with self._changed:
            if version not in self._held:
                if version not in self._wanted:
                    self._gone.pop(version, None)
                    self._wanted.append(version)
                    self._changed.notify_all()
                left_s = max(deadline - time.monotonic(), 0.0)
                self._changed.wait_for(lambda: version not in self._wanted, left_s)
            if version in self._held:
                self._held.move_to_end(version)
                return self._held[version]
            if version in self._gone:
                raise Gone(self._gone[version])
            return None

    def held(self, version: VersionId) -> _HeldVersion | None:
        """Return a version if it is in memory."""
        with self._changed:
            found = self._held.get(version)
            if found is not None:
                self._held.move_to_end(version)
            return found

    def load_wanted(self, timeout_s: float) -> None:
        """Fetch one version that is asked for, if there is one within the time (loader thread)."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._wanted), timeout_s):
                return
            version = self._wanted[0]
            while len(self._held) >= self._max_versions:
                gone, _ = self._held.popitem(last=False)
                _log.info("version let go %s", kv(version=gone))
        note, held = "", None
        try:
            held = self._load(version)
        except (ControlError, WeightSyncError) as err:
            note = str(err)
            _log.warning("version not fetched %s", kv(version=version, reason=note))
        with self._changed:
            self._wanted.remove(version)
            if held is None:
                self._gone[version] = note
            else:
                self._held[version] = held
            while len(self._gone) > 64:
                del self._gone[next(iter(self._gone))]
            self._changed.notify_all()

    def _load(self, version: VersionId) -> _HeldVersion:
        tensors = self._subscriber.fetch(version)
        content = content_of(tensors)
        if len(msgspec.msgpack.encode(content)) > MAX_OFFER_BYTES // 2:
            raise WeightSyncError(f"{version} has {len(content.specs)} tensors: too many to offer")
        chunks = cut(content.specs, self._chunk_bytes)
        return _HeldVersion(tensors, content, content.digest, chunks)


class MirrorSource:
    """Serves the versions of a run's weight service to who knows the mirrors' key.

    Runs on any node of the trainer's cluster that the other cluster reaches; on a node that holds
    shards it maps them, else it copies them to its memory.

    Args:
        identity: of this process in the trainer's run (`observer_identity` will do).
        key: `load_mirror_key` of the file that both clusters have.
        address: (ip, port) to listen on; port 0: a free one.
        chunk_bytes: unit of transfer; what is sent again after a cut is at most one a stream.
        deflate: compress deltas; it pays on links below 400 Mbit/s for each core of ours.
        max_versions: models in memory, >= 2: target and base of a mirror. Mirrors that keep step
            with each other share them; with too few, others fetch theirs again and again.
        limits: what one peer can use up.
    """

    def __init__(
        self,
        identity: Identity,
        key: bytes,
        address: tuple[str, int],
        *,
        chunk_bytes: int = 1 << 20,
        deflate: bool = True,
        max_versions: int = 3,
        limits: ServerLimits | None = None,
    ) -> None:
        self._key, self._chunk_bytes, self._deflate = key, chunk_bytes, deflate
        self._limits = ServerLimits(max_connections=256) if limits is None else limits
        self._watching = WeightSubscriber(identity)
        self._shelf = _Shelf(identity, max_versions, chunk_bytes)
        self._server = ConnectionServer("mirror", address, self._limits, self._converse)
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (("mirror-watch", self._watch), ("mirror-load", self._load))
        ]

    @property
    def address(self) -> tuple[str, int]:
        """(ip, port), once started."""
        return self._server.address

    def start(self) -> tuple[str, int]:
        """Serve in daemon threads; returns (ip, port).

        Raises:
            TransferError: the address cannot be bound.
        """
        address = self._server.start()
        for thread in self._threads:
            thread.start()
        _log.info("mirrors are served %s", kv(ip=address[0], port=address[1]))
        return address

    def stop(self) -> None:
        """End connections; the threads end with their present long-poll."""
        self._server.stop()

    def stats(self) -> dict[str, int]:
        """Count chunks, sent_bytes, offers by kind, connections and why they ended."""
        return self._server.stats()

    def _watch(self) -> None:
        newest: VersionId | None = None
        while not self._server.stopping.is_set():
            try:
                found = self._watching.wait_newer(newest, _WATCH_S)
            except ControlError as err:  # the weight service restarts, or its run has ended
                _log.warning("no word of newer versions %s", kv(reason=err))
                self._server.stopping.wait(_PAUSE_S)
                continue
            if found is not None:
                newest = found
                self._shelf.announce(found)

    def _load(self) -> None:
        while not self._server.stopping.is_set():
            self._shelf.load_wanted(_PAUSE_S)

    # -- connections --------------------------------------------------------------------------

    def _converse(self, connection: Connection) -> None:
        limits = self._limits
        channel = welcome(connection.socket, connection.receive, self._key)
        connection.is_trusted = True
        while not self._server.stopping.is_set():
            connection.wait("idle", limits.idle_s)
            connection.socket.recv(1, socket.MSG_PEEK)
            connection.wait("slow_request", limits.request_s)
            ask = channel.receive(Ask, MAX_ASK_BYTES)
            if ask.open is not None:
                wait_s = min(max(ask.open.wait_s, 0.0), MAX_WAIT_S)
                connection.wait("busy", wait_s + limits.send_s)
                offer = self._offer(ask.open, time.monotonic() + wait_s)
                connection.wait("slow_reader", limits.send_s)
                channel.send(offer)
            elif ask.chunk is not None:
                self._send_chunk(connection, channel, ask.chunk)
            else:
                raise FrameError("bad_request", "it asks for nothing")

    def _offer(self, asked: Open, deadline: float) -> Offer:
        """Find the version that a mirror fetches next, and whether against its own one."""
        if asked.have is not None:
            self._shelf.held(asked.have.version)  # used now: the target must not take its place
        try:
            target = self._target(asked, deadline)
            if target is None:
                return Offer(note="nothing newer")
            version, held = target
            if held is None:
                return Offer(note=f"{version} is being read")
            base, note = self._base(asked, held, deadline)
        except Gone as err:
            return Offer(note=f"the newest version is not there: {err}")
        if base is None and note == "":
            return Offer(note="the base is being read")
        kind = "delta" if base is not None else "full"
        self._server.count(f"{kind}_offers")
        _log.info("version offered %s", kv(version=version, kind=kind, base=base, note=note))
        return Offer(version, base, self._chunk_bytes, held.content, note)

    def _target(self, asked: Open, deadline: float) -> tuple[VersionId, _HeldVersion | None] | None:
        if asked.want is not None and (asked.newer_than is None or asked.want > asked.newer_than):
            try:
                return asked.want, self._shelf.get(asked.want, deadline)
            except Gone as err:
                _log.info("a mirror's begun version is gone %s", kv(reason=err))
        version = self._shelf.newer(asked.newer_than, deadline)
        return None if version is None else (version, self._shelf.get(version, deadline))

    def _base(
        self, asked: Open, target: _HeldVersion, deadline: float
    ) -> tuple[VersionId | None, str]:
        """Say against which version to encode, or why against none; no reason: not yet known."""
        if asked.have is None:
            return None, "the mirror has no base"
        try:
            held = self._shelf.get(asked.have.version, deadline)
        except Gone as err:
            return None, f"base {asked.have.version} is gone: {err}"
        if held is None:
            return None, ""
        if held.digest != asked.have.digest:
            return None, f"the mirror's {asked.have.version} is not ours: other digest"
        if held.content.specs != target.content.specs:
            return None, "the tensors are others than those of the base"
        return asked.have.version, ""

    def _send_chunk(self, connection: Connection, channel: Channel, wanted: Wanted) -> None:
        target = self._shelf.held(wanted.version)
        base = None if wanted.base is None else self._shelf.held(wanted.base)
        connection.wait("slow_reader", self._limits.send_s)
        if target is None or (base is None and wanted.base is not None):
            channel.send(Chunk(wanted.number, -1))
            return
        if not 0 <= wanted.number < len(target.chunks):
            raise FrameError("bad_request", f"chunk {wanted.number} of {len(target.chunks)}")
        if base is not None and base.content.specs != target.content.specs:
            raise FrameError("bad_request", f"{wanted.base} is no base of {wanted.version}")
        data = encode_chunk(
            target.content.specs,
            target.chunks[wanted.number],
            None if base is None else base.tensors,
            target.tensors,
            deflate=self._deflate,
        )
        checksum, sha256 = xxhash.xxh3_64_intdigest(data), hashlib.sha256(data).digest()
        channel.send(Chunk(wanted.number, len(data), checksum, sha256), socket.MSG_MORE)
        for start in range(0, len(data), _SLICE_BYTES):
            connection.wait("slow_reader", self._limits.send_s)
            connection.socket.sendall(memoryview(data)[start : start + _SLICE_BYTES])
        self._server.count("chunks")
        self._server.count("sent_bytes", len(data))
