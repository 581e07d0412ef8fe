"""Real job steps of one run as child processes on this host, as the supervisor would start them."""

import importlib.machinery
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from relax_hpc.config import config_from_tree, config_to_json
from relax_hpc.control.identity import LocalPlace, task_environment
from relax_hpc.control.rpc import create_keys
from relax_hpc.metrics.metric import read_metrics, series
from relax_hpc.runfolder import RunFolder, create_run_folder, write_atomic

ROOT = Path(__file__).parents[2]
NODE = "n1"


def make_addition_model(folder: Path) -> Path:
    """The tiny model's architecture and tokenizer with random weights, and some additions."""
    loader = importlib.machinery.SourceFileLoader("tool", str(ROOT / "tools" / "make_tiny_model"))
    spec = importlib.util.spec_from_loader("tool", loader)
    assert spec is not None
    tool = importlib.util.module_from_spec(spec)
    loader.exec_module(tool)
    torch.manual_seed(0)
    tokenizer = tool.build_tokenizer()
    tool.build_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = [
        {"prompt": [{"role": "user", "content": f"{i}+{i + 7}="}], "label": str(2 * i + 7)}
        for i in range(10, 50)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


class StepRun:
    """A run folder and the tasks started in it; `end` ends them and removes shared memory."""

    def __init__(self, parent: Path, tree: dict[str, Any]) -> None:
        self.folder: RunFolder = create_run_folder(parent, "run")
        create_keys(self.folder)
        write_atomic(self.folder.config, config_to_json(config_from_tree(tree, "test")))
        self.tasks: list[subprocess.Popen[bytes]] = []

    def start(
        self, role: str, *, world: int = 1, incarnation: int = 1, module: str = ""
    ) -> list[subprocess.Popen[bytes]]:
        """Start all tasks of a role; `module`: instead of the role's own."""
        step = "forward" if role in ("ref", "logprob") else role
        module = module or f"relax_hpc.steps.{step}"
        started = []
        for rank in range(world):
            place = LocalPlace(rank=rank, world=world, local_rank=rank, node=NODE)
            environment = task_environment(
                run=self.folder,
                role=role,
                attempt=1,
                incarnation=incarnation,
                address_prefix="127.",
                local=place,
            )
            with (self.folder.path / f"{role}.{incarnation}.{rank}.log").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", module],
                    env=os.environ | environment | {"OMP_NUM_THREADS": "1"},
                    cwd=ROOT,
                    stdout=log,
                    stderr=log,
                )
            started.append(process)
        self.tasks += started
        return started

    def log(self, role: str, incarnation: int = 1, rank: int = 0) -> str:
        return (self.folder.path / f"{role}.{incarnation}.{rank}.log").read_text(errors="replace")

    def logs(self) -> str:
        paths = sorted(self.folder.path.glob("*.log"))
        return "\n".join(f"== {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in paths)

    def metric(self, name: str) -> dict[int, float]:
        return dict(series(read_metrics(self.folder), name))

    def wait_until(self, is_true: Callable[[], bool], what: str, deadline_s: float = 150) -> None:
        end = time.monotonic() + deadline_s
        while not is_true():
            assert time.monotonic() < end, f"{what}: not in {deadline_s:g} s\n{self.logs()}"
            time.sleep(0.1)

    def wait_exit(self, tasks: list[subprocess.Popen[bytes]], deadline_s: float = 150) -> list[int]:
        self.wait_until(lambda: all(t.poll() is not None for t in tasks), "end", deadline_s)
        return [task.returncode for task in tasks]

    def end(self) -> None:
        for process in reversed(self.tasks):  # the dcs step last
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        shutil.rmtree(self.folder.shm(NODE), ignore_errors=True)
