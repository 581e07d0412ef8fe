"""The way between nodes as MPI sees it: ping-pong with the partners, all-reduce over all ranks.

Under `srun --mpi=pmi2` one MPI_COMM_WORLD spans all components of a het step. The start is
collective: who calls `measure` must know that all ranks do. MPI has no deadlines, so the task's own
(SIGALRM) and the caller's hold.
"""

import contextlib
import time
from typing import Any

import numpy as np

from relax_hpc.topology.node_report import MpiMeasured
from relax_hpc.topology.pairing import ROUNDS, partner

_NUM_PINGS = 50
_MESSAGE_BYTES = 4 << 20
_NUM_TRANSFERS = 4
_REDUCE_NUMBERS = (1 << 20) // 8
_NUM_REDUCES = 5


def has_mpi() -> bool:
    """Tell whether mpi4py finds an MPI library; does not start MPI."""
    with contextlib.suppress(ImportError, RuntimeError):  # no mpi4py; no libmpi
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        return not MPI.Is_finalized()
    return False


def measure(rank: int, node: str) -> MpiMeasured:
    """Start MPI, measure, end MPI. All ranks call it together."""
    from mpi4py import MPI

    MPI.Init()
    try:
        return _measure(MPI.COMM_WORLD, rank, node)
    finally:
        MPI.Finalize()


def _measure(world: Any, rank: int, node: str) -> MpiMeasured:
    hosts = world.gather(node)  # rank -> node in one collective
    if world.rank != rank:
        fault = f"MPI rank {world.rank} is Slurm's task {rank}: see MpiDefault, srun --mpi=list"
        return MpiMeasured(rank=rank, fault=fault)
    latencies, speeds = [], []
    for round_number in range(ROUNDS):
        peer = partner(world.rank, world.size, round_number)
        if peer is not None:
            latencies.append(_ping_us(world, peer))
            speeds.append(_gbytes_per_s(world, peer))
        world.Barrier()
    return MpiMeasured(
        rank=rank,
        latency_us=min(latencies, default=0.0),
        gbytes_per_s=max(speeds, default=0.0),
        allreduce_ms=_allreduce_ms(world),
        hosts=tuple(hosts) if hosts is not None else (),
    )


def _ping_us(world: Any, peer: int) -> float:
    word = np.zeros(1)
    shortest = float("inf")
    for _ in range(_NUM_PINGS):
        before = time.perf_counter()
        if world.rank < peer:
            world.Send(word, peer)
            world.Recv(word, peer)
        else:
            world.Recv(word, peer)
            world.Send(word, peer)
        shortest = min(shortest, time.perf_counter() - before)
    return shortest * 1e6 / 2


def _gbytes_per_s(world: Any, peer: int) -> float:
    out, back = np.zeros(_MESSAGE_BYTES, np.uint8), np.zeros(_MESSAGE_BYTES, np.uint8)
    fastest = 0.0
    for _ in range(_NUM_TRANSFERS):
        before = time.perf_counter()
        world.Sendrecv(out, peer, recvbuf=back, source=peer)
        fastest = max(fastest, _MESSAGE_BYTES / (time.perf_counter() - before) / 1e9)
    return fastest


def _allreduce_ms(world: Any) -> float:
    ours, total = np.full(_REDUCE_NUMBERS, 1.0), np.zeros(_REDUCE_NUMBERS)
    shortest = float("inf")
    for _ in range(_NUM_REDUCES):
        world.Barrier()
        before = time.perf_counter()
        world.Allreduce(ours, total)
        shortest = min(shortest, time.perf_counter() - before)
    if not (total == world.size).all():
        raise ArithmeticError(f"all-reduce of ones over {world.size} ranks gave {total[:4]}")
    return shortest * 1e3
