"""Which weight versions exist, who reads them, and which may go: the coordinator's state.

Pure bookkeeping with a clock; the coordinator adds the network and the journal.

    announced shards --all there, cover the specs--> committed --not among the newest K,
    (pending)                                        (served)    nobody reads--> retired (garbage)
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable

import msgspec
import xxhash

from relax_hpc.dcs.assemble import check_dtypes
from relax_hpc.dcs.layout import TensorSpec, check_coverage
from relax_hpc.dcs.store import ShardManifest, VersionId, check_manifest
from relax_hpc.errors import StaleIncarnationError, WeightSyncError


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """A whole version: all that a reader needs to fetch it."""

    version: VersionId
    specs: list[TensorSpec]
    shards: list[ShardManifest]
    digest: int
    """xxh3-64 over all pieces (box, dtype, checksum): equal weights in equal cuts, equal digest."""
    attempt: int
    """Attempt of the job whose nodes hold the shards."""

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.nbytes for shard in self.shards)


@dataclasses.dataclass(slots=True)
class _Pending:
    specs: list[TensorSpec]
    num_shards: int
    shards: dict[int, ShardManifest] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class _Lease:
    version: VersionId
    until: float


class VersionTable:
    """Committed and pending versions with read leases. Not thread-safe: one event loop owns it."""

    def __init__(
        self, *, attempt: int, keep: int, lease_s: float, clock: Callable[[], float]
    ) -> None:
        """Start empty.

        Args:
            attempt: Attempt of the job; committed versions carry it.
            keep: Newest versions that stay although nobody reads them, >= 1.
            lease_s: A read lease that is not renewed for this long is void.
            clock: Monotonic seconds.
        """
        self._attempt, self._keep, self._lease_s, self._clock = attempt, keep, lease_s, clock
        self._committed: dict[VersionId, Committed] = {}
        self._pending: dict[VersionId, _Pending] = {}
        self._leases: dict[str, _Lease] = {}
        self._refused: dict[VersionId, str] = {}  # and withdrawn ones: why
        self._incarnation = 0  # highest one that announced a shard
        self.num_retirements = 0
        """Grows whenever something became garbage."""

    def restore(self, committed: Iterable[Committed]) -> None:
        """Serve versions of an earlier life of the coordinator.

        Leases are not journalled: each version gets a short one, in case it was being read.
        Readers renew within a third of a lease's life.
        """
        for entry in committed:
            self._committed[entry.version] = entry
            self._incarnation = max(self._incarnation, entry.version.incarnation)
            lease = _Lease(entry.version, self._clock() + self._lease_s / 2)
            self._leases[f"restored {entry.version.folder_name}"] = lease

    @property
    def newest(self) -> VersionId | None:
        """The version that engines should serve."""
        return max(self._committed, default=None)

    def get(self, version: VersionId) -> Committed | None:
        """The committed version, if it is still there."""
        return self._committed.get(version)

    def missing_ranks(self, version: VersionId) -> list[int]:
        """Ranks of a pending version whose shards have not come."""
        pending = self._pending.get(version)
        return [] if pending is None else sorted({*range(pending.num_shards)} - {*pending.shards})

    def is_settled(self, version: VersionId) -> bool:
        """Is there nothing to wait for: committed (perhaps retired since), refused or outdated?"""
        return version not in self._pending

    def check_settled(self, version: VersionId) -> None:
        """Raise the reason why a version that was announced is not whole.

        Raises:
            StaleIncarnationError, WeightSyncError: as for `announce`.
        """
        if version in self._refused:
            raise WeightSyncError(self._refused[version])
        if version.incarnation < self._incarnation:
            raise self._stale(version)

    def check_announce(self, manifest: ShardManifest, num_shards: int) -> bool:
        """Judge a shard before its specs are known; False: it is already part of a whole version.

        Raises:
            StaleIncarnationError: a newer train incarnation has published.
            WeightSyncError: the manifest is malformed or contradicts what was announced before.
        """
        version = manifest.version
        if version.incarnation < self._incarnation:
            raise self._stale(version)
        if version in self._refused:
            raise WeightSyncError(self._refused[version])
        check_manifest(manifest)
        if not 0 <= manifest.rank < num_shards:
            raise WeightSyncError(
                f"weights {version}: shard rank {manifest.rank} of {num_shards} shards"
            )
        whole = self._committed.get(version)
        if whole is not None:
            if manifest in whole.shards:  # a repeated message
                return False
            raise WeightSyncError(
                f"weights {version} are committed already; a version cannot change"
            )
        newest = self.newest
        if newest is not None and version < newest:
            raise WeightSyncError(
                f"weights {version} refused: {newest} is committed, versions only grow"
            )
        return True

    def announce(
        self, manifest: ShardManifest, num_shards: int, specs: list[TensorSpec]
    ) -> Committed | None:
        """Add a shard; return the version when this completes it, not yet committed.

        The caller makes it durable and then calls `commit`.

        Raises:
            StaleIncarnationError, WeightSyncError: see `check_announce`; also gaps, overlaps and
                other dtypes. A version that fails here is forgotten as a whole.
        """
        if not self.check_announce(manifest, num_shards):
            return None
        version = manifest.version
        if version.incarnation > self._incarnation:
            self._incarnation = version.incarnation
            self.num_retirements += 1  # what the older incarnation did not finish
        self._pending = {
            v: p for v, p in self._pending.items() if v.incarnation == version.incarnation
        }
        pending = self._pending.setdefault(version, _Pending(specs, num_shards))
        self._check_agreement(pending, manifest, num_shards, specs)
        pending.shards[manifest.rank] = manifest
        if len(pending.shards) < num_shards:
            return None
        return self._complete(version, pending)

    def commit(self, entry: Committed) -> list[VersionId]:
        """Serve a complete version; return the versions that retire now."""
        self._committed[entry.version] = entry
        self._pending = {v: p for v, p in self._pending.items() if v > entry.version}
        return self.retire()

    def retire(self) -> list[VersionId]:
        """Forget committed versions that are neither among the newest nor being read.

        Versions of older incarnations count as old as soon as the newest one committed.
        """
        newest = self.newest
        if newest is None:
            return []
        now = self._clock()
        self._leases = {k: lease for k, lease in self._leases.items() if lease.until > now}
        read = {lease.version for lease in self._leases.values()}
        current = sorted(v for v in self._committed if v.incarnation == newest.incarnation)
        keep = {*current[-self._keep :], *read}
        gone = [v for v in self._committed if v not in keep]
        for version in gone:
            del self._committed[version]
        self.num_retirements += len(gone)
        return gone

    def acquire(self, version: VersionId, lease: str) -> Committed:
        """Give a reader a lease, or lengthen the one it has. Idempotent per lease name."""
        entry = self._committed.get(version)
        if entry is None:
            raise WeightSyncError(
                f"weights {version} are not served any more (newest: {self.newest}); "
                "fetch the newest version"
            )
        self._leases[lease] = _Lease(version, self._clock() + self._lease_s)
        return entry

    def release(self, lease: str) -> None:
        """End a lease; unknown names are ignored (the release was repeated, or the lease void)."""
        self._leases.pop(lease, None)

    def release_reader(self, prefix: str) -> None:
        """End all leases whose name starts with `prefix`: their reader is gone."""
        self._leases = {k: v for k, v in self._leases.items() if not k.startswith(prefix)}

    def withdraw(self, version: VersionId, reason: str) -> bool:
        """Serve a version no more, because a shard is lost or corrupt. False: it was not served."""
        self._refused[version] = f"weights {version} were withdrawn: {reason}"
        self.num_retirements += 1
        return self._committed.pop(version, None) is not None

    def garbage(self, present: Iterable[VersionId]) -> list[VersionId]:
        """Say which of the versions that a node has can be deleted.

        Not those that are served, nor those that may be about to be announced: a shard file exists
        before its announcement arrives.
        """
        return [v for v in present if self._is_garbage(v)]

    def _is_garbage(self, version: VersionId) -> bool:
        if version in self._committed:
            return False
        newest = self.newest
        superseded = newest is not None and version < newest
        outdated = version.incarnation < self._incarnation
        return superseded or outdated or version in self._refused

    def _stale(self, version: VersionId) -> StaleIncarnationError:
        return StaleIncarnationError(
            f"weights {version} refused: train incarnation {self._incarnation} has published"
        )

    @staticmethod
    def _check_agreement(
        pending: _Pending, manifest: ShardManifest, num_shards: int, specs: list[TensorSpec]
    ) -> None:
        where = f"weights {manifest.version}, shard of rank {manifest.rank}"
        if num_shards != pending.num_shards:
            raise WeightSyncError(
                f"{where}: says {num_shards} shards, others said {pending.num_shards}"
            )
        if specs is not pending.specs and specs != pending.specs:
            raise WeightSyncError(f"{where}: its tensor specs differ from those of other ranks")
        other = pending.shards.get(manifest.rank)
        if other is not None and other != manifest:
            raise WeightSyncError(f"{where}: announced twice with different contents")

    def _complete(self, version: VersionId, pending: _Pending) -> Committed:
        shards = [pending.shards[rank] for rank in sorted(pending.shards)]
        try:
            for shard in shards:
                check_dtypes(pending.specs, shard)
            boxes = {shard.rank: [piece.box for piece in shard.pieces] for shard in shards}
            check_coverage(pending.specs, boxes)
        except WeightSyncError as err:
            del self._pending[version]
            self._refused[version] = f"weights {version} refused: {err}"
            self.num_retirements += 1
            raise WeightSyncError(self._refused[version]) from err
        return Committed(
            version=version,
            specs=pending.specs,
            shards=shards,
            digest=_digest(shards),
            attempt=self._attempt,
        )


def specs_digest(specs: list[TensorSpec]) -> int:
    """xxh3-64 of the specs, so that publishers send them once and not with every version."""
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(specs))


def _digest(shards: list[ShardManifest]) -> int:
    pieces = itertools.chain.from_iterable(shard.pieces for shard in shards)
    seen = sorted((p.box.name, p.box.start, p.box.stop, p.dtype, p.checksum) for p in pieces)
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(seen))
