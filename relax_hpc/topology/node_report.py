"""What a node tells the preflight and is told by it. Messages only: nothing here runs."""

import msgspec

from relax_hpc.topology.node_facts import NodeFacts

SERVICE = "preflight"


TOKEN_BYTES = 16
"""Of what the leader of a pair shows."""


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What every task does, given to it as JSON in `RELAX_PREFLIGHT`."""

    folder: str
    """Shared folder of this preflight: keys, address, canary."""
    canary: str = ""
    """Content of FOLDER/canary."""
    model: str = ""
    """Model folder to read; empty = none."""
    address_prefix: str = ""
    ends_at_s: float
    """Seconds that a task may live; it ends itself then."""
    may_use_mpi: bool = False
    gpus: int = 0
    """GPUs that each node must have; 0: no GPU tests."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """First words of a task."""

    rank: int
    facts: NodeFacts
    address: str
    port: int
    """Where it listens for its partners."""
    has_mpi: bool = False
    """mpi4py and its MPI library can be loaded."""


class ClockAsk(msgspec.Struct, frozen=True):
    """A question for the time of who asks."""


class ClockTold(msgspec.Struct, frozen=True):
    """Seconds since 1970 of the preflight's machine."""

    now_s: float


class PairAsk(msgspec.Struct, frozen=True, kw_only=True):
    """Who is my partner in this round?"""

    rank: int
    round_number: int


class PairTold(msgspec.Struct, frozen=True, kw_only=True):
    """A partner; rank -1: none in this round."""

    rank: int = -1
    address: str = ""
    port: int = 0
    is_leader: bool = False
    """Connects and measures; the other one answers."""
    token: bytes = b""
    """That the leader shows, so that nobody else is measured."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a pair, told by both."""

    rank: int
    peer: int
    round_number: int
    latency_us: float = 0.0
    """Half of the shortest round trip."""
    gbytes_per_s: float = 0.0
    """The better of several transfers."""
    fault: str = ""


class FurtherAsk(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the tests that need all nodes are made?"""

    rank: int


class FurtherTold(msgspec.Struct, frozen=True, kw_only=True):
    """Tests that are made now. MPI's start is collective: all nodes do it, or none."""

    use_mpi: bool = False
    nccl: PairTold = PairTold()
    """Partner for NCCL, over a port that `rank` (the lower one) offers; rank -1: none."""


class MpiMeasured(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank saw with MPI."""

    rank: int
    latency_us: float = 0.0
    gbytes_per_s: float = 0.0
    """Best of its pairs, 4 MiB messages, both ways at once counted once."""
    allreduce_ms: float = 0.0
    """Of 1 MiB of float64 over all ranks, the shortest of several."""
    hosts: tuple[str, ...] = ()
    """Rank 0: node of every MPI rank, from one gather."""
    fault: str = ""


class GpuMeasured(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of the GPUs of a node."""

    rank: int
    gemm_tflops: tuple[float, ...] = ()
    """Of each GPU, bfloat16, all of them at work at once."""
    nccl_gbytes_per_s: float = 0.0
    """Bus bandwidth of an all-reduce over the GPUs of the node; 0: one GPU."""
    pair_gbytes_per_s: float = 0.0
    """The same with a partner node."""
    fault: str = ""
