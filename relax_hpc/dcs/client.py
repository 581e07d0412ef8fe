"""Both ends of the weight service: train ranks publish, engines fetch whole versions.

Bytes go from the publisher's node to the reader: mapped when both are on one node, else read in
ranges through the agent of the publisher's node. The coordinator sees manifests only.
"""

import itertools
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import RpcClient
from relax_hpc.dcs.assemble import assemble
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
from relax_hpc.dcs.layout import Box, TensorSpec
from relax_hpc.dcs.layout import HostTensor as HostTensor  # the type that fetch returns
from relax_hpc.dcs.store import ShardManifest, VersionId, WeightStore, verify_shard
from relax_hpc.dcs.versions import Committed, specs_digest
from relax_hpc.errors import DeadlineError, StaleIncarnationError, WeightSyncError
from relax_hpc.log import kv
from relax_hpc.transfer.wire import agent_service

_log = logging.getLogger(__name__)

RANGE_BYTES = 8 * 2**20
"""Bytes of one remote read: large against a round trip, small against the agent's memory."""
_RPC_S = 120.0  # longer than a restart of the dcs step takes


class ReadShard(msgspec.Struct, frozen=True, kw_only=True):
    """Request of `read_weights` to the agent of the node that holds a shard."""

    version: VersionId
    rank: int
    offset: int
    nbytes: int


class ShardBytes(msgspec.Struct, frozen=True, kw_only=True):
    """A range of a shard; None when the shard is not there (retired or lost)."""

    data: bytes | None


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
    """Fetches whole versions. Used by one thread at a time (an engine's)."""

    def __init__(self, identity: Identity, lease_s: float = LEASE_S) -> None:
        self._identity = identity
        self._store = WeightStore(identity.run, identity.node)
        self._rpc = RpcClient(identity.run, SERVICE, identity)
        self._agents: dict[str, RpcClient] = {}
        self._lease_s = lease_s

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

    def fetch(self, version: VersionId) -> dict[str, HostTensor]:
        """Read a whole version; every byte is checked against the publisher's checksums.

        Returns:
            Whole canonical tensors by name. Read-only; views of shared memory where the shard is
            on this node and one piece is the whole tensor (they outlive the version's retirement).

        Raises:
            WeightSyncError: the version vanished (retired, lost or corrupt): wait for the newest
                and fetch that. A corrupt or lost version is reported, and served to nobody again.
            DeadlineError: the service or an agent does not answer.
        """
        lease = _Lease(self._rpc, version, uuid.uuid4().hex, self._lease_s)
        started = time.monotonic()
        committed = lease.acquire()
        fetch_s = -1.0
        try:
            tensors = self._read(committed, lease)
            fetch_s = time.monotonic() - started
        finally:
            lease.release(fetch_s)
        _log.info(
            "weights fetched %s",
            kv(version=version.version, seconds=fetch_s, gb=committed.nbytes / 1e9),
        )
        return tensors

    def _read(self, committed: Committed, lease: "_Lease") -> dict[str, HostTensor]:
        shards = []
        for manifest in committed.shards:
            lease.renew_if_due()
            if manifest.node == self._store.node:
                data = self._read_local(manifest, lease)
            else:
                data = self._read_remote(manifest, lease)
            shards.append((manifest, data))
        return assemble(committed.specs, shards)

    def _read_local(self, manifest: ShardManifest, lease: "_Lease") -> np.ndarray:
        try:
            data = self._store.map_shard(manifest)
            verify_shard(manifest, data)
        except WeightSyncError as err:
            lease.report_lost(str(err))
            raise
        return data

    def _read_remote(self, manifest: ShardManifest, lease: "_Lease") -> np.ndarray:
        """Read a shard through its node's agent, once more when bytes were hurt on the way."""
        for attempt in itertools.count(1):
            data = self._read_ranges(manifest, lease)
            try:
                verify_shard(manifest, data)
            except WeightSyncError as err:
                if attempt == 2:
                    lease.report_lost(str(err))
                    raise
                _log.warning("weights read again %s", kv(node=manifest.node, reason=err))
            else:
                data.flags.writeable = False
                return data
        raise AssertionError("unreachable")

    def _read_ranges(self, manifest: ShardManifest, lease: "_Lease") -> np.ndarray:
        agent = self._agent(manifest.node)
        data = np.empty(manifest.nbytes, dtype=np.uint8)
        for offset in range(0, manifest.nbytes, RANGE_BYTES):
            lease.renew_if_due()
            nbytes = min(RANGE_BYTES, manifest.nbytes - offset)
            request = ReadShard(
                version=manifest.version, rank=manifest.rank, offset=offset, nbytes=nbytes
            )
            why = f"reading {manifest.version}, shard rank {manifest.rank}, bytes {offset}.."
            reply = agent.call("read_weights", request, ShardBytes, timeout_s=_RPC_S, why=why)
            if reply.data is None or len(reply.data) != nbytes:
                seen = "is gone" if reply.data is None else f"gave {len(reply.data)} bytes"
                reason = (
                    f"shard of rank {manifest.rank} of {manifest.version} on node {manifest.node} "
                    f"{seen} at byte {offset} of {manifest.nbytes}"
                )
                lease.report_lost(reason)
                raise WeightSyncError(f"weights: {reason}; fetch the newest version")
            data[offset : offset + nbytes] = np.frombuffer(reply.data, dtype=np.uint8)
        return data

    def _agent(self, node: str) -> RpcClient:
        if node not in self._agents:
            self._agents[node] = RpcClient(self._identity.run, agent_service(node), self._identity)
        return self._agents[node]


class _Lease:
    """A read lease: the version's files stay while it lives."""

    def __init__(self, rpc: RpcClient, version: VersionId, name: str, lease_s: float) -> None:
        self._rpc, self._version, self._name = rpc, version, name
        self._lease_s, self._renewed = lease_s, time.monotonic()

    def acquire(self) -> Committed:
        request = Acquire(version=self._version, lease=self._name)
        self._renewed = time.monotonic()
        why = f"read lease of {self._version}"
        reply = self._rpc.call("acquire", request, Acquired, timeout_s=_RPC_S, why=why)
        if reply.committed is None:
            raise WeightSyncError(f"weights {self._version}: a lease without manifests")
        return reply.committed

    def renew_if_due(self) -> None:
        if time.monotonic() - self._renewed > self._lease_s / 3:
            self._renewed = time.monotonic()
            request = Acquire(version=self._version, lease=self._name, is_renewal=True)
            why = f"renewing the read lease of {self._version}"
            self._rpc.call("acquire", request, Acquired, timeout_s=_RPC_S, why=why)

    def release(self, fetch_s: float) -> None:
        """End the lease. Failure is logged only: the lease ends by itself, the weights are read."""
        request = Release(version=self._version, lease=self._name, fetch_s=fetch_s)
        try:
            self._rpc.call("release", request, Done, timeout_s=_RPC_S, why="read lease")
        except DeadlineError as err:
            _log.warning("read lease not released %s", kv(reason=err))

    def report_lost(self, reason: str) -> None:
        request = Lost(version=self._version, reason=reason)
        self._rpc.call("lost", request, Done, timeout_s=_RPC_S, why=f"reporting {self._version}")
