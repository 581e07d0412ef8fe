"""Write dumps as PyTorch's recorder does, of jobs whose failure is known."""

import dataclasses
import functools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

Op = tuple[str, str, list[int]]
"""Group name, operation, size of the input."""

START_NS = 1_795_986_428_000_000_000


class Job:
    """Ranks that launch operations in process groups; `write` leaves one dump per rank."""

    def __init__(self, world: int, groups: dict[str, tuple[str, list[int]]] | None = None) -> None:
        self.groups = groups or {"0": ("default_pg", list(range(world)))}
        self.entries: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(world)}
        self.seqs: dict[tuple[int, str], int] = {}
        self.clock_ns = START_NS
        self.version = {rank: "2.10" for rank in range(world)}
        self.first_record = dict.fromkeys(range(world), 0)
        self.enqueued: dict[int, int] = {}
        """Status of group 0 where the dump tells it."""

    def launch(
        self,
        ranks: list[int] | range,
        op: str = "all_reduce",
        group: str = "0",
        *,
        state: str = "completed",
        size: int = 16,
        dtype: str = "Float",
        delay_s: float = 0.0,
    ) -> "Job":
        """One operation on some ranks of a group."""
        self.clock_ns += 1_000_000
        for rank in ranks:
            self.seqs[rank, group] = seq = self.seqs.get((rank, group), 0) + 1
            done = state == "completed"
            self.entries[rank].append(
                {
                    "record_id": len(self.entries[rank]) + self.first_record[rank],
                    "pg_id": int(group),
                    "process_group": (group, self.groups[group][0]),
                    "collective_seq_id": seq,
                    "p2p_seq_id": 0,
                    "op_id": seq,
                    "profiling_name": f"nccl:{op}",
                    "time_created_ns": self.clock_ns + rank * 1000 + int(delay_s * 1e9),
                    "input_sizes": [] if op == "barrier" else [[size]],
                    "input_dtypes": [] if op == "barrier" else [dtype],
                    "output_sizes": [[size]],
                    "output_dtypes": [dtype],
                    "state": state,
                    "time_discovered_started_ns": None,
                    "time_discovered_completed_ns": self.clock_ns + 5_000_000 if done else None,
                    "retired": done,
                    "timeout_ms": 600_000,
                    "is_p2p": False,
                    "frames": [
                        {
                            "name": op,
                            "filename": "/x/torch/distributed/distributed_c10d.py",
                            "line": 1,
                        },
                        {"name": "step", "filename": "/home/me/train.py", "line": 10 + seq},
                    ],
                }
            )
        return self

    def dump(self, rank: int, *, as_json: bool = False) -> bytes:
        """The bytes of one rank's dump."""
        config = {
            name: {"name": name, "desc": desc, "ranks": str(ranks)}
            for name, (desc, ranks) in self.groups.items()
            if rank in ranks
        }
        value: dict[str, Any] = {
            "version": self.version[rank],
            "comm_lib_version": "2.27.5",
            "pg_config": config,
            "pg_status": self._status(rank),
            "entries": self.entries[rank],
        }
        if as_json:
            for entry in value["entries"]:
                entry.pop("frames", None)
            return json.dumps(value).encode()
        return pickle.dumps(value, 2)

    def _status(self, rank: int) -> dict[str, dict[str, int]]:
        if rank not in self.enqueued:
            return {}
        return {"0": {"last_enqueued_collective": self.enqueued[rank]}}

    def write(
        self,
        folder: Path,
        *,
        without: tuple[int, ...] = (),
        empty: tuple[int, ...] = (),
        name: str = "nccl_trace_rank_{rank}",
    ) -> list[str]:
        """Write the files; returns their paths."""
        files = []
        for rank in self.entries:
            if rank in without:
                continue
            path = folder / name.format(rank=rank, node=1 + rank // 2)
            path.write_bytes(b"" if rank in empty else self.dump(rank))
            files.append(str(path))
        return files


# --------------------------------------------------------------------------------------------
# Twelve small failures
# --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A failure that was put in, and the right answer."""

    name: str
    write: Callable[[Path], list[str]]
    class_: str
    ranks: list[int]
    """[] = the dumps cannot tell, naming anybody is wrong."""


def steps(world: int, count: int = 4) -> Job:
    """A job whose ranks did some all-reduces together."""
    job = Job(world)
    for _ in range(count):
        job.launch(range(world))
    return job


def others(rank: int, world: int = 4) -> list[int]:
    """All ranks but one."""
    return [r for r in range(world) if r != rank]


def misses(rank: int, count: int = 4) -> Job:
    """One rank does not come to the last all-reduce."""
    return steps(4, count).launch(others(rank), state="started")


def other_operation(rank: int) -> Job:
    """One rank runs a broadcast instead."""
    job = steps(4).launch([rank], "broadcast", state="started")
    return job.launch(others(rank), "all_reduce", state="started")


def ring_offset() -> Job:
    """Rank 3's buffer starts later and counts from 50; rank 2 misses the last operation."""
    job = Job(4)
    job.first_record[3] = 50
    for _ in range(4):
        job.launch(range(4))
    job.launch(others(2), state="started")
    job.entries[3] = job.entries[3][2:]
    return job


def mixed_versions() -> Job:
    """Dumps of three versions."""
    job = misses(1)
    job.version |= {0: "2.4", 2: "2.7"}
    return job


def cascade() -> Job:
    """Rank 6 hangs in one of two tensor groups; four data groups wait for that one."""
    groups = {
        "1": ("TENSOR_MODEL_PARALLEL_GROUP", [0, 1, 2, 3]),
        "2": ("TENSOR_MODEL_PARALLEL_GROUP", [4, 5, 6, 7]),
        **{str(3 + r): ("DATA_PARALLEL_GROUP", [r, r + 4]) for r in range(4)},
    }
    job = Job(8, groups)
    for _ in range(3):
        for group, (_, ranks) in groups.items():
            job.launch(ranks, group=group)
    job.launch(range(4), group="1")
    job.launch([4, 5, 7], group="2", state="started")
    for rank in range(4):
        job.launch([rank], "reduce_scatter", group=str(3 + rank), state="scheduled")
    return job


HOST_NAME = "nccl_trace_rank_container-node0{node}_{rank}"
ALL_JOINED = "all-launched-none-completed"
TWELVE = (
    Scenario("rank 2 misses an operation", misses(2).write, "missing-rank", [2]),
    Scenario("rank 0 runs another operation", other_operation(0).write, "op-mismatch", [0]),
    Scenario(
        "extra operation on rank 0", steps(4).launch([0], state="started").write, "extra-op", [0]
    ),
    Scenario("ring buffer of another offset", ring_offset().write, "missing-rank", [2]),
    Scenario(
        "dump of the dead rank is absent",
        functools.partial(misses(2).write, without=(2,)),
        "missing-rank",
        [2],
    ),
    Scenario(
        "all joined, rank 1 is ready already",
        steps(4).launch(others(1), state="started").launch([1]).write,
        ALL_JOINED,
        [],
    ),
    Scenario(
        "host name in the file name",
        functools.partial(misses(3).write, name=HOST_NAME),
        "missing-rank",
        [3],
    ),
    Scenario(
        "other size on rank 3",
        steps(4).launch(others(3), state="started").launch([3], state="started", size=999).write,
        "size-mismatch",
        [3],
    ),
    Scenario(
        "all stuck in one operation",
        steps(4).launch(range(4), state="started").write,
        ALL_JOINED,
        [],
    ),
    Scenario("dumps of mixed versions", mixed_versions().write, "missing-rank", [1]),
    Scenario(
        "empty dump of the dead rank",
        functools.partial(misses(1).write, empty=(1,)),
        "missing-rank",
        [1],
    ),
    Scenario("cascade over five groups", cascade().write, "missing-rank", [6]),
)
