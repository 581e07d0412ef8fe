"""The service that the tasks of a preflight report to. It gives partners and collects numbers.

method                     waits for                       unblocked by
report                     nothing
pair, rounds 0 to 3        every task to report, or end    the last one, or `start_s`
pair, round 4 (retest)     the results of rounds 0 to 3    the last one, or `pairs_s`
further (MPI, NCCL)        nothing more
The waits end by the clock as well: who is missing then is left out and named.
"""

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import Collection

from relax_hpc.control.rpc import Caller, Empty, RpcServer
from relax_hpc.launcher.node_scores import Tolerance, suspects
from relax_hpc.topology.node_report import (
    TOKEN_BYTES,
    ClockAsk,
    ClockTold,
    FurtherAsk,
    FurtherTold,
    GpuMeasured,
    Measured,
    MpiMeasured,
    PairAsk,
    PairTold,
    Report,
)
from relax_hpc.topology.pairing import ROUNDS, partner, retest_pairs


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Deadlines in seconds. The first ones count from the first report."""

    start_s: float = 15.0
    """For the last task to report after the first: imports from a shared file system."""
    pairs_s: float = 30.0
    """For all rounds before the retest."""
    total_s: float = 55.0
    """For everything; then the step is ended."""


class NodeSurvey:
    """State of one preflight. Handlers run in the server's loop; `Survey` fields are read after."""

    def __init__(self, num_ranks: int, limits: Limits, allow: Tolerance, *, use_mpi: bool) -> None:
        self.reports: dict[int, Report] = {}
        self.measured: dict[tuple[int, int], Measured] = {}
        """By (round, lower rank of the pair)."""
        self.mpi: dict[int, MpiMeasured] = {}
        self.gpu: dict[int, GpuMeasured] = {}
        self.first_s: float | None = None
        """time.monotonic() of the first report."""
        self.mpi_asked = False
        self._num_ranks, self._limits, self._allow = num_ranks, limits, allow
        self._may_use_mpi = use_mpi
        self._place: dict[int, int] = {}
        """Rank -> place in the ring of those that are there."""
        self._ring: list[int] = []
        self._num_pairs = 0
        self._retest: dict[int, int] | None = None
        self._reached: set[int] = set()
        self._mpi_everywhere: bool | None = None
        self._nccl: dict[tuple[int, int], bool] = {}
        self._tokens: dict[tuple[int, int, int], bytes] = {}
        self._lost: frozenset[str] = frozenset()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._all_reported, self._all_measured = asyncio.Event(), asyncio.Event()

    def register(self, server: RpcServer) -> None:
        """Serve the tasks' methods."""
        server.register("clock", ClockAsk, self._clock)
        server.register("report", Report, self._report)
        server.register("pair", PairAsk, self._pair)
        server.register("measured", Measured, self._took)
        server.register("further", FurtherAsk, self._further)
        server.register("mpi", MpiMeasured, self._took_mpi)
        server.register("gpu", GpuMeasured, self._took_gpu)

    @property
    def names(self) -> dict[int, str]:
        """Rank -> node, of all that reported."""
        return {rank: self.reports[rank].facts.node for rank in sorted(self.reports)}

    async def _clock(self, caller: Caller, asked: ClockAsk) -> ClockTold:
        del caller, asked
        return ClockTold(now_s=time.time())

    async def _report(self, caller: Caller, report: Report) -> Empty:
        del caller
        if self.first_s is None:
            self.first_s = time.monotonic()
        self.reports[report.rank] = report
        self._loop = asyncio.get_running_loop()
        self._count_reports()
        return Empty()

    def lost(self, nodes: Collection[str]) -> None:
        """Know that the tasks of these nodes ended; called from another thread.

        Nobody waits for those that did not report.
        """
        self._lost = frozenset(nodes)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._count_reports)

    def _count_reports(self) -> None:
        if len(self.reports) + len(self._lost) < self._num_ranks:
            return
        lost = self._lost - {report.facts.node for report in self.reports.values()}
        if len(self.reports) + len(lost) >= self._num_ranks:
            self._all_reported.set()

    async def _until(self, event: asyncio.Event, limit_s: float) -> None:
        """Wait for an event, or until so long after the first report."""
        assert self.first_s is not None
        left = self.first_s + limit_s - time.monotonic()
        with contextlib.suppress(TimeoutError):  # those that are missing are left out
            await asyncio.wait_for(event.wait(), max(0.0, left))

    async def _close_ring(self) -> None:
        """Freeze who takes part: by the first task whose wait is over, so that all see one ring."""
        if not self._ring:
            await self._until(self._all_reported, self._limits.start_s)
        if not self._ring:
            self._ring = sorted(self.reports)
            self._place = {rank: place for place, rank in enumerate(self._ring)}
            size = len(self._ring)
            ways = (partner(p, size, r) is not None for r in range(ROUNDS) for p in range(size))
            self._num_pairs = sum(ways) // 2

    async def _pair(self, caller: Caller, asked: PairAsk) -> PairTold:
        del caller
        await self._close_ring()
        if asked.rank not in self._place:
            return PairTold()  # it came too late
        if asked.round_number < ROUNDS:
            peer = self._partner(asked.rank, asked.round_number)
        else:
            peer = (await self._retests()).get(asked.rank)
        return PairTold() if peer is None else self._told(asked.rank, peer, asked.round_number)

    def _partner(self, rank: int, round_number: int) -> int | None:
        other = partner(self._place[rank], len(self._ring), round_number)
        return None if other is None else self._ring[other]

    async def _retests(self) -> dict[int, int]:
        if self._retest is None and self._num_pairs:
            await self._until(self._all_measured, self._limits.pairs_s)
        if self._retest is None:
            bad, fine = suspects(list(self.measured.values()), self._allow)
            self._retest = retest_pairs(bad, fine)
        return self._retest

    def _told(self, rank: int, peer: int, round_number: int) -> PairTold:
        key = (round_number, min(rank, peer), max(rank, peer))
        token = self._tokens.setdefault(key, secrets.token_bytes(TOKEN_BYTES))
        report = self.reports[peer]
        return PairTold(
            rank=peer,
            address=report.address,
            port=report.port,
            is_leader=rank < peer,
            token=token,
        )

    async def _took(self, caller: Caller, told: Measured) -> Empty:
        """Keep a result; of two about one pair the fault counts."""
        del caller
        key = (told.round_number, min(told.rank, told.peer), max(told.rank, told.peer))
        old = self.measured.get(key[:2])
        if old is None or told.fault:
            self.measured[key[:2]] = told
            if not told.fault:
                self._reached |= {told.rank, told.peer}
        if len(self.measured) >= self._num_pairs:
            self._all_measured.set()
        return Empty()

    async def _further(self, caller: Caller, asked: FurtherAsk) -> FurtherTold:
        del caller
        is_whole = len(self._ring) == self._num_ranks
        use_mpi = self._may_use_mpi and is_whole and self._all_have_mpi()
        self.mpi_asked |= use_mpi
        nccl = PairTold()
        if asked.rank in self._place:
            peer = self._partner(asked.rank, 0)
            if peer is not None and self._do_nccl(asked.rank, peer):
                nccl = self._told(asked.rank, peer, ROUNDS + 1)
        return FurtherTold(use_mpi=use_mpi, nccl=nccl)

    def _do_nccl(self, rank: int, peer: int) -> bool:
        """Decide once for both ends: one that is alone would wait for the other in vain."""
        pair = min(rank, peer), max(rank, peer)
        return self._nccl.setdefault(pair, set(pair) <= self._reached)

    def _all_have_mpi(self) -> bool:
        if self._mpi_everywhere is None:
            self._mpi_everywhere = all(report.has_mpi for report in self.reports.values())
        return self._mpi_everywhere

    async def _took_mpi(self, caller: Caller, told: MpiMeasured) -> Empty:
        del caller
        self.mpi[told.rank] = told
        return Empty()

    async def _took_gpu(self, caller: Caller, told: GpuMeasured) -> Empty:
        del caller
        self.gpu[told.rank] = told
        return Empty()
