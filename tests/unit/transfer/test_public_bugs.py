"""Public bugs of queues and shared memory elsewhere, each with the right behaviour here.

bug (component: what went wrong)                            where its test is
 1 TransferQueue: a cleared partition looked ready and gave  here
   another partition's data
 3 TransferQueue: late writes of step 0 are read in step 1   test_guarantees: q7
 4 TransferQueue: a starving consumer stalls producers 5 s   test_guarantees: q5
 5 TransferQueue: a refused put leaves rows behind           test_guarantees: q4; here (bad value)
 6 TransferQueue: a failed get becomes None in the batch     here
 7 verl: the trainer waits for ever for one dead producer    here
 8 verl: silent deadlock at start, resources never to be had here
10 Mooncake: live segments evicted, heartbeat was starved    here
11 Mooncake: memory changes after a read that timed out      test_rdma: a_stopped_target_ends_at
12 Mooncake: a lease shorter than its transfer               here (views), test_guarantees: q14
13 NIXL: a transfer is in progress for ever                  test_rdma, test_tcp: a_stopped_server
14 NIXL: corrupted tokens behind a success                   test_guarantees: q9
16 iceoryx2: no restart after kill -9 in the start           here
17 CPython: a reader's exit removes the segment              test_arena: a_reader_that_exits
18 CPython: a killed lock holder hangs everyone              here
19 Ray: SIGBUS or a hang when the store is full              test_arena: a_full_tmpfs_is_an_error
20 SGLang: leaked files kill the next job                    test_agent, test_guarantees: q15
21 logind RemoveIPC: files vanish under a running job        here
22 libzmq: a restarted peer with the same id gets nothing    here
23 UCX: refused shared memory in containers                  test_rdma: probing
24 MPICH: SIGBUS on a small /dev/shm                         test_arena, here (numbers)
26 h5py: unusable after a writer's crash                     test_archive, test_spill: kills
33 tinker: slow prompts are never trained                    test_protocol: q8
"""

import dataclasses
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from relax_hpc.config import TransferConfig
from relax_hpc.control.identity import Identity, LocalPlace, task_environment
from relax_hpc.control.rpc import RpcServer
from relax_hpc.errors import ArenaFullError, TransferError
from relax_hpc.runfolder import RunFolder
from relax_hpc.transfer.transfer_queue import TransferQueue

from .conftest import RULES
from .queue_process import make_group, make_sample
from .test_guarantees import arena_files, fill, heavy_group, producer, train_step

Who = Callable[..., Identity]
Serve = Callable[..., RpcServer]
Connect = Callable[..., TransferQueue]
ROOT = str(Path(__file__).parents[3])


def start(run: RunFolder, code: str, role: str, index: int, incarnation: int) -> "Process":
    environment = task_environment(
        run=run, role=role, index=index, attempt=1, incarnation=incarnation,
        address_prefix="127.", local=LocalPlace(rank=0, world=1, local_rank=0, node="n1"),
    )  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environment, "PYTHONPATH": ROOT},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


Process = subprocess.Popen[bytes]


def test_1_a_step_that_is_over_delivers_nothing_and_the_next_only_its_own(
    who: Who, serve: Serve, connect: Connect
) -> None:
    serve()
    rollout, train = connect(who()), connect(who("train"))
    rollout.open_dataset(100, "data")
    train.begin_train(0)
    fill(rollout, 0, 4)
    first = {row.uid for row in train_step(train, 0)}
    with pytest.raises(TransferError, match="that step is complete"):
        train.take_chunk(0, 0, 0, 1, 0.0)
    fill(rollout, 1, 4)
    second = train_step(train, 1)
    assert not first & {row.uid for row in second}
    for row in second:  # in the memory of step 0's rows, which were freed
        prompt = 1000 * int(row.uid.split(".")[1])
        assert (row.fields["tokens"] == prompt + np.arange(row.num_tokens)).all()


def test_5_a_put_that_is_refused_leaves_no_trace(who: Who, serve: Serve, connect: Connect) -> None:
    serve()
    rollout, train = connect(who()), connect(who("train"))
    rollout.open_dataset(100, "data")
    train.begin_train(0)
    slots = rollout.admit(0, 4, 5.0).slots
    bad = make_group(slots[0])
    bad[1].fields["rollout_logprobs"] = np.full(2, np.nan, np.float32)
    with pytest.raises(TransferError, match=r"rollout_logprobs.*not finite"):
        rollout.put_group(slots[0], bad)
    with pytest.raises(TransferError, match="not finite"):
        rollout.put_groups([(slots[1], make_group(slots[1])), (slots[0], bad)])
    stats, status = rollout.arena_stats(), rollout.status()
    assert stats is not None and (stats.num_blocks, stats.used) == (0, 0)
    assert (status.generating, status.ready, status.dropped) == (4, 0, {})
    assert rollout.put_groups([(slot, make_group(slot)) for slot in slots]) == [True] * 4
    assert len(train_step(train, 0)) == 8, "the status call works, and nobody waits for ever"


def _replace(path: Path, content: bytes) -> None:
    """Not in place: who mapped the file keeps it (and would get SIGBUS behind its new end)."""
    other = path.with_name(".other")
    other.write_bytes(content)
    other.replace(path)


def _cut_short(path: Path) -> None:
    _replace(path, path.read_bytes()[:4096])


def _blank(path: Path) -> None:
    _replace(path, bytes(path.stat().st_size))


@pytest.mark.parametrize("node", ["n1", "n2"], ids=["shm", "tcp"])
@pytest.mark.parametrize("harm", [Path.unlink, _cut_short, _blank])
def test_6_every_missing_byte_is_an_error_and_its_prompt_is_generated_again(
    who: Who,
    serve: Serve,
    connect: Connect,
    folder: RunFolder,
    node: str,
    harm: Callable[[Path], None],
) -> None:
    """The memory of a producer vanishes, as a whole or in part: never a None, never a zero."""
    serve()
    lost, rollout = connect(who()), connect(who(index=1))
    train = connect(who("train", node=node))
    lost.open_dataset(100, "data")
    train.begin_train(0)
    old = fill(lost, 0, 4)
    harmed = arena_files(folder)
    for path in harmed:
        harm(path)
    got: list[list[str]] = []
    thread = threading.Thread(
        target=lambda: got.append([row.uid for row in train_step(train, 0)]), daemon=True
    )
    thread.start()
    new: list[str] = []
    while thread.is_alive() and len(new) < 12:
        new += [slot.uid for slot in fill(rollout, 0, 4)]
    thread.join(100)
    assert got and not set(got[0]) & {slot.uid for slot in old} and set(got[0]) <= set(new)
    assert train.status().redispatched["unreadable"] >= 2


def test_7_a_dead_producers_prompts_reach_the_waiting_trainer_from_another(
    who: Who, serve: Serve, connect: Connect
) -> None:
    serve()
    dead, alive, train = connect(who()), connect(who(index=1)), connect(who("train"))
    dead.open_dataset(100, "data")
    train.begin_train(0)
    held = dead.admit(0, 99, 5.0).slots
    assert len(held) == 8 and alive.admit(0, 1, 0.0).slots == []
    got: list[str] = []
    thread = threading.Thread(
        target=lambda: got.extend(row.uid for row in train_step(train, 0)), daemon=True
    )
    thread.start()
    connect(who("supervisor")).release_producer("rollout", 0, 1)
    fill(alive, 0, 8)
    thread.join(60)
    assert {uid.split(".")[1] for uid in got} <= {str(slot.prompt_index) for slot in held}
    assert alive.status().redispatched == {"producer_lost": 8}


def test_8_what_can_never_fit_is_said_at_once_with_numbers(
    who: Who, serve: Serve, connect: Connect
) -> None:
    serve()
    config = TransferConfig(extent_mb=1, arena_mb=2, put_timeout_s=600)
    rollout = connect(who(), config=config)
    rollout.open_dataset(100, "data")
    (slot,) = rollout.admit(0, 1, 5.0).slots
    with pytest.raises(ArenaFullError, match=r"\d{7}.*transfer\.arena_mb"):
        rollout.put_group(slot, heavy_group(slot, nbytes=4 << 20))
    assert rollout.put_group(slot, make_group(slot))


def test_10_a_producer_that_is_stopped_for_long_keeps_its_groups(
    who: Who, serve: Serve, connect: Connect
) -> None:
    """A lease ends with a death that somebody knows of, never because a process was busy."""
    serve()
    train = connect(who("train"))
    train.begin_train(0)
    process = producer(who, incarnation=1)
    try:
        while train.status().ready < 4:
            time.sleep(0.01)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        before = train.status()
        assert before.in_flight >= 4 and not before.redispatched
        assert len({row.uid for row in train_step(train, 0)}) == 4
        process.send_signal(signal.SIGCONT)
        assert len({row.uid for row in train_step(train, 1)}) == 4, "it goes on"
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_12_views_stay_valid_while_the_step_takes_its_time(
    who: Who, serve: Serve, connect: Connect
) -> None:
    """Other groups come and go, the arena is full, its owner asks for free memory all the time."""
    serve(dataclasses.replace(RULES, max_staleness=2))
    config = TransferConfig(extent_mb=1, arena_mb=4, put_timeout_s=3)
    rollout, train = connect(who(), config=config), connect(who("train"))
    rollout.open_dataset(100, "data")
    train.begin_train(0)
    slots = rollout.admit(0, 12, 5.0).slots
    for slot in slots[:4]:
        assert rollout.put_group(slot, heavy_group(slot))
    rows = [row for index in (0, 1) for row in train.take_chunk(0, index, 0, 1, 20.0).rows]
    with pytest.raises(ArenaFullError):
        for slot in slots[4:]:
            rollout.put_group(slot, heavy_group(slot))
    for row in rows:
        number = 10 * int(row.uid.split(".")[1]) + row.sample_index
        assert (row.fields["pixel_values"] == number).all()
    train.complete_step(0)
    assert rollout.put_group(slots[-1], heavy_group(slots[-1])), "now their memory is used again"


_CLIENT = """
import sys
from relax_hpc.control.identity import Identity
from relax_hpc.transfer.transfer_queue import TransferQueue
from relax_hpc.config import TransferConfig
from tests.unit.transfer.queue_process import make_group
queue = TransferQueue(Identity.from_env(), config=TransferConfig(extent_mb=1, arena_mb=8))
queue.open_dataset(1000, "data")
slots = queue.admit(0, 2, 60.0).slots
assert len(slots) == 2 and all(queue.put_group(slot, make_group(slot)) for slot in slots)
queue.close()
"""


def test_16_killed_at_any_moment_of_the_start_then_all_start_at_once(
    who: Who, serve: Serve, connect: Connect, folder: RunFolder
) -> None:
    serve(dataclasses.replace(RULES, groups_per_step=16))
    is_long = os.environ.get("RELAX_TEST_LONG") == "1"
    chance = random.Random(0)
    num_kills, num_starts = (20, 8) if is_long else (2, 3)
    for number in range(num_kills):
        victim = start(folder, _CLIENT, "rollout", number % num_starts, number + 1)
        time.sleep(0.3 + chance.random())
        victim.kill()
        victim.communicate()
    clients = [start(folder, _CLIENT, "rollout", i, 100) for i in range(num_starts)]
    for client in clients:
        _, errors = client.communicate(timeout=120)
        assert client.returncode == 0, errors.decode()
    status = connect(who("train")).status()
    assert status.ready >= 2 * num_starts and status.generating == 0


def test_18_nobody_waits_for_what_a_killed_process_held(
    who: Who, serve: Serve, connect: Connect
) -> None:
    """There is no lock between processes: one is killed in its puts, the others' puts go on."""
    serve(dataclasses.replace(RULES, groups_per_step=16))
    rollout, chance = connect(who(index=1)), random.Random(3)
    for number in range(2):
        process = producer(who, incarnation=number + 1)
        time.sleep(chance.random() * 0.05)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        (slot,) = rollout.admit(0, 1, 20.0).slots
        assert rollout.put_group(slot, make_group(slot))


def test_21_names_that_vanish_leave_holders_alone_and_are_told_to_others(
    who: Who, serve: Serve, connect: Connect, folder: RunFolder
) -> None:
    """logind removes a user's files when another job of his ends on the node (RemoveIPC)."""
    serve()
    rollout, train = connect(who()), connect(who("train"))
    rollout.open_dataset(100, "data")
    train.begin_train(0)
    fill(rollout, 0, 8)
    rows = [row for index in (0, 1) for row in train.take_chunk(0, index, 0, 1, 20.0).rows]
    for path in arena_files(folder):
        path.unlink()
    for row in rows:
        prompt = 1000 * int(row.uid.split(".")[1])
        assert (row.fields["tokens"] == prompt + np.arange(row.num_tokens)).all()
    train.complete_step(0)
    newcomer = connect(who("train", incarnation=2))
    newcomer.begin_train(1)
    got: list[str] = []
    thread = threading.Thread(
        target=lambda: got.extend(row.uid for row in train_step(newcomer, 1)), daemon=True
    )
    thread.start()
    other = connect(who(index=1))
    while thread.is_alive():
        for slot in other.admit(1, 8, 0.2).slots:
            other.put_group(slot, make_group(slot, 1))
    assert len(set(got)) == 4
    assert newcomer.status().redispatched["unreadable"] == 4, "they could not be mapped any more"


def test_22_a_client_that_is_restarted_again_and_again_gets_its_answers(
    who: Who, serve: Serve, connect: Connect
) -> None:
    serve()
    for incarnation in range(1, 21):
        queue = connect(who("ref", incarnation=incarnation), grace_s=20)
        assert queue.status().version == 0
        if incarnation % 2:
            queue.close()


def test_24_a_node_without_room_says_so_before_anything_is_written(
    who: Who, serve: Serve, connect: Connect, start_agent: Callable[..., object]
) -> None:
    serve()
    start_agent(who("dcs", node="n2"), TransferConfig(node_shm_mb=2))
    config = TransferConfig(extent_mb=4, arena_mb=8, put_timeout_s=2)
    rollout = connect(who(index=1, node="n2"), config=config)
    rollout.open_dataset(100, "data")
    (slot,) = rollout.admit(0, 1, 5.0).slots
    with pytest.raises(ArenaFullError, match=r"n2.*node_shm_mb"):
        rollout.put_group(slot, [make_sample(), make_sample()])
