"""The `weights` service: whole versions only, newest first, nothing deleted under a reader.

    train ranks --announce(manifest)------> coordinator --record--> RUN/journal/weights
                <--committed or refused---      |
    engines ----wait_newer, acquire, release--->|  (bytes go from node to node, not through here)
    node agents --sweep(what is here)---------->|--what can go--> they unlink it

Waits: a second announce waits until all shards of its version came (unblocked by the last one;
the first waits for nobody), wait_newer for a commit, sweep for a retirement or a released lease;
all end at the caller's deadline.

Restart: one file per served version is the journal. Publishers and engines that wait are answered
again after the restart, because their requests are repeated; so pending versions need no record.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import Caller, RpcServer
from relax_hpc.dcs.layout import TensorSpec
from relax_hpc.dcs.store import ShardManifest, VersionId
from relax_hpc.dcs.versions import Committed, VersionTable, specs_digest
from relax_hpc.errors import WeightSyncError
from relax_hpc.log import kv
from relax_hpc.metrics.writers import MetricWriter
from relax_hpc.runfolder import write_atomic

_log = logging.getLogger(__name__)

SERVICE = "weights"
KEEP_VERSIONS = 2
"""The one that engines serve and the one before, so that a slow reader still finds its version."""
LEASE_S = 120.0
"""Readers renew within a third of it; a dead reader delays a deletion by no more than this."""


class Announce(msgspec.Struct, frozen=True, kw_only=True):
    """A train rank wrote its shard; said again with a time-out, it waits for the whole version."""

    manifest: ShardManifest
    num_shards: int
    specs_digest: int
    specs: list[TensorSpec] | None
    """None: the coordinator knows them by their digest (they are the same for every version)."""
    write_s: float
    """Seconds that writing the shard took."""
    timeout_s: float
    """For the shards of the other ranks; 0: do not wait for them."""


class Announced(msgspec.Struct, frozen=True):
    """The shard is known, and so are all others when the announcement waited for them.

    `needs_specs`: it is not, send the announcement again with the specs.
    """

    needs_specs: bool


class WaitNewer(msgspec.Struct, frozen=True, kw_only=True):
    """Wait until a version newer than `have` is served."""

    have: VersionId | None
    timeout_s: float


class Newest(msgspec.Struct, frozen=True):
    """The newest version if it is newer than what the caller has, else None."""

    version: VersionId | None


class Acquire(msgspec.Struct, frozen=True, kw_only=True):
    """Begin to read a version, or go on reading it (renew)."""

    version: VersionId
    lease: str
    is_renewal: bool = False
    """The caller has the manifests: do not send them again."""


class Acquired(msgspec.Struct, frozen=True):
    """What there is to read; None for a renewal."""

    committed: Committed | None


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """Reading has ended."""

    version: VersionId
    lease: str
    fetch_s: float = -1.0
    """Seconds from acquire to the last verified byte; < 0: the fetch failed."""
    read_bytes: int = 0
    """Bytes that were mapped or came."""
    minimum_bytes: int = 0
    """Bytes of what was wanted."""


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """A reader found that a shard is gone or corrupt."""

    version: VersionId
    reason: str


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """A node agent tells which versions its node has, and waits for something to delete."""

    node: str
    present: list[VersionId]
    """Listed after the last reply came."""
    seen: int
    """`Garbage.num_retirements` of the last reply; -1 at first. What retired since then may be
    younger than the list, so the node is told to list anew."""
    timeout_s: float


class Garbage(msgspec.Struct, frozen=True):
    """Versions that the node can delete. Empty: list anew and ask again."""

    versions: list[VersionId]
    num_retirements: int


class Done(msgspec.Struct, frozen=True):
    """Nothing to say."""


class WeightCoordinator:
    """Serves `weights`. One event loop owns all state; nothing here needs a lock."""

    def __init__(
        self,
        server: RpcServer,
        identity: Identity,
        *,
        keep: int = KEEP_VERSIONS,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the journal and register the handlers; `server.run()` starts serving.

        Args:
            server: The server of service `weights`.
            identity: The dcs task that runs this service.
            keep: Newest versions that stay in shared memory.
            lease_s: Life of a read lease that is not renewed.
            clock: Monotonic seconds.
        """
        self.table = VersionTable(attempt=identity.attempt, keep=keep, lease_s=lease_s, clock=clock)
        self._records = VersionRecords(identity.run.journal / "weights", identity.attempt)
        self._specs: dict[int, list[TensorSpec]] = {}
        self._metrics = MetricWriter(identity.run, "dcs", 0)
        self._slowest: dict[str, float] = {}
        self._changed = asyncio.Condition()
        self._lease_s = lease_s
        restored = self._records.load()
        self.table.restore(restored)
        for entry in restored:
            self._specs[specs_digest(entry.specs)] = entry.specs
        server.register("announce", Announce, self._announce)
        server.register("wait_newer", WaitNewer, self._wait_newer)
        server.register("acquire", Acquire, self._acquire)
        server.register("release", Release, self._release)
        server.register("lost", Lost, self._lost)
        server.register("sweep", Sweep, self._sweep)
        server.on_newer(self._forget_readers)

    async def _announce(self, caller: Caller, request: Announce) -> Announced:
        version = request.manifest.version
        if version.incarnation != caller.incarnation:
            raise WeightSyncError(
                f"weights {version} announced by incarnation {caller.incarnation} of "
                f"{caller.role}: it publishes its own versions only"
            )
        if self.table.check_announce(request.manifest, request.num_shards):
            specs = self._known_specs(request)
            if specs is None:
                return Announced(needs_specs=True)
            await self._add_shard(request, specs)
        if request.timeout_s == 0:
            return Announced(needs_specs=False)
        if not await self._wait(lambda: self.table.is_settled(version), request.timeout_s):
            raise WeightSyncError(
                f"weights {version}: the shards of ranks {self.table.missing_ranks(version)} of "
                f"{request.num_shards} did not come within {request.timeout_s:g} s; see the logs "
                "of these train ranks"
            )
        self.table.check_settled(version)
        return Announced(needs_specs=False)

    async def _add_shard(self, request: Announce, specs: list[TensorSpec]) -> None:
        version = request.manifest.version
        self._note("dcs/write_s_max", version, request.write_s)
        try:
            whole = self.table.announce(request.manifest, request.num_shards, specs)
        except WeightSyncError:
            await self._notify()  # the other ranks of a refused version wait for it
            raise
        if whole is not None:
            self._commit(whole)
        await self._notify()

    def _commit(self, whole: Committed) -> None:
        version, newest = whole.version, self.table.newest
        before = None if newest is None else self.table.get(newest)
        self._records.save(whole)  # first durable, then visible
        for gone in self.table.commit(whole):
            self._records.delete(gone)
        _log.info(
            "weights committed %s",
            kv(
                version=version.version,
                incarnation=version.incarnation,
                shards=len(whole.shards),
                gb=whole.nbytes / 1e9,
                digest=f"{whole.digest:016x}",
            ),
        )
        unchanged = before is not None and _is_unchanged(before, whole)
        if unchanged:
            _log.warning(
                "policy unchanged: the optimizer step moved no weight %s",
                kv(version=version.version, digest=f"{whole.digest:016x}", hint="gradients, lr"),
            )
        values = {"dcs/unchanged_policy": float(unchanged), "dcs/weights_gb": whole.nbytes / 1e9}
        self._metrics.log(version.version, values)

    async def _wait_newer(self, _: Caller, request: WaitNewer) -> Newest:
        def is_newer() -> bool:
            newest = self.table.newest
            return newest is not None and (request.have is None or newest > request.have)

        found = await self._wait(is_newer, request.timeout_s)
        return Newest(self.table.newest if found else None)

    async def _acquire(self, caller: Caller, request: Acquire) -> Acquired:
        entry = self.table.acquire(request.version, _lease_name(caller, request.lease))
        return Acquired(None if request.is_renewal else entry)

    async def _release(self, caller: Caller, request: Release) -> Done:
        self.table.release(_lease_name(caller, request.lease))
        if request.fetch_s >= 0:
            self._note("dcs/fetch_s_max", request.version, request.fetch_s)
            self._note("dcs/fetch_gb", request.version, request.read_bytes / 1e9)
            self._note("dcs/fetch_minimum_gb", request.version, request.minimum_bytes / 1e9)
        await self._retire()
        return Done()

    async def _lost(self, caller: Caller, request: Lost) -> Done:
        if self.table.withdraw(request.version, request.reason):
            self._records.delete(request.version)
            _log.error(
                "weights withdrawn %s",
                kv(
                    version=request.version.version,
                    incarnation=request.version.incarnation,
                    reader=f"{caller.role}/{caller.index}",
                    reason=request.reason,
                    now_serving=self.table.newest,
                ),
            )
        await self._notify()
        return Done()

    async def _sweep(self, _: Caller, request: Sweep) -> Garbage:
        def is_worth_a_look() -> bool:
            has_garbage = bool(self.table.garbage(request.present))
            return has_garbage or self.table.num_retirements != request.seen

        await self._retire()  # leases may have run out since the last commit
        await self._wait(is_worth_a_look, request.timeout_s)
        return Garbage(self.table.garbage(request.present), self.table.num_retirements)

    async def _retire(self) -> None:
        for version in self.table.retire():
            self._records.delete(version)
        await self._notify()

    def _known_specs(self, request: Announce) -> list[TensorSpec] | None:
        if request.specs is not None:
            if specs_digest(request.specs) != request.specs_digest:
                raise WeightSyncError("weight specs do not have the digest that came with them")
            self._specs.setdefault(request.specs_digest, request.specs)
        return self._specs.get(request.specs_digest)

    def _note(self, name: str, version: VersionId, value: float) -> None:
        """Log the largest value so far of a version; readers of metrics take the latest line."""
        key = f"{name} {version.folder_name}"
        if value > self._slowest.get(key, -1.0):
            self._slowest[key] = value
            self._metrics.log(version.version, {name: value})
        while len(self._slowest) > 64:  # the newest few versions are enough
            del self._slowest[next(iter(self._slowest))]

    def _forget_readers(self, caller: Caller) -> None:
        """A role came back with a newer incarnation: what its older ones read is free."""
        self.table.release_reader(f"{caller.role}/{caller.index}.")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(predicate)
            except TimeoutError:
                return False
            return True


class VersionRecords:
    """Durable records of served versions: one JSON file each, written whole or not at all."""

    def __init__(self, folder: Path, attempt: int) -> None:
        self._folder, self._attempt = folder, attempt
        folder.mkdir(parents=True, exist_ok=True)

    def load(self) -> list[Committed]:
        """Read the versions of this attempt; forget those of older ones (their memory is gone)."""
        found = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                entry = msgspec.json.decode(path.read_bytes(), type=Committed)
            except msgspec.DecodeError as err:
                raise WeightSyncError(
                    f"{path} is not a record of a weight version ({err}); if the disk was damaged, "
                    "delete it: the train step publishes again when it restarts"
                ) from err
            if entry.attempt == self._attempt:
                found.append(entry)
            else:
                path.unlink(missing_ok=True)
        return found

    def save(self, entry: Committed) -> None:
        """Make a version durable."""
        write_atomic(self._path(entry.version), msgspec.json.encode(entry))

    def delete(self, version: VersionId) -> None:
        """Forget a version."""
        self._path(version).unlink(missing_ok=True)

    def _path(self, version: VersionId) -> Path:
        return self._folder / f"{version.folder_name}.json"


def _lease_name(caller: Caller, lease: str) -> str:
    return f"{caller.role}/{caller.index}.{caller.incarnation}:{lease}"


def _is_unchanged(before: Committed, now: Committed) -> bool:
    """Same bytes in another version. A restarted train step publishes its version again: fine."""
    return before.digest == now.digest and before.version.version != now.version.version
