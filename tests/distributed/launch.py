"""run_distributed: call a function in N real processes joined by gloo and collect the results.

Processes start as `python -m tests.distributed.launch`, so that nothing is inherited (no fork of a
process with threads) and the function is found by its module and name. Each gets a fresh
torch.distributed; results come back as JSON files. A rank that fails ends the others.
"""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Started processes; `wait` for their results or kill one of them."""

    processes: list[subprocess.Popen[bytes]]
    folder: Path

    def wait(self, deadline_s: float = DEADLINE_S) -> list[typing.Any]:
        """Return each rank's result; raises AssertionError with the logs when one fails."""
        end = time.monotonic() + deadline_s
        try:
            while any(p.poll() is None for p in self.processes):
                failed = [r for r, p in enumerate(self.processes) if p.poll() not in (None, 0)]
                assert not failed, f"rank {failed[0]} failed:\n{self.log(failed[0])}"
                assert time.monotonic() < end, f"no end in {deadline_s:g} s:\n{self.log(0)}"
                time.sleep(0.1)
        finally:
            self.kill()
        for rank, process in enumerate(self.processes):
            assert process.returncode == 0, f"rank {rank}:\n{self.log(rank)}"
        names = [self.folder / f"result-{rank}.json" for rank in range(len(self.processes))]
        return [json.loads(name.read_text()) for name in names]

    def log(self, rank: int) -> str:
        """Last part of a rank's output."""
        return (self.folder / f"log-{rank}").read_text(errors="replace")[-6000:]

    def kill(self) -> None:
        """Kill the processes that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()


def start_distributed(
    function: Callable[..., typing.Any], world_size: int, *args: typing.Any, on_gpus: bool = False
) -> Ranks:
    """Start `function(*args)` in `world_size` processes; args are JSON values.

    With `on_gpus` rank r sees GPU r only and the backend is NCCL, else no rank sees a GPU.
    """
    folder = Path(tempfile.mkdtemp(prefix="relax-test-"))
    (folder / "args.json").write_text(json.dumps(args))
    processes = []
    for rank in range(world_size):
        environ = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "CUDA_VISIBLE_DEVICES": str(rank) if on_gpus else "",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
        command = [sys.executable, "-m", "tests.distributed.launch"]
        command += [function.__module__, function.__name__, str(folder)]
        with (folder / f"log-{rank}").open("wb") as log:
            processes.append(
                subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)
            )
    return Ranks(processes, folder)


def run_distributed(
    function: Callable[..., typing.Any], world_size: int, *args: typing.Any, on_gpus: bool = False
) -> list[typing.Any]:
    """Run `function(*args)` in `world_size` processes; returns each rank's result."""
    return start_distributed(function, world_size, *args, on_gpus=on_gpus).wait()


def main() -> None:
    """One rank: join the group, call the function, write the result."""
    module, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    import torch
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(folder / "store"), world)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    result = getattr(importlib.import_module(module), name)(
        *json.loads((folder / "args.json").read_text())
    )
    (folder / f"result-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
