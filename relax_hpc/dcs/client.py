"""Both ends of the weight service: train ranks publish, engines pull what they need.

Bytes go from the publisher's node to the reader: mapped when both are on one node, else cut out by
the agent of the publisher's node. The coordinator sees manifests only.
"""

import logging
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import overload

import msgspec
import numpy as np

from relax_hpc.config import TransferConfig
from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import RpcClient
from relax_hpc.dcs.assemble import Assembly
from relax_hpc.dcs.coordinator import (
    LEASE_S,
    SERVICE,
    Acquire,
    Acquired,
    Announce,
    Announced,
    Done,
    Lost,
    Newest,
    Release,
    WaitNewer,
)
from relax_hpc.dcs.cuts import FarPull
from relax_hpc.dcs.layout import Box, TensorSpec
from relax_hpc.dcs.layout import HostTensor as HostTensor  # the type that fetch returns
from relax_hpc.dcs.pull import PullPlan, plan_pull
from relax_hpc.dcs.store import ShardManifest, VersionId, WeightStore, verify_piece
from relax_hpc.dcs.versions import Committed, specs_digest
from relax_hpc.errors import DeadlineError, StaleIncarnationError, TransferError, WeightSyncError
from relax_hpc.log import kv
from relax_hpc.transfer.buffers import BufferPool
from relax_hpc.transfer.frames import data_key
from relax_hpc.transfer.reader import AccessBook
from relax_hpc.transfer.tcp import DataClient
from relax_hpc.transfer.tcp_questions import RefusedError
from relax_hpc.transfer.tcp_stream import Access

_log = logging.getLogger(__name__)

STALL_S = 20.0
"""Longest time without news from a node that is read; all ends within 30 s after the last news."""
_RPC_S = 120.0  # longer than a restart of the dcs step takes
_ASIDE_S = 3.0  # for what a fetch can do without: it must not wait long for the coordinator


class WeightPublisher:
    """Publishes weights from one train rank. Used by one thread at a time."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._store = WeightStore(identity.run, identity.node)
        self._rpc = RpcClient(identity.run, SERVICE, identity)

    def publish(
        self,
        version: int,
        pieces: Iterable[tuple[Box, str, np.ndarray]],
        specs: Sequence[TensorSpec],
        num_shards: int,
        shard_rank: int,
        meet: Callable[[], object] = lambda: None,
        timeout_s: float = _RPC_S,
    ) -> VersionId:
        """Write this rank's pieces to shared memory, announce them, wait until all ranks did.

        When it returns, engines can fetch the version. Every publishing rank calls it with the
        same version, specs and num_shards, at about the same time. Ranks wait for each other in
        `meet`, not here: a collective fails at once when one of them has died.

        Args:
            version: Policy version (applied optimizer steps); grows within an incarnation.
            pieces: (box, dtype name, host array) one by one; see `WeightStore.write_shard`.
            specs: All canonical (Hugging Face) tensors of the model, not only this rank's.
            num_shards: Number of publishing ranks.
            shard_rank: This one, 0 .. num_shards - 1.
            meet: Called when our shard is announced; returns when the other ranks called theirs,
                and raises when one of them cannot. A lone rank needs none.
            timeout_s: For the announcements of all ranks, from the end of `meet`.

        Raises:
            WeightSyncError: the shards do not cover the specs exactly once, /dev/shm is full, a
                rank did not announce in time. The old version keeps being served.
            StaleIncarnationError: a newer train step has published; this process must end.
            Exception: what `meet` raises.
        """
        started = time.monotonic()
        number = VersionId(self._identity.incarnation, version)
        manifest = self._store.write_shard(number, shard_rank, pieces)
        all_specs = list(specs)
        request = Announce(
            manifest=manifest,
            num_shards=num_shards,
            specs_digest=specs_digest(all_specs),
            specs=None,
            write_s=time.monotonic() - started,
            timeout_s=0.0,
        )
        try:
            self._announce(request, all_specs)
            meet()
            # Also after a restart of the coordinator, which forgets versions that are not whole.
            self._announce(msgspec.structs.replace(request, timeout_s=timeout_s), all_specs)
        except (WeightSyncError, StaleIncarnationError):
            self._store.discard_shard(number, shard_rank)
            raise
        return number

    def _announce(self, request: Announce, specs: list[TensorSpec]) -> None:
        """Announce without the specs, and again with them when the coordinator wants them."""
        manifest, deadline = request.manifest, time.monotonic() + request.timeout_s
        why = f"publishing {manifest.version}, shard rank {manifest.rank} of {request.num_shards}"
        while True:
            if request.timeout_s > 0:
                left_s = max(deadline - time.monotonic(), 1.0)
                request = msgspec.structs.replace(request, timeout_s=left_s)
            call_s = request.timeout_s + _RPC_S
            reply = self._rpc.call("announce", request, Announced, timeout_s=call_s, why=why)
            if not reply.needs_specs:
                return
            if request.specs is not None:
                raise WeightSyncError(f"{why}: the coordinator asked for specs that it was sent")
            request = msgspec.structs.replace(request, specs=specs)


class WeightSubscriber:
    """Fetches whole versions, or its boxes of them. Used by one thread at a time (an engine's).

    Args:
        identity: This process; its node decides what is near.
        lease_s: Life of a read lease; renewed within a third of it.
        stall_s: A fetch fails when a node that is read gives nothing whole for this long.
        config: Section `transfer` of the recipe.
        access: Where other nodes' data servers are; None: ask their agents.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        lease_s: float = LEASE_S,
        stall_s: float = STALL_S,
        config: TransferConfig | None = None,
        access: Access | None = None,
    ) -> None:
        streams = (config or TransferConfig()).streams
        self._store = WeightStore(identity.run, identity.node)
        self._rpc = RpcClient(identity.run, SERVICE, identity)
        self._book = AccessBook(identity)
        key = data_key(identity.run)
        self._data = DataClient(key, access or self._book, BufferPool(), streams=streams)
        self._lease_s, self._stall_s = lease_s, stall_s
        who = f"{identity.role}/{identity.index}.{identity.rank}"
        self._reader = zlib.crc32(who.encode())  # differs from the others', not from run to run

    def close(self) -> None:
        """Close connections. Tensors stay valid."""
        self._data.close()
        self._book.close()
        self._rpc.close()

    def wait_newer(self, have: VersionId | None, timeout_s: float) -> VersionId | None:
        """Wait until a version newer than `have` is served, and return the newest; None in time.

        Newer goes by train incarnation first: after a rollback the version number is smaller.

        Raises:
            DeadlineError: the service itself does not answer (beyond timeout_s and a grace time
                for its restart).
        """
        request = WaitNewer(have=have, timeout_s=timeout_s)
        why = f"waiting for weights newer than {have}"
        return self._rpc.call(
            "wait_newer", request, Newest, timeout_s=timeout_s + _RPC_S, why=why
        ).version

    @overload
    def fetch(self, version: VersionId) -> dict[str, HostTensor]: ...

    @overload
    def fetch(self, version: VersionId, boxes: Iterable[Box]) -> dict[Box, HostTensor]: ...

    def fetch(
        self, version: VersionId, boxes: Iterable[Box] | None = None
    ) -> dict[str, HostTensor] | dict[Box, HostTensor]:
        """Read a version, all of it or none; every byte is checked against its checksum.

        Args:
            version: One that `wait_newer` told.
            boxes: What is wanted; they may repeat and overlap, each byte is read once. None: all
                tensors, whole.

        Returns:
            Whole canonical tensors by name, or what was wanted by box. Read-only; views of shared
            memory where one piece on this node has all of it (they outlive the version's
            retirement, and are strided where the box is not contiguous in its piece).

        Raises:
            WeightSyncError: the version vanished (retired, lost or corrupt): wait for the newest
                and fetch that. A corrupt or lost version is reported, and served to nobody again.
                Or a node gave nothing for `stall_s`: nothing is reported, fetch again.
            DeadlineError: the coordinator does not answer.
        """
        lease = _Lease(self._rpc, version, uuid.uuid4().hex, self._lease_s)
        started = time.monotonic()
        committed = lease.acquire()
        end = Release(version=version, lease=lease.name)
        try:
            plan = plan_pull(
                committed.specs,
                committed.shards,
                boxes,
                distance=lambda node: int(node != self._store.node),
                reader=self._reader,
            )
            tensors, nbytes = self._pull(plan, committed, lease)
            end = Release(
                version=version,
                lease=lease.name,
                fetch_s=time.monotonic() - started,
                read_bytes=nbytes,
                minimum_bytes=plan.minimum_bytes,
            )
        finally:
            lease.release(end)
        _log.info(
            "weights fetched %s",
            kv(version=version.version, seconds=end.fetch_s, gb=nbytes / 1e9),
        )
        if boxes is None:
            return {box.name: tensor for box, tensor in zip(plan.wanted, tensors, strict=True)}
        return dict(zip(plan.wanted, tensors, strict=True))

    def _pull(
        self, plan: PullPlan, committed: Committed, lease: "_Lease"
    ) -> tuple[list[HostTensor], int]:
        """Read far shards in the background and map near ones; returns also the bytes read."""
        near = {i: m for i, m in enumerate(committed.shards) if m.node == self._store.node}
        far = {i: m for i, m in enumerate(committed.shards) if i not in near}
        assembly = Assembly(plan, near)
        nbytes = sum(plan.shard_bytes[i] for i in near)
        pull = FarPull(self._data, plan, far, assembly, stall_s=self._stall_s, first=self._reader)
        try:
            with pull:
                for number, manifest in near.items():
                    self._map(number, manifest, plan, assembly, lease)
                nbytes += pull.wait(lease.renew_if_due)
        except RefusedError as err:
            lease.report_lost(str(err))
            raise WeightSyncError(f"{err}; fetch the newest version") from err
        except (TransferError, DeadlineError) as err:
            raise WeightSyncError(f"{err}; nothing was loaded, fetch again") from err
        return assembly.tensors(), nbytes

    def _map(
        self,
        number: int,
        manifest: ShardManifest,
        plan: PullPlan,
        assembly: Assembly,
        lease: "_Lease",
    ) -> None:
        """Take what is read of a shard of this node."""
        pieces = {read.piece for read in plan.reads[number]}
        if not pieces:
            return
        try:
            data = self._store.map_shard(manifest)
            for piece in sorted(pieces):
                lease.renew_if_due()
                verify_piece(manifest, manifest.pieces[piece], data)
        except WeightSyncError as err:
            lease.report_lost(str(err))
            raise
        assembly.view(number, manifest, data)


class _Lease:
    """A read lease: the version's files stay while it lives."""

    def __init__(self, rpc: RpcClient, version: VersionId, name: str, lease_s: float) -> None:
        self._rpc, self._version, self.name = rpc, version, name
        self._lease_s, self._renewed = lease_s, time.monotonic()

    def acquire(self) -> Committed:
        request = Acquire(version=self._version, lease=self.name)
        self._renewed = time.monotonic()
        why = f"read lease of {self._version}"
        reply = self._rpc.call("acquire", request, Acquired, timeout_s=_RPC_S, why=why)
        if reply.committed is None:
            raise WeightSyncError(f"weights {self._version}: a lease without manifests")
        return reply.committed

    def renew_if_due(self) -> None:
        """Renew; a coordinator that restarts gives the version a lease of its own meanwhile."""
        if time.monotonic() - self._renewed > self._lease_s / 3:
            request = Acquire(version=self._version, lease=self.name, is_renewal=True)
            if self._try("acquire", request, Acquired):
                self._renewed = time.monotonic()

    def release(self, request: Release) -> None:
        """End the lease. Failure is logged only: the lease ends by itself, the weights are read."""
        self._try("release", request, Done)

    def report_lost(self, reason: str) -> None:
        """Withdraw the version; who reads it next finds out as well when this does not arrive."""
        self._try("lost", Lost(version=self._version, reason=reason), Done)

    def _try(self, method: str, request: msgspec.Struct, reply: type[msgspec.Struct]) -> bool:
        try:
            self._rpc.call(method, request, reply, timeout_s=_ASIDE_S, why=f"{self._version}")
        except DeadlineError as err:
            _log.warning("read lease: no answer %s", kv(method=method, reason=err))
            return False
        return True
