"""Weights across clusters: the engines' side. Follows a source, publishes its versions here.

    trainer's cluster                       engines' cluster
    weights service <- MirrorSource  <-TCP-  Mirror -> weights service -> engines (WeightSubscriber)
                                               | base: the version that is served here
                                               | spool: chunks of the next one, survives a kill

    pull: 1. what is served here is the base, and what the source is told that we have
          2. wait for a newer version at the source
          3. fetch its chunks, encoded against the base, or all of it, into the spool
          4. decode tensor after tensor, each checked against the source's checksum, into a shard
             of the local store; announce it: now it is served, as a whole, under the same version

So there is no state besides the local weight service and the spool: whatever is killed when, the
next pull goes on. A base that the source does not know, another digest, other tensors or a wrong
result: the next pull fetches all of it.
"""

import dataclasses
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from relax_hpc.control.identity import Identity
from relax_hpc.dcs.client import WeightPublisher, WeightSubscriber
from relax_hpc.dcs.layout import Box, itemsize
from relax_hpc.dcs.mirror_chunks import Content, Segment, Tensors, content_of, cut, decode_tensors
from relax_hpc.dcs.mirror_spool import Spool, SpoolKey
from relax_hpc.dcs.mirror_stream import Address, Cancelled, Download, Gone, Link, Patience
from relax_hpc.dcs.mirror_wire import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, Held, Offer, Open
from relax_hpc.dcs.store import VersionId
from relax_hpc.errors import WeightSyncError
from relax_hpc.log import kv
from relax_hpc.metrics.writers import MetricWriter
from relax_hpc.transfer.frames import FrameError, WrongKeyError

_log = logging.getLogger(__name__)

_LONG_POLL_S = 20.0
_PAUSE_S = 0.2
_SHM = Path("/dev/shm")


@dataclasses.dataclass(frozen=True, slots=True)
class _Base:
    """A version that is served here."""

    version: VersionId
    tensors: Tensors
    content: Content

    @property
    def held(self) -> Held:
        return Held(self.version, self.content.digest)


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """An offer that was checked."""

    version: VersionId
    content: Content
    base: _Base | None
    chunks: list[list[Segment]]
    key: SpoolKey

    @classmethod
    def of(cls, offer: Offer, base: _Base | None) -> "_Job":
        version, content = offer.version, offer.content
        assert version is not None and content is not None
        _check_sizes(version, content, offer.chunk_bytes)
        if offer.base is None:
            base = None
        elif base is None or base.version != offer.base or base.content.specs != content.specs:
            raise WeightSyncError(f"{version}: the source offers a delta against {offer.base}")
        chunks = cut(content.specs, offer.chunk_bytes)
        key = SpoolKey(
            version,
            content.digest,
            offer.base,
            0 if base is None else base.content.digest,
            offer.chunk_bytes,
            len(chunks),
        )
        return cls(version, content, base, chunks, key)


@dataclasses.dataclass(kw_only=True, slots=True)
class MirrorStats:
    """What a mirror did since it was started."""

    versions: int = 0
    full_versions: int = 0
    """Of them, those that came as a whole."""
    received_bytes: int = 0
    """Encoded bytes of chunks on the wire, also those that were lost with a connection."""
    kept_bytes: int = 0
    """Of them, those of chunks that were verified."""
    resumed_bytes: int = 0
    """Encoded bytes that an earlier mirror, or an earlier pull, had left in the spool."""
    breaks: int = 0
    """Connections of streams that broke and were made anew."""


class Mirror:
    """Fetches versions of another cluster's trainer. Used by one thread; one per run.

    Args:
        identity: of this process in the engines' run, role `mirror`; its node holds the versions.
        key: `load_mirror_key` of the file that both clusters have.
        address: (host, port) of the MirrorSource.
        spool: folder for what has come of a version; room for a whole model. Of this mirror only.
        streams: connections for chunks.
        patience_s: an error when the source sent nothing of use for so long.
    """

    def __init__(
        self,
        identity: Identity,
        key: bytes,
        address: Address,
        spool: Path,
        *,
        streams: int = 4,
        patience_s: float = 600.0,
    ) -> None:
        self._identity, self._key, self._address = identity, key, address
        self._streams, self._patience_s = streams, patience_s
        spool.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._spool = Spool(spool)
        self._subscriber = WeightSubscriber(identity)
        self._publishers: dict[int, WeightPublisher] = {}
        self._metrics = MetricWriter(identity.run, "mirror", identity.index)
        self._base: _Base | None = None
        self._newer_than: VersionId | None = None
        self._is_full_wanted = False
        self._link: Link | None = None
        self.stats = MirrorStats()

    def pull(self, timeout_s: float) -> VersionId | None:
        """Wait for a version newer than the one served here, fetch it, serve it.

        Args:
            timeout_s: for a newer version to be there. A source that does not answer is waited
                for patience_s; what is fetched may take as long as chunks come that often.

        Returns:
            The version that is served now; None: there was no newer one in time.

        Raises:
            DeadlineError: the source did not answer, or sent nothing; names host, version, bytes.
                What came stays in the spool.
            WeightSyncError: the version was refused here, or cannot be stored or decoded; the old
                one keeps being served. The next pull looks for a newer one.
            TransferError: the source does not know the key.
            StaleIncarnationError: a newer train incarnation has published here.
        """
        self._look_at_local_service()
        deadline = time.monotonic() + timeout_s
        while (job := self._next_job(deadline)) is not None:
            started, before = time.monotonic(), dataclasses.replace(self.stats)
            try:
                self._fetch(job)
            except Gone:
                _log.info("offer is void, asked anew %s", kv(version=job.version))
                continue
            if self._publish(job):
                self._log_success(job, started, before)
                return job.version
        return None

    def close(self) -> None:
        """Close files and connections; the spool stays."""
        self._drop_link()
        self._spool.leave()
        self._base = None

    # -- what is here -------------------------------------------------------------------------

    def _look_at_local_service(self) -> None:
        """Take the version that is served here as base: engines may get it, so it is whole."""
        newest = self._subscriber.wait_newer(None, 0.0)
        if self._base is not None and newest == self._base.version:
            return
        self._base = None
        if newest is None:
            return
        self._refuse_until(newest)
        try:
            tensors = self._subscriber.fetch(newest)
        except WeightSyncError as err:  # lost or corrupt, and withdrawn by this very fetch
            _log.warning("no base, the next version comes whole %s", kv(reason=err))
            return
        self._base = _Base(newest, tensors, content_of(tensors))

    def _refuse_until(self, version: VersionId) -> None:
        if self._newer_than is None or version > self._newer_than:
            self._newer_than = version

    # -- what is offered ----------------------------------------------------------------------

    def _next_job(self, deadline: float) -> _Job | None:
        patience = Patience(self._address, "a newer version", self._patience_s)
        key = self._spool.key or self._spool.load()
        failures, note, wrong_keys = 0, "", 0
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            try:
                # An idle source is heard of well within our patience.
                wait_s = min(left_s, _LONG_POLL_S, self._patience_s / 2)
                offer = self._ask(key, wait_s, patience)
            except WrongKeyError as err:
                wrong_keys += 1
                if wrong_keys == 3:  # once may be a byte that was hurt on the way
                    raise
                note = str(err)
            except (OSError, FrameError) as err:
                note = str(err)
            else:
                if offer.version is not None:
                    return _Job.of(offer, None if self._is_full_wanted else self._base)
                failures, note = 0, offer.note
                patience.came(0)
                if left_s == 0.0:
                    return None
                patience.cancelled.wait(min(_PAUSE_S, left_s))  # it may have answered at once
                continue
            self._drop_link()
            failures += 1
            if failures == 1:
                host = f"{self._address[0]}:{self._address[1]}"
                _log.warning("no answer of the source %s", kv(address=host, reason=note))
            patience.pause(failures, note)

    def _ask(self, key: SpoolKey | None, wait_s: float, patience: Patience) -> Offer:
        if self._link is None:
            self._link = Link.open(self._key, patience)
        self._link.patience = patience
        base = None if self._is_full_wanted else self._base
        request = Open(
            have=None if base is None else base.held,
            newer_than=self._newer_than,
            want=None if key is None else key.version,
            wait_s=wait_s,
        )
        return self._link.open_version(request)

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None

    # -- one version --------------------------------------------------------------------------

    def _fetch(self, job: _Job) -> None:
        """Bring all chunks into the spool."""
        if (self._spool.key or self._spool.load()) != job.key:
            self._spool.begin(job.key)
        self.stats.resumed_bytes += self._spool.nbytes
        kind = "all" if job.base is None else f"the changes since {job.base.version}"
        patience = Patience(self._address, f"weights {job.version}, {kind}", self._patience_s)
        patience.resumed_bytes = self._spool.nbytes
        patience.total = f" (as a whole it has {job.content.nbytes}, {len(job.chunks)} chunks)"
        base = None if job.base is None else job.base.version
        download = Download(
            self._key, patience, self._spool, job.chunks, (job.version, base), self._streams
        )
        try:
            download.run()
        except Cancelled as err:  # cannot be the only one
            raise AssertionError("a stream was cancelled by nobody") from err
        finally:
            self.stats.received_bytes += patience.num_raw_bytes
            self.stats.kept_bytes += patience.num_bytes
            self.stats.breaks += download.num_breaks

    def _publish(self, job: _Job) -> bool:
        """Decode into the local store and serve it; False: it was damaged, fetch it anew."""
        incarnation = job.version.incarnation
        publisher = self._publishers.get(incarnation)
        if publisher is None:
            # For this cluster we are the train step: versions keep the trainer's numbers.
            me = dataclasses.replace(self._identity, role="train", incarnation=incarnation)
            publisher = self._publishers[incarnation] = WeightPublisher(me)
        try:
            publisher.publish(
                job.version.version,
                self._pieces(job),
                job.content.specs,
                num_shards=1,
                shard_rank=0,
            )
        except _DecodeError as err:
            self._spool.discard()
            if self._is_full_wanted or job.base is None:
                raise WeightSyncError(f"weights {job.version} came whole and wrong: {err}") from err
            _log.error("delta is wrong, fetching all %s", kv(version=job.version, reason=err))
            self._is_full_wanted = True
            return False
        except WeightSyncError:
            self._spool.discard()
            self._refuse_until(job.version)
            raise
        self._spool.discard()
        self._is_full_wanted = False
        self._look_at_local_service()
        return True

    def _pieces(self, job: _Job) -> Iterator[tuple[Box, str, np.ndarray]]:
        base = None if job.base is None else job.base.tensors
        try:
            for spec, data in decode_tensors(job.content, job.chunks, self._spool.read, base):
                yield spec.whole(), spec.dtype, data
        except WeightSyncError as err:
            raise _DecodeError(str(err)) from err

    def _log_success(self, job: _Job, started: float, before: MirrorStats) -> None:
        self.stats.versions += 1
        self.stats.full_versions += job.base is None
        seconds = time.monotonic() - started
        received = self.stats.received_bytes - before.received_bytes
        resumed = self.stats.resumed_bytes - before.resumed_bytes
        nbytes = max(job.content.nbytes, 1)
        share = received / nbytes
        _log.info(
            "version mirrored %s",
            kv(
                version=job.version,
                base=None if job.base is None else job.base.version,
                seconds=seconds,
                gb=job.content.nbytes / 1e9,
                received_share=share,
                resumed_share=resumed / nbytes,
                breaks=self.stats.breaks - before.breaks,
            ),
        )
        self._metrics.log(
            job.version.version,
            {"dcs/mirror_s": seconds, "dcs/mirror_gb": received / 1e9, "dcs/mirror_share": share},
        )


class _DecodeError(WeightSyncError):
    """Chunks do not give the tensors that the source has."""


def _check_sizes(version: VersionId, content: Content, chunk_bytes: int) -> None:
    """Refuse what no source offers, before memory is allocated for it."""
    what = f"{version}: the source offers"
    if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES or chunk_bytes % 8:
        raise WeightSyncError(f"{what} chunks of {chunk_bytes} bytes")
    if len(content.checksums) != len(content.specs):
        raise WeightSyncError(
            f"{what} {len(content.checksums)} checksums of {len(content.specs)} tensors"
        )
    if len({spec.name for spec in content.specs}) != len(content.specs):
        raise WeightSyncError(f"{what} two tensors of one name")
    for spec in content.specs:
        itemsize(spec.dtype, spec.name)
        if any(n < 0 for n in spec.shape):
            raise WeightSyncError(f"{what} {spec.name} of shape {list(spec.shape)}")
    stat = os.statvfs(_SHM)
    free = stat.f_bavail * stat.f_frsize
    if content.nbytes > free:
        raise WeightSyncError(
            f"{what} {content.nbytes / 1e9:.2f} GB of weights, {free / 1e9:.2f} GB are free in "
            f"{_SHM}: run the mirror on a node with more memory"
        )
