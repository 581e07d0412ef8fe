"""Node agent: reads, garbage, orphans, adoption, clean shutdown, dead runs."""

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import RpcClient, RpcServer
from relax_hpc.errors import StaleIncarnationError, TransferError
from relax_hpc.runfolder import RunFolder
from relax_hpc.transfer import tcp, wire
from relax_hpc.transfer.agent import NodeAgent, reap_dead_runs
from relax_hpc.transfer.shm import Entry, Owner, process_start, write_segment
from relax_hpc.transfer.transfer_queue import TransferQueue

from .conftest import RULES
from .queue_process import make_group

Who = Callable[..., Identity]
Serve = Callable[..., RpcServer]
DEAD = Owner("run", 1, 2**22 + 1, 12345)


def _wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline, "waited 60 s"
        time.sleep(0.02)


def test_trained_and_dropped_segments_are_removed(who: Who, serve: Serve) -> None:
    serve()
    agent = NodeAgent(who("dcs"))
    agent.start()
    rollout, train = TransferQueue(who()), TransferQueue(who("train"))
    rollout.open_dataset(100, "data")
    train.begin_train(0)
    for slot in rollout.admit(0, 4, 5.0).slots:
        rollout.put_group(slot, make_group(slot))
    segments = who().run.shm("n1") / "segments"
    rows = [row for i in (0, 1) for row in train.take_chunk(0, i, 0, 1, 20.0).rows]
    assert len(list(segments.iterdir())) == 4
    train.complete_step(0)
    _wait_until(lambda: not list(segments.iterdir()))
    assert rows[0].fields["tokens"][0] == 1000 * int(rows[0].uid.split(".")[1]), "views stay valid"
    agent.close(remove=True)
    assert not who().run.shm("n1").exists()


def test_rests_of_dead_writers_are_swept_and_those_of_live_ones_kept(
    who: Who, serve: Serve, folder: RunFolder
) -> None:
    serve()
    agent = NodeAgent(who("dcs"))
    agent.start()
    rollout = TransferQueue(who())
    rollout.open_dataset(100, "data")
    slot = rollout.admit(0, 1, 5.0).slots[0]
    rollout.put_group(slot, make_group(slot))
    segments = folder.shm("n1") / "segments"
    mine = next(segments.iterdir())
    write_segment(segments, "orphan", "n1", DEAD, [Entry("u", 0, "a", np.zeros(3))])
    (segments / f".tmp-{DEAD.pid}-{DEAD.start}-x").write_bytes(b"")
    (segments / f".tmp-{os.getpid()}-{rollout._owner.start}-x").write_bytes(b"")
    removed = agent.sweep(RpcClient(folder, wire.SERVICE, who("dcs")))
    left = {path.name for path in segments.iterdir()}
    assert removed == 2
    assert left == {mine.name, f".tmp-{os.getpid()}-{rollout._owner.start}-x"}
    agent.close(remove=True)


def test_a_dead_producers_ready_group_is_not_an_orphan(
    who: Who, serve: Serve, folder: RunFolder
) -> None:
    serve()
    agent = NodeAgent(who("dcs"))
    agent.start()
    rollout = TransferQueue(who())
    rollout._owner = DEAD
    rollout.open_dataset(100, "data")
    slot = rollout.admit(0, 1, 5.0).slots[0]
    rollout.put_group(slot, make_group(slot))
    assert agent.sweep(RpcClient(folder, wire.SERVICE, who("dcs"))) == 0
    assert len(list((folder.shm("n1") / "segments").iterdir())) == 1
    agent.close(remove=True)


def test_large_files_travel_in_parts(
    who: Who, serve: Serve, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "PART_BYTES", 1000)
    serve()
    agent = NodeAgent(who("dcs"))
    agent.start()
    data = os.urandom(12_345)
    (folder.shm("n1") / "weights" / "shard").write_bytes(data)
    client = RpcClient(folder, wire.agent_service("n1"), who("train", node="n2"))
    assert tcp.read_remote(client, "weights", "shard", 20, "test") == data
    with pytest.raises(TransferError, match="weights/nothing does not exist"):
        tcp.read_remote(client, "weights", "nothing", 20, "test")
    for area, name in (("weights", "../owner.json"), ("secret", "x"), ("weights", ".tmp-1-1-x")):
        with pytest.raises(TransferError, match="no file"):
            tcp.read_remote(client, area, name, 20, "test")
    agent.close(remove=True)


def test_a_restarted_agent_adopts_and_a_new_attempt_cleans(
    who: Who, serve: Serve, folder: RunFolder
) -> None:
    serve()
    segments = folder.shm("n1") / "segments"
    first = NodeAgent(who("dcs"))
    first.start()
    (segments / "kept").write_bytes(b"x")
    first.close(remove=False)
    second = NodeAgent(who("dcs", incarnation=2))
    second.start()
    assert [path.name for path in segments.iterdir()] in (["kept"], [])  # the sweep may be quick
    second.close(remove=False)
    (segments / "old").write_bytes(b"x")
    third = NodeAgent(who("dcs", attempt=2, incarnation=3))
    third.start()
    assert not list(segments.iterdir())
    third.close(remove=False)
    with pytest.raises(StaleIncarnationError, match="belongs to attempt 2"):
        NodeAgent(who("dcs", incarnation=2)).start()


_SLEEPER = """
import sys, time, dataclasses
from pathlib import Path
from relax_hpc.control.identity import Identity
from relax_hpc.runfolder import RunFolder
from relax_hpc.transfer.agent import NodeAgent
identity = Identity(run=RunFolder(Path(sys.argv[1])), role="dcs", node="n2", address_prefix="127.")
agent = NodeAgent(identity)
agent.start()
print("ready", flush=True)
time.sleep(600)
"""


def test_only_folders_of_dead_runs_are_reaped(who: Who, folder: RunFolder, tmp_path: Path) -> None:
    """On a copy of the folder in a root of its own: other runs of this machine are not ours."""
    root = tmp_path / "shm"
    copy = root / folder.shm("n2").name
    foreign = root / f"relax-{os.getuid()}-no-owner"
    foreign.mkdir(parents=True)
    command = [sys.executable, "-c", _SLEEPER, str(folder.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None and agent.stdout.readline() == "ready\n"
        shutil.copytree(folder.shm("n2"), copy)
        assert reap_dead_runs(root, min_age_s=0) == [], "its agent lives"
        agent.kill()
    assert reap_dead_runs(root) == [], "its run may be restarting"
    live = Owner("r", 1, os.getpid(), process_start(os.getpid()))
    write_segment(copy / "segments", "s", "n2", live, [Entry("u", 0, "a", np.zeros(1))])
    assert reap_dead_runs(root, min_age_s=0) == [], "a writer lives"
    (copy / "segments" / "s").unlink()
    assert reap_dead_runs(root, min_age_s=0) == [copy]
    assert not copy.exists() and foreign.exists()


def test_garbage_of_another_service_goes_to_its_area(
    who: Who, serve: Serve, folder: RunFolder
) -> None:
    serve()
    asked: list[wire.CollectGarbage] = []

    async def garbage(caller: object, request: wire.CollectGarbage) -> wire.Garbage:
        asked.append(request)
        return wire.Garbage(["shard"] if len(asked) == 1 else [])

    weights = RpcServer(folder, "weights", who("dcs"))
    weights.register("collect_garbage", wire.CollectGarbage, garbage)
    weights.start_thread()
    agent = NodeAgent(dataclasses.replace(who("dcs")))
    shard = folder.shm("n1") / "weights"
    shard.mkdir(parents=True, mode=0o700)
    (shard / "shard").write_bytes(b"w")
    agent.add_collector("weights", "weights")
    agent.start()
    _wait_until(lambda: len(asked) >= 2)
    assert asked[1].removed == ["shard"] and not (shard / "shard").exists()
    agent.close(remove=True)
    weights.stop()


def test_rules_are_taken_from_the_recipe() -> None:
    from relax_hpc.config import config_from_tree
    from relax_hpc.transfer.queue_rules import QueueRulesConfig

    tree = {
        "run": {"name": "x", "train_steps": 7, "seed": 3},
        "model": {"path": "m"},
        "data": {"train": "t.jsonl", "eval": "e.jsonl", "shuffle": False},
        "rollout": {"groups_per_step": 8, "group_size": 4, "max_response_tokens": 9,
                    "eval_interval": 5, "max_staleness": 2},
        "train": {"chunks_per_step": 2},
        "resources": {"ref": {}},
    }  # fmt: skip
    rules = QueueRulesConfig.from_config(config_from_tree(tree, "test"))
    assert rules == QueueRulesConfig(
        groups_per_step=8, group_size=4, max_staleness=2, chunks_per_step=2, train_steps=7,
        eval_interval=5, task_fields={"ref": "ref_logprobs"}, seed=3, is_shuffled=False,
    )  # fmt: skip
    assert rules.groups_per_chunk == 4 and RULES.eval_interval == 0
