"""Read blocks of other nodes by one-sided RDMA (NIXL over UCX): a BlockSource like TCP.

    read_blocks    which agent and addresses: asked of the node's agent, kept until they fail
      batch        one transfer of all its blocks into a registered, recycled buffer; then a second
                   one of their prefixes only
      check        the copy's epoch and the epoch after it are the reference's: the block was there
                   all the time, as epochs never come back and are cleared before a block changes

NIXL has no deadlines and cannot cancel. A transfer that does not end in time keeps its buffer until
it is known to have ended (quarantine), and its node is left to TCP until then: late bytes must not
land in memory that holds something else.
"""

import collections
import dataclasses
import functools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from relax_hpc.config import RdmaUse
from relax_hpc.errors import DeadlineError, RelaxError, StaleEpochError, TransferError
from relax_hpc.log import kv
from relax_hpc.transfer.block import PREFIX_BYTES, check_commit
from relax_hpc.transfer.buffers import BufferPool, size_class
from relax_hpc.transfer.extent import STAMP_BYTES
from relax_hpc.transfer.nixl_agent import NixlAgent, Outcome, Piece, Transfer, rdma_devices
from relax_hpc.transfer.rdma_server import NixlAccess
from relax_hpc.transfer.wire import BlockRef, DataAccess

if TYPE_CHECKING:
    import mmap

_log = logging.getLogger(__name__)

_ALIGN = 64
_MAX_BATCH_BYTES = 64 << 20
_MAX_BATCH_BLOCKS = 1024
_STALL_S = 20.0
"""A transfer that takes longer, plus a second for each 50 MB, is left to TCP."""
_SLOWEST_BYTES_PER_S = 50e6
_GRACE_S = 10.0
"""After a broken connection: adapters may still be flushing what was under way."""
_REFRESH_PAUSE_S = 0.25
"""Longer than what is known of a node counts as fresh (reader.AccessBook)."""
_PROBE_S = 10.0

Access = Callable[[str, float, bool], DataAccess]
"""(node, deadline, refresh) -> how to read it; refresh: what was known did not work."""
Progress = Callable[[int, memoryview, int], None]
"""(index of the reference, its block, bytes of it that have come)."""

_kept_for_ever: list[object] = []
"""Memory that transfers may still write to when nobody asks any more; until the process ends."""


# ---------------------------------------------------------------------------------------------
# Whether to use it
# ---------------------------------------------------------------------------------------------


def is_asked_for(use: RdmaUse) -> tuple[bool, str]:
    """Say whether the recipe and the hardware ask for RDMA, and why not; loads nothing."""
    if use is RdmaUse.OFF:
        return False, "transfer.rdma is off"
    if use is RdmaUse.AUTO and not rdma_devices():
        return False, "no RDMA hardware here (/sys/class/infiniband is empty)"
    return True, ""


def is_wanted(use: RdmaUse) -> tuple[bool, str]:
    """Say whether this process is to read payload of other nodes by RDMA, and why not.

    Raises:
        TransferError: it is forced (transfer.rdma = "force") and does not work here.
    """
    is_asked, why_not = is_asked_for(use)
    if not is_asked:
        return False, why_not
    works, why_not = is_available()
    if use is RdmaUse.FORCE and not works:
        raise TransferError(f'transfer.rdma = "force", but on this node {why_not}')
    return works, why_not


@functools.cache
def is_available() -> tuple[bool, str]:
    """Try a small transfer inside this process, once; (False, why not) if it fails."""
    try:
        _probe()
    except TransferError as err:
        return False, str(err)
    return True, ""


def _probe() -> None:
    nonce = secrets.token_hex(4)
    reader, target = NixlAgent(f"probe-reader-{nonce}"), NixlAgent(f"probe-target-{nonce}")
    source, copy = np.full(4096, 7, np.uint8), np.zeros(4096, np.uint8)
    memory = reader.register(copy.ctypes.data, 4096), target.register(source.ctypes.data, 4096)
    peer = reader.learn(target.metadata())
    transfer = reader.post_read(peer, [(copy.ctypes.data, 4096)], [(source.ctypes.data, 4096)])
    if not _wait(transfer, time.monotonic() + _PROBE_S):
        _kept_for_ever.extend((reader, target, source, copy, transfer))
        raise TransferError(f"a NIXL transfer of 4 KiB to itself did not end in {_PROBE_S:.0f} s")
    if transfer.poll() is not Outcome.DONE or not np.array_equal(copy, source):
        _kept_for_ever.extend((reader, target, source, copy, transfer))
        raise TransferError(f"a NIXL transfer of 4 KiB to itself failed: {transfer.note}")
    reader.deregister(memory[0])
    target.deregister(memory[1])


def _wait(transfer: Transfer, until: float) -> bool:
    """Poll, since NIXL has nothing to wait on; the pause grows to a millisecond."""
    pause_s = 0.0
    while transfer.poll() is Outcome.UNDER_WAY:
        if time.monotonic() > until:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s + 20e-6, 1e-3)
    return True


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Peer:
    """A node's NIXL agent, as it was when it was asked."""

    agent: str
    extents: dict[str, tuple[int, int]]
    is_complete: bool


@dataclasses.dataclass(slots=True)
class _Stuck:
    """A transfer that did not end well, and the buffer that it may still write to."""

    node: str
    transfer: Transfer
    buffer: memoryview
    free_at: float = 0.0
    """End of the grace after a broken connection; 0: not known to have ended."""


class _PeerLostError(TransferError):
    """The connection broke, or the agent was restarted: ask again where it is."""


class NixlSource:
    """Reads of one process from the NIXL agents of other nodes. Thread-safe.

    Args:
        access: tells how to read a node.

    Raises:
        TransferError: NIXL does not work here (ask `is_wanted` before).
    """

    name = "nixl"

    def __init__(self, access: Access) -> None:
        self._access = access
        host = socket.gethostname()
        self._agent = NixlAgent(f"reader-{host}-{os.getpid()}-{secrets.token_hex(4)}")
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._stuck: list[_Stuck] = []
        self._dropped: collections.deque[mmap.mmap] = collections.deque()
        self._registered: dict[int, Any] = {}
        self._pool = BufferPool(on_drop=self._dropped.append)
        self._counts: collections.Counter[str] = collections.Counter()

    def read_blocks(
        self,
        node: str,
        refs: Sequence[BlockRef],
        deadline: float,
        progress: Progress | None = None,
    ) -> list[memoryview | RelaxError]:
        """Read blocks of one node; see `reader.BlockSource`.

        Raises:
            DeadlineError: not done in time; the buffer is in quarantine.
            TransferError: NIXL does not get through to this node, now or at all: take TCP.
        """
        self._tidy()
        self._refuse_stuck(node)
        found: dict[int, memoryview | RelaxError] = {}
        for is_last in (False, True):
            try:
                self._read(node, refs, deadline, found, progress)
                break
            except _PeerLostError as err:
                with self._lock:
                    self._peers.pop(node, None)
                    self._counts["peers_lost"] += 1
                if is_last or time.monotonic() + _REFRESH_PAUSE_S > deadline:
                    raise TransferError(f"node {node} by NIXL: lost for now: {err}") from err
                time.sleep(_REFRESH_PAUSE_S)
        return [found[i] for i in range(len(refs))]

    def stats(self) -> dict[str, int]:
        """Count blocks, bytes, timeouts, peers_lost and failures so far; quarantined: now."""
        self._tidy()
        with self._lock:
            quarantined = sum(len(stuck.buffer) for stuck in self._stuck)
            return {
                **self._counts,
                "quarantined": len(self._stuck),
                "quarantined_bytes": quarantined,
            }

    def close(self) -> None:
        """Let go of the agent. Views stay valid; quarantined buffers stay till the process ends."""
        with self._lock:
            if self._stuck:
                _kept_for_ever.extend((self._agent, *self._stuck))
            self._peers.clear()

    # -- one read -----------------------------------------------------------------------------

    def _read(
        self,
        node: str,
        refs: Sequence[BlockRef],
        deadline: float,
        found: dict[int, memoryview | RelaxError],
        progress: Progress | None,
    ) -> None:
        """Fill `found` with what is not in it yet."""
        peer = self._find(node, [ref.extent for ref in refs if ref.tier == "shm"], deadline)
        wanted = []
        for i, ref in enumerate(refs):
            problem = _problem(ref, peer)
            if problem is not None:
                found[i] = problem
            elif i not in found:
                wanted.append(i)
        for batch in _batches(refs, wanted):
            blocks = self._read_batch(node, peer, [refs[i] for i in batch], deadline)
            for i, block in zip(batch, blocks, strict=True):
                found[i] = block
                if progress is not None and isinstance(block, memoryview):
                    progress(i, block, len(block))

    def _read_batch(
        self, node: str, peer: _Peer, refs: Sequence[BlockRef], deadline: float
    ) -> list[memoryview | RelaxError]:
        starts, nbytes = [], 0
        for ref in refs:
            starts.append(nbytes)
            nbytes += -(-ref.nbytes // _ALIGN) * _ALIGN
        buffer, address = self._buffer(nbytes + _ALIGN * len(refs))
        places = [peer.extents[ref.extent][0] + ref.offset for ref in refs]
        blocks = [(address + at, ref.nbytes) for at, ref in zip(starts, refs, strict=True)]
        sources = [(at, ref.nbytes) for at, ref in zip(places, refs, strict=True)]
        self._move(node, peer, buffer, (blocks, sources), deadline)
        after = [(address + nbytes + _ALIGN * k, PREFIX_BYTES) for k in range(len(refs))]
        self._move(node, peer, buffer, (after, [(at, PREFIX_BYTES) for at in places]), deadline)
        with self._lock:
            self._counts["blocks"] += len(refs)
            self._counts["bytes"] += nbytes
        return [
            _checked(ref, buffer[at : at + ref.nbytes], buffer[nbytes + _ALIGN * k :], node)
            for k, (at, ref) in enumerate(zip(starts, refs, strict=True))
        ]

    def _move(
        self,
        node: str,
        peer: _Peer,
        buffer: memoryview,
        pieces: tuple[list[Piece], list[Piece]],
        deadline: float,
    ) -> None:
        """Copy pieces of the peer's memory into the buffer; raises if it did not all come."""
        begin, nbytes = time.monotonic(), sum(piece[1] for piece in pieces[0])
        stall_at = begin + _STALL_S + nbytes / _SLOWEST_BYTES_PER_S
        try:
            transfer = self._agent.post_read(peer.agent, *pieces)
        except TransferError as err:
            raise _PeerLostError(str(err)) from err
        what = f"{len(pieces[0])} pieces, {nbytes} bytes of node {node} by NIXL"
        if not _wait(transfer, min(deadline, stall_at)):
            self._quarantine(_Stuck(node, transfer, buffer), "timeouts")
            seen = f"{what}: not there after {time.monotonic() - begin:.1f} s; its agent"
            if time.monotonic() >= deadline:
                raise DeadlineError(f"{seen} hangs, or the network is cut")
            raise TransferError(f"{seen} hangs, or the network is slow: TCP is the way now")
        outcome = transfer.poll()
        if outcome is Outcome.PEER_LOST:
            grace = time.monotonic() + _GRACE_S
            self._quarantine(_Stuck(node, transfer, buffer, grace), "broken")
            raise _PeerLostError(f"{what}: the connection broke ({transfer.note})")
        if outcome is Outcome.FAILED:
            self._quarantine(_Stuck(node, transfer, buffer), "failures")
            raise TransferError(
                f"{what}: failed with {transfer.note} (UCX_LOG_LEVEL=info says more)"
            )

    # -- peers --------------------------------------------------------------------------------

    def _find(self, node: str, names: Sequence[str], deadline: float) -> _Peer:
        """Return the node's agent; ask for news while it knows an extent of ours not yet."""
        with self._lock:
            peer = self._peers.get(node)
        missing = sorted(set(names).difference(peer.extents if peer is not None else ()))
        for pause_s in (0.0, _REFRESH_PAUSE_S, _REFRESH_PAUSE_S):
            if peer is not None and not missing:
                return peer
            time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
            peer = self._ask(node, deadline)
            missing = sorted(set(names).difference(peer.extents))
        if peer is None or (missing and not peer.is_complete):
            # Perhaps only not registered (the limit of locked memory, a helper that hangs).
            raise TransferError(f"node {node}: NIXL does not reach extents {', '.join(missing)}")
        return peer

    def _ask(self, node: str, deadline: float) -> _Peer:
        access = self._access(node, deadline, True)
        if not access.nixl_agent:
            raise TransferError(f"node {node} has no NIXL agent (now): TCP is the way")
        try:
            told = msgspec.msgpack.decode(access.nixl_metadata, type=NixlAccess)
        except msgspec.DecodeError as err:
            raise TransferError(f"node {node}: NIXL metadata cannot be read: {err}") from err
        peer = _Peer(self._agent.learn(told.metadata), told.extents, told.is_complete)
        with self._lock:
            self._peers[node] = peer
        return peer

    # -- memory -------------------------------------------------------------------------------

    def _buffer(self, nbytes: int) -> tuple[memoryview, int]:
        """Return registered memory and its address."""
        buffer = self._pool.take(nbytes)
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        with self._lock:
            if address not in self._registered:
                self._registered[address] = self._agent.register(address, size_class(nbytes))
        return buffer, address

    def _quarantine(self, stuck: _Stuck, reason: str) -> None:
        with self._lock:
            self._stuck.append(stuck)
            self._counts[reason] += 1
        _log.warning(
            "buffer in quarantine %s",
            kv(node=stuck.node, bytes=len(stuck.buffer), reason=reason, note=stuck.transfer.note),
        )

    def _tidy(self) -> None:
        """Give back buffers whose transfers ended, and memory that the pool no longer wants."""
        now = time.monotonic()
        with self._lock:
            self._stuck = [stuck for stuck in self._stuck if not _is_over(stuck, now)]
            while self._dropped:
                memory = self._dropped.popleft()
                address = np.frombuffer(memory, np.uint8).ctypes.data
                registration = self._registered.pop(address, None)
                if registration is not None:
                    self._agent.deregister(registration)

    def _refuse_stuck(self, node: str) -> None:
        with self._lock:
            count = sum(stuck.node == node and stuck.free_at == 0.0 for stuck in self._stuck)
        if count:
            raise TransferError(
                f"node {node}: {count} earlier reads by NIXL have not ended yet: TCP is the way "
                "until they do"
            )


def _is_over(stuck: _Stuck, now: float) -> bool:
    """Whether nothing writes to its buffer any more; an unclear failure never is."""
    outcome = stuck.transfer.poll()
    if outcome is Outcome.DONE:
        return True
    if outcome is Outcome.PEER_LOST and stuck.free_at == 0.0:
        stuck.free_at = now + _GRACE_S
    return stuck.free_at != 0.0 and now >= stuck.free_at


def _problem(ref: BlockRef, peer: _Peer) -> RelaxError | None:
    """Say why a block cannot be read from this peer."""
    name = f"block {ref.extent}+{ref.offset} of node {ref.node}"
    if ref.tier != "shm":
        return TransferError(f"{name} is on disk: NIXL reads shared memory only")
    if ref.extent not in peer.extents:
        return StaleEpochError(
            f"{name}: its node has no such extent: its producer is dead and nothing referenced it, "
            "or the node was cleaned"
        )
    size = peer.extents[ref.extent][1]
    if ref.offset < STAMP_BYTES or ref.nbytes < PREFIX_BYTES or ref.offset + ref.nbytes > size:
        return TransferError(f"{name}: {ref.nbytes} bytes are not inside the extent of {size}")
    return None


def _checked(
    ref: BlockRef, block: memoryview, after: memoryview, node: str
) -> memoryview | RelaxError:
    """Return the block if it was the referenced one before and after it was copied."""
    try:
        check_commit(block, ref, f"read by NIXL from {node}")
    except TransferError as err:
        return err
    if after[:PREFIX_BYTES] != block[:PREFIX_BYTES]:
        return StaleEpochError(
            f"block {ref.extent}+{ref.offset} of node {node} was freed or recycled while "
            f"NIXL read it; expected epoch {ref.epoch}"
        )
    return block


def _batches(refs: Sequence[BlockRef], wanted: Sequence[int]) -> list[list[int]]:
    batches: list[list[int]] = []
    nbytes = 0
    for i in wanted:
        is_full = nbytes + refs[i].nbytes > _MAX_BATCH_BYTES
        if not batches or is_full or len(batches[-1]) >= _MAX_BATCH_BLOCKS:
            batches.append([])
            nbytes = 0
        batches[-1].append(i)
        nbytes += refs[i].nbytes
    return batches
