"""One task of `relax-hpc preflight`, one per node: says what its node has, tests ways and GPUs.

consumes RELAX_PREFLIGHT (orders) and the shared folder that they name; tells everything to the
preflight's RPC service, so that a node that dies or hangs is the one that is not heard of again.

  report -> pair (a constant number of rounds) -> further -> MPI, GPUs -> the end

The task ends itself by SIGALRM when its time is over: MPI and drivers may hang where no Python
runs.
"""

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import Empty, RpcClient
from relax_hpc.errors import RelaxError
from relax_hpc.runfolder import RunFolder
from relax_hpc.steps import preflight_mpi
from relax_hpc.steps.preflight_pair import PairListener, measure_pair
from relax_hpc.topology import node_facts
from relax_hpc.topology.node_report import (
    SERVICE,
    ClockAsk,
    ClockTold,
    FurtherAsk,
    FurtherTold,
    GpuMeasured,
    MpiMeasured,
    Orders,
    PairAsk,
    PairTold,
    Report,
)
from relax_hpc.topology.pairing import ROUNDS

_CLOCK_SAMPLES = 3


def main() -> int:
    """Entry point of `python -m relax_hpc.steps.preflight`."""
    orders = msgspec.json.decode(os.environ["RELAX_PREFLIGHT"], type=Orders)
    signal.setitimer(signal.ITIMER_REAL, orders.ends_at_s)
    rank = int(os.environ["SLURM_PROCID"])
    identity = Identity(
        run=RunFolder(Path(orders.folder)),
        role=SERVICE,
        index=rank,
        rank=rank,
        node=os.environ["SLURMD_NODENAME"],
        address_prefix=orders.address_prefix,
    )
    try:
        run(orders, identity)
    except (RelaxError, OSError) as err:
        # The caller reads this line: the node could not tell it over the network.
        sys.stderr.write(f"preflight {identity.node}: {' '.join(str(err).split())}\n")
        return 1
    return 0


def run(orders: Orders, identity: Identity) -> None:
    """Play the part of one node.

    Raises:
        RelaxError, OSError: the shared folder or the service cannot be reached from this node.
    """
    client = RpcClient(identity.run, SERVICE, identity)
    listener = PairListener(identity.bind_address())

    def tell(method: str, message: msgspec.Struct) -> None:
        limit = orders.ends_at_s
        client.call(method, message, Empty, timeout_s=limit, why=f"preflight's {method}")

    def ask(method: str, message: msgspec.Struct, answer: type) -> object:
        limit = orders.ends_at_s
        return client.call(method, message, answer, timeout_s=limit, why=f"preflight's {method}")

    tell("report", _report(orders, identity, client, listener))
    for round_number in range(ROUNDS + 1):
        asked = PairAsk(rank=identity.rank, round_number=round_number)
        pair = ask("pair", asked, PairTold)
        assert isinstance(pair, PairTold)
        if pair.rank >= 0:
            measured = measure_pair(identity.rank, round_number, pair, listener)
            if measured is not None:
                tell("measured", measured)
    further = ask("further", FurtherAsk(rank=identity.rank), FurtherTold)
    assert isinstance(further, FurtherTold)
    if orders.gpus:
        tell("gpu", _measure_gpus(identity, further.nccl, listener))
    if further.use_mpi:
        tell("mpi", _measure_mpi(identity))
    listener.close()
    client.close()


def _report(
    orders: Orders, identity: Identity, client: RpcClient, listener: PairListener
) -> Report:
    facts = node_facts.gather(identity.node, with_gpus=orders.gpus > 0)
    facts = msgspec.structs.replace(
        facts,
        clock_offset_s=_clock_offset(client),
        folder_fault=node_facts.folder_fault(identity.run.path, "canary", orders.canary),
        model_fault=node_facts.readable_fault(Path(orders.model)) if orders.model else "",
    )
    return Report(
        rank=identity.rank,
        facts=facts,
        address=identity.bind_address(),
        port=listener.port,
        has_mpi=orders.may_use_mpi and preflight_mpi.has_mpi(),
    )


def _clock_offset(client: RpcClient) -> float:
    """Return this clock minus the preflight's, by the exchange that took the least time (NTP)."""
    found = []
    for _ in range(_CLOCK_SAMPLES):
        sent = time.time()
        told = client.call("clock", ClockAsk(), ClockTold, timeout_s=20, why="the clock")
        back = time.time()
        found.append((back - sent, (sent + back) / 2 - told.now_s))
    return min(found)[1]


def _measure_mpi(identity: Identity) -> MpiMeasured:
    try:
        return preflight_mpi.measure(identity.rank, identity.node)
    except Exception as err:  # noqa: BLE001 - MPI.Exception and what the library's loader raises
        return MpiMeasured(rank=identity.rank, fault=f"{type(err).__name__}: {err}")


def _measure_gpus(identity: Identity, pair: PairTold, listener: PairListener) -> GpuMeasured:
    try:
        from relax_hpc.steps import preflight_gpu

        gemm = tuple(preflight_gpu.gemm_tflops())
        inside = preflight_gpu.node_gbytes_per_s()
        between = 0.0
        if pair.rank >= 0:
            address = identity.bind_address()
            between = preflight_gpu.pair_gbytes_per_s(pair, listener, address)
    except Exception as err:  # noqa: BLE001 - whatever CUDA, NCCL or torch raise is the finding
        return GpuMeasured(rank=identity.rank, fault=f"{type(err).__name__}: {err}")
    return GpuMeasured(
        rank=identity.rank,
        gemm_tflops=gemm,
        nccl_gbytes_per_s=inside,
        pair_gbytes_per_s=between,
    )


if __name__ == "__main__":
    sys.exit(main())
