"""Trainer shards to engine shards over gloo: bits, bytes, and ranks that die or stop in the middle.

Real processes. The tensors of a version are made from its number on every rank, so that each
receiver knows what it must get.
"""

import collections
import json
import os
import signal
import subprocess
import sys
import time
import typing
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, run_distributed
from tests.distributed.reshard_process import exchange
from tests.unit.dcs.weight_shapes import CONFIGS

pytestmark = pytest.mark.distributed

DEADLINE_S = 120.0
"""Against hanging only."""

TRAINER = {"tp": 2, "pp": 2, "dp": 2}
DENSE = CONFIGS["qwen3"]
MOE = CONFIGS["qwen3_moe"]
CASES: list[tuple[dict[str, typing.Any], dict[str, int], dict[str, int]]] = [
    (DENSE, TRAINER, {"tp": 1}),  # tied embeddings: the last stage has a copy to send, too
    (DENSE, TRAINER, {"tp": 2, "num_engines": 2}),
    (DENSE, TRAINER, {"tp": 4}),
    (DENSE | {"tie_word_embeddings": False}, TRAINER, {"tp": 2, "pp": 2}),
    (MOE, TRAINER | {"ep": 4, "etp": 1}, {"tp": 1}),
    (MOE, TRAINER | {"ep": 2}, {"tp": 2, "ep": 2}),
    (MOE, TRAINER | {"ep": 4, "etp": 1}, {"tp": 4, "attention_dp": 2}),
]


def exchange_all(folder: str) -> list[dict[str, int]]:
    return [exchange(folder, number, *case) for number, case in enumerate(CASES)]


def test_every_engine_gets_its_slices_and_no_byte_more(tmp_path: Path) -> None:
    """Also W6: every parameter is overwritten right after the snapshot that is on its way."""
    world = 8 + 4
    of_ranks = run_distributed(exchange_all, world, str(tmp_path))
    for number, case in enumerate(CASES):
        totals: collections.Counter[str] = collections.Counter()
        for of_rank in of_ranks:
            found = of_rank[number]
            assert found.get("sent") == found.get("planned")
            totals.update({key: found.get(key, 0) for key in ("sent", "received")})
        minimum = of_ranks[8][number]["minimum"]
        assert totals["sent"] == totals["received"] == minimum > 0, case


# ---------------------------------------------------------------------------------------------
# Faults
# ---------------------------------------------------------------------------------------------


class World:
    """Two trainer ranks (0, 1) and two engines of one rank (2, 3); one of them is the victim."""

    def __init__(self, folder: Path, victim: int, fault: str) -> None:
        self.folder, self.victim, self.fault = folder, victim, fault
        tree = {"config": DENSE, "ours": {"tp": 2}, "theirs": {"tp": 1, "num_engines": 2}}
        (folder / "case.json").write_text(json.dumps(tree))
        self.processes: dict[tuple[int, int], subprocess.Popen[bytes]] = {}

    def start(self, rank: int, generation: int) -> None:
        command = [sys.executable, "-m", "tests.distributed.reshard_process", str(self.folder)]
        command += [str(rank), str(generation), str(self.victim), self.fault]
        environ = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with (self.folder / f"log-{rank}-{generation}").open("wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)
        self.processes[rank, generation] = process

    def said(self, rank: int, generation: int = 1) -> list[list[typing.Any]]:
        path = self.folder / f"said-{rank}-{generation}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, is_done: typing.Callable[[], bool], what: str) -> None:
        until = time.monotonic() + DEADLINE_S
        while not is_done():
            assert time.monotonic() < until, f"{what}\n{self.logs()}"
            time.sleep(0.05)

    def wait(self, *keys: tuple[int, int]) -> None:
        for key in keys:
            self.wait_for(lambda key=key: self.processes[key].poll() is not None, f"{key} hangs")
            assert self.processes[key].returncode == 0, self.logs()

    def go_on(self, key: tuple[int, int]) -> None:
        """Continue a stopped rank, whose place another one has taken: it must notice."""
        (self.folder / "continued").touch()
        self.processes[key].send_signal(signal.SIGCONT)
        self.wait_for(lambda: self.processes[key].poll() is not None, f"{key} hangs")
        said = self.said(*key)
        errors = [text for what, text in said if what == "error"]
        assert len(errors) == 1 and "version 2" in errors[0], said
        assert all(value in (1, errors[0]) for _, value in said), said

    def logs(self) -> str:
        paths = sorted(self.folder.glob("log-*")) + sorted(self.folder.glob("said-*"))
        return "".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in paths)

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("victim", [1, 3], ids=["sender", "receiver"])
def test_nobody_hangs_and_no_half_version_is_seen(tmp_path: Path, victim: int, fault: str) -> None:
    """kill -9 and SIGSTOP in the middle of version 2; version 3 is whole, with a replacement."""
    world = World(tmp_path, victim, fault)
    try:
        for rank in range(4):
            world.start(rank, 1)
        broken = [rank for rank in range(4) if rank != victim]

        # Whoever sees no fault may be done with 2 before; nobody may wait for the victim for ever.
        def is_over() -> bool:
            return all(any(v == 2 or w == "error" for w, v in world.said(r)) for r in broken)

        world.wait_for(is_over, "version 2 does not end")
        world.start(victim, 2)
        world.wait(*[(rank, 1) for rank in broken], (victim, 2))
        if fault == "stop":
            world.go_on((victim, 1))
    finally:
        world.stop()
    check(world, victim)


def check(world: World, victim: int) -> None:
    trainers, engines = (0, 1), (2, 3)
    for rank in set(trainers) - {victim}:
        (_, second, third) = world.said(rank)
        assert third == ["sent", 3]
        if victim in engines:  # it names who is missing, and how far it was
            assert second[0] == "error" and "version 2" in second[1], second
            assert f"trainer rank {rank} to engine rank 1 after" in second[1]
            assert "bytes done" in second[1]
    for rank in set(engines) - {victim}:
        said = world.said(rank)
        assert said[:2] == [["received", 1], ["holds", 1]]
        if victim in trainers:
            assert said[2][0] == "error" and said[3] == ["holds", 1]
            assert f"engine rank {rank - 2} from trainer rank 1 after" in said[2][1]
        else:  # the other engine has its version in time
            assert said[2:4] == [["received", 2], ["holds", 2]]
        assert said[-2:] == [["received", 3], ["holds", 3]]
    last = ["sent", 3] if victim in trainers else ["holds", 3]
    assert world.said(victim, 2)[-1] == last
