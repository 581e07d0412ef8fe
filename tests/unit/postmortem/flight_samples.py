"""Write dumps as PyTorch's recorder does, of jobs whose failure is known."""

import json
import pickle
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
            "pg_status": {},
            "entries": self.entries[rank],
        }
        if as_json:
            for entry in value["entries"]:
                entry.pop("frames", None)
            return json.dumps(value).encode()
        return pickle.dumps(value, 2)

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
            path = folder / name.format(rank=rank)
            path.write_bytes(b"" if rank in empty else self.dump(rank))
            files.append(str(path))
        return files
