"""Guarantees Q1 to Q15 of the transfer queue, each with the tests that hold it.

Where a guarantee is at home in one part, its test is there; the tests here go through the whole
client, controller and agent.

 1 atomic put, visible when told   test_arena: killed_writers_leave_no_torn_block (200 kills --long)
                                   test_block: nothing_is_committed_before_everything_is_written
                                   here: q1; tests/distributed/test_transfer_chaos: producer
 2 at least once, acked once       here: q2; test_transfer_chaos: consumer, forward; test_protocol
 3 one dp rank, one set of rows    test_transfer_queue: take_chunk_is_the_same_for_all_ranks; q3
 4 back-pressure, bounded memory   test_arena: a_put_waits_for_a_free_without_turning,
                                   a_full_arena_is_an_error_with_numbers, a_full_tmpfs; here: q4
 5 no head-of-line blocking        here: q5
 6 a slow consumer hurts no other  here: q6; test_tcp_hostile: a_slow_reader_is_closed
 7 no ABA                          here: q7; test_arena: old_references_are_stale,
                                   test_reader: freed_recycled_and_impossible_references
 8 staleness without length bias   test_protocol: q8 and all; test_samplers: feasible_means
 9 integrity                       test_block: every_flipped_bit_is_seen; test_reader:
                                   one_flipped_bit; test_transfer_queue: corrupt_payload; here: q9
10 restart of each role            test_kills; test_transfer_chaos: any, controller, agent, requeued
11 node loss                       test_transfer_chaos: node
12 order, whole groups             test_protocol: q12; test_samplers: first_come_first_served
13 any value, bit equal            test_block: any_rows_round_trip; test_reader: every_kind; q13
14 equal payload once              test_block: an_image_of_eight_samples_is_stored_once; here: q14
15 nothing is left                 here: q15; test_transfer_chaos; tests/unit/launcher/test_doctor
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

import msgspec
import numpy as np
import pytest

from relax_hpc.config import TransferConfig
from relax_hpc.control.identity import Identity, LocalPlace, task_environment
from relax_hpc.control.rpc import RpcClient, RpcServer
from relax_hpc.errors import ArenaFullError, StaleEpochError, StaleIncarnationError
from relax_hpc.records import PromptSlot, Row, Sample
from relax_hpc.runfolder import RunFolder
from relax_hpc.transfer import wire
from relax_hpc.transfer.agent import NodeAgent
from relax_hpc.transfer.reader import Reader
from relax_hpc.transfer.transfer_queue import TransferQueue

from .conftest import RULES
from .queue_process import make_group, make_sample

Who = Callable[..., Identity]
Serve = Callable[..., RpcServer]
Connect = Callable[..., TransferQueue]
WITH_REF = dataclasses.replace(RULES, task_fields={"ref": "ref_logprobs"})
MB = 1 << 20


def heavy_group(slot: PromptSlot, version: int = 0, nbytes: int = MB // 2) -> list[Sample]:
    """A group of about `nbytes` whose big field tells the prompt."""
    samples = make_group(slot, version)
    for index, sample in enumerate(samples):
        image = np.full(nbytes // 2 // 4, 10 * slot.prompt_index + index, np.float32)
        sample.fields["pixel_values"] = image
    return samples


def fill(queue: TransferQueue, version: int, num_groups: int) -> list[PromptSlot]:
    slots = queue.admit(version, num_groups, 5.0).slots
    for slot in slots:
        assert queue.put_group(slot, make_group(slot, version))
    return slots


def train_step(train: TransferQueue, step: int) -> list[Row]:
    """Return copies: the views end with the step."""
    rows: list[Row] = []
    for index in range(RULES.chunks_per_step):
        for row in train.take_chunk(step, index, 0, 1, 60.0).rows:
            fields = {name: np.array(value) for name, value in row.fields.items()}
            rows.append(msgspec.structs.replace(row, fields=fields))
    train.complete_step(step)
    return rows


def put_ref(ref: TransferQueue, rows: list[Row]) -> bool:
    arrays = [np.zeros(row.num_tokens - 2, np.float32) for row in rows]
    return ref.put_fields(rows, "ref_logprobs", arrays)


def arena_files(folder: RunFolder) -> list[Path]:
    return sorted((folder.shm("n1") / "arenas").iterdir())


def sweep(who: Who) -> int:
    """What the agent does every half minute."""
    identity = who("supervisor", incarnation=9)
    client = RpcClient(identity.run, wire.SERVICE, identity)
    try:
        return NodeAgent(who("dcs")).sweep(client)
    finally:
        client.close()


# -- Q1 -------------------------------------------------------------------------------------------

_PUT_FOR_EVER = """
import sys, numpy as np
from relax_hpc.config import TransferConfig
from relax_hpc.control.identity import Identity
from relax_hpc.transfer.transfer_queue import TransferQueue
from tests.unit.transfer.test_guarantees import heavy_group
queue = TransferQueue(Identity.from_env(), config=TransferConfig(extent_mb=1, arena_mb=8))
queue.open_dataset(1000, "data")
print("ready", flush=True)
while True:
    for slot in queue.admit(0, 2, 60.0).slots:
        queue.put_group(slot, heavy_group(slot))
"""


def producer(who: Who, incarnation: int) -> subprocess.Popen[str]:
    environment = task_environment(
        run=who().run, role="rollout", index=0, attempt=1, incarnation=incarnation,
        address_prefix="127.", local=LocalPlace(rank=0, world=1, local_rank=0, node="n1"),
    )  # fmt: skip
    root = str(Path(__file__).parents[3])
    process = subprocess.Popen(
        [sys.executable, "-c", _PUT_FOR_EVER],
        env={**os.environ, **environment, "PYTHONPATH": root}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_q1_a_producer_killed_in_a_put_leaves_a_whole_group_or_none_and_no_memory(
    who: Who, serve: Serve, connect: Connect, folder: RunFolder
) -> None:
    serve(dataclasses.replace(RULES, groups_per_step=8, max_staleness=2, train_steps=40))
    train, chance = connect(who("train")), random.Random(1)
    train.begin_train(0)
    num_kills = 20 if os.environ.get("RELAX_TEST_LONG") == "1" else 3
    for step in range(num_kills):
        process = producer(who, incarnation=step + 1)
        time.sleep(chance.random() * 0.1)
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        connect(who("supervisor")).release_producer("rollout", 0, step + 1)
        status = train.status()
        assert status.generating == 0, "slots of the dead are dispatched again"
        assert status.ready + status.assigned == status.in_flight
        if status.ready >= 4:
            for row in train.take_chunk(0, 0, 0, 1, 60.0).rows:
                number = 10 * int(row.uid.split(".")[1]) + row.sample_index
                assert (row.fields["pixel_values"] == number).all()
    connect(who("train", incarnation=2)).begin_train(1)  # all that was put is of no use any more
    sweep(who)
    assert not arena_files(folder), "the memory of dead producers is given back"


# -- Q2 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["claimed", "half", "put"])
def test_q2_what_a_dead_consumer_did_not_acknowledge_is_delivered_again(
    who: Who, serve: Serve, connect: Connect, moment: str
) -> None:
    serve(WITH_REF)
    rollout = connect(who())
    rollout.open_dataset(100, "data")
    slots = fill(rollout, 0, 4)
    victim = connect(who("ref"))
    rows = victim.take_rows("ref", 99, 20.0)
    assert len(rows) == 8
    done = {"claimed": 0, "half": 3, "put": 8}[moment]
    assert put_ref(victim, rows[:done])
    other = connect(who("ref", incarnation=2))
    again = other.take_rows("ref", 99, 0.5)
    expected = [(row.uid, row.sample_index) for row in rows[done:]]
    assert [(row.uid, row.sample_index) for row in again] == expected
    assert put_ref(other, again)
    train = connect(who("train"))
    train.begin_train(0)
    trained = train_step(train, 0)
    assert sorted((row.uid, row.sample_index) for row in trained) == sorted(
        (slot.uid, sample) for slot in slots for sample in (0, 1)
    )


def test_q2_a_zombie_consumer_is_refused(who: Who, serve: Serve, connect: Connect) -> None:
    """It hangs (SIGSTOP, a dead network), is replaced, and goes on: its words count nothing."""
    serve(WITH_REF)
    rollout = connect(who())
    rollout.open_dataset(100, "data")
    fill(rollout, 0, 4)
    zombie = connect(who("ref"))
    rows = zombie.take_rows("ref", 99, 20.0)
    fresh = connect(who("ref", incarnation=2))
    again = fresh.take_rows("ref", 99, 20.0)
    assert len(again) == len(rows) == 8
    with pytest.raises(StaleIncarnationError):
        put_ref(zombie, rows)
    assert put_ref(fresh, again)
    old = connect(who("train"))
    old.begin_train(0)
    for index in range(RULES.chunks_per_step):
        old.take_chunk(0, index, 0, 1, 20.0)
    new = connect(who("train", incarnation=2))
    new.begin_train(0)
    with pytest.raises(StaleIncarnationError):
        old.complete_step(0)
    assert new.status().version == 0
    train_step(new, 0)
    assert new.status().version == 1


# -- Q3 -------------------------------------------------------------------------------------------


def test_q3_a_restart_between_chunks_gets_the_same_rows_in_the_same_shares(
    who: Who, serve: Serve, connect: Connect
) -> None:
    serve()
    rollout, train = connect(who()), connect(who("train"))
    rollout.open_dataset(100, "data")
    fill(rollout, 0, 8)
    train.begin_train(0)

    def shares(queue: TransferQueue, index: int) -> list[list[tuple[str, int]]]:
        chunks = [queue.take_chunk(0, index, rank, 2, 20.0) for rank in (0, 1, 1, 0)]
        keys = [[(row.uid, row.sample_index) for row in chunk.rows] for chunk in chunks]
        assert keys[0] == keys[3] and keys[1] == keys[2]
        return keys[:2]

    first = shares(train, 0)
    serve(incarnation=2)  # the controller
    assert shares(train, 0) == first
    again = connect(who("train", incarnation=2))
    again.begin_train(0)
    assert shares(again, 0) == first
    second = shares(again, 1)
    uids = [uid for share in first + second for uid in dict.fromkeys(uid for uid, _ in share)]
    assert len(uids) == len(set(uids)) == 4


# -- Q4 -------------------------------------------------------------------------------------------


def test_q4_a_fast_producer_waits_for_memory_and_loses_nothing(
    who: Who, serve: Serve, connect: Connect, folder: RunFolder
) -> None:
    """12 groups of 1 MB may be in flight, the arena holds 8: the put waits for trained steps."""
    serve(dataclasses.replace(RULES, max_staleness=2, train_steps=8))
    small = TransferConfig(extent_mb=3, arena_mb=12, put_timeout_s=60)
    rollout, train = connect(who(), config=small), connect(who("train"))
    rollout.open_dataset(100, "data")
    train.begin_train(0)
    peak = [0]

    def produce() -> None:
        is_done = False
        while not is_done:
            version = train.status().version
            admission = rollout.admit(version, 4, 1.0)
            is_done = admission.done
            for slot in admission.slots:
                assert rollout.put_group(slot, heavy_group(slot, version, MB))
                used = sum(path.stat().st_size for path in arena_files(folder))
                peak[0] = max(peak[0], used)

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    trained: list[str] = []
    for step in range(8):
        while (stats := rollout.arena_stats()) is None or stats.blocked_s == 0.0 == step:
            time.sleep(0.01)  # until the producer has waited once
        rows = train_step(train, step)
        for row in rows:
            number = 10 * int(row.uid.split(".")[1]) + row.sample_index
            assert (row.fields["pixel_values"] == number).all()
        trained += dict.fromkeys(row.uid for row in rows)
    thread.join(60)
    stats = rollout.arena_stats()
    assert stats is not None and stats.blocked_s > 0 and stats.reserved <= 12 * MB
    assert peak[0] <= 13 * MB, "the cap, and what the heads of extents take"
    assert len(trained) == len(set(trained)) == 32


def test_q4_full_with_a_dead_consumer_is_a_typed_error_that_leaves_nothing(
    who: Who, serve: Serve, connect: Connect
) -> None:
    serve()
    small = TransferConfig(extent_mb=1, arena_mb=3, put_timeout_s=1)
    rollout = connect(who(), config=small)
    rollout.open_dataset(100, "data")
    slots = rollout.admit(0, 8, 5.0).slots
    num_put = 0
    before = os.times()
    with pytest.raises(ArenaFullError, match=r"\d+ bytes.*transfer\.arena_mb"):
        for slot in slots:
            rollout.put_group(slot, heavy_group(slot))
            num_put += 1
    after = os.times()
    assert 0 < num_put < 8
    assert after.user + after.system - before.user - before.system < 0.9, "it does not turn"
    status, stats = rollout.status(), rollout.arena_stats()
    assert stats is not None and stats.num_blocks == num_put
    assert (status.ready, status.generating) == (num_put, 8 - num_put)
    rollout.drop_group(slots[-1], "no memory")
    train = connect(who("train"))
    train.begin_train(0)
    if num_put >= 4:
        train_step(train, 0)
        assert rollout.put_group(slots[num_put], heavy_group(slots[num_put]))


# -- Q5 -------------------------------------------------------------------------------------------


def test_q5_a_hundred_waiters_for_what_never_comes_hold_nobody_up(
    who: Who, serve: Serve, connect: Connect
) -> None:
    serve(dataclasses.replace(WITH_REF, max_staleness=4, groups_per_step=16))
    rollout, train = connect(who()), connect(who("train"))
    rollout.open_dataset(1000, "data")
    train.begin_train(0)
    got: list[int] = []

    def wait_long(rank: int) -> None:
        identity = who("train", rank=rank)
        client = RpcClient(identity.run, wire.SERVICE, identity)
        request = wire.TakeChunk(0, 0, 0, 1, 30.0)
        reply = client.call("take_chunk", request, wire.TakenChunk, timeout_s=60, why="late")
        got.append(0 if reply.groups is None else len(reply.groups))
        client.close()

    waiters = [threading.Thread(target=wait_long, args=(r,), daemon=True) for r in range(100)]
    for waiter in waiters:
        waiter.start()
    slots = rollout.admit(0, 60, 5.0).slots
    assert len(slots) == 60
    for slot in slots:
        assert rollout.put_group(slot, make_group(slot))
    assert not got, "60 puts took longer than the waiters' 30 s"
    ref = connect(who("ref"))
    assert put_ref(ref, ref.take_rows("ref", 999, 20.0))
    for waiter in waiters:
        waiter.join(60)
    assert got == [8] * 100, "and all wake when it comes"


# -- Q6 -------------------------------------------------------------------------------------------


def test_q6_a_task_that_stands_still_is_named_and_holds_no_other_up(
    who: Who, serve: Serve, connect: Connect
) -> None:
    tasks = {"ref": "ref_logprobs", "logprob": "train_logprobs"}
    serve(dataclasses.replace(RULES, task_fields=tasks, stuck_after_s=0.2))
    rollout, ref, slow = connect(who()), connect(who("ref")), connect(who("logprob"))
    rollout.open_dataset(100, "data")
    fill(rollout, 0, 8)
    held = slow.take_rows("logprob", 1, 20.0)
    rows = ref.take_rows("ref", 99, 20.0)
    assert len(held) == 1 and len(rows) == 16 and put_ref(ref, rows), "the other works on"
    time.sleep(0.3)
    status = rollout.status()
    assert {name: task.is_stuck for name, task in status.tasks.items()} == {
        "ref": False, "logprob": True, "train": False,
    }  # fmt: skip
    assert (status.tasks["logprob"].waiting, status.tasks["logprob"].leased) == (15, 1)
    assert status.waiting == 8 and rollout.admit(0, 1, 0.0).slots == [], "memory is bounded"


# -- Q7 -------------------------------------------------------------------------------------------


def test_q7_a_late_put_of_a_step_that_is_over_changes_nothing(
    who: Who, serve: Serve, connect: Connect
) -> None:
    """TransferQueue 0.1.11 accepts it: the consumer of step 1 reads step 0's late write."""
    serve()
    late, rollout = connect(who()), connect(who(index=1))
    train = connect(who("train"))
    rollout.open_dataset(100, "data")
    train.begin_train(0)
    (old,) = late.admit(0, 1, 5.0).slots
    connect(who("supervisor")).release_producer("rollout", 0, 1)
    fill(rollout, 0, 8)
    train_step(train, 0)
    assert not late.put_group(old, [make_sample(mark=666), make_sample(mark=666)])
    rows = train_step(train, 1)
    assert all(row.fields["tokens"][0] == 1000 * int(row.uid.split(".")[1]) for row in rows)
    assert old.uid not in {row.uid for row in rows}
    stats = late.arena_stats()
    assert stats is not None and stats.num_blocks == 0, "refused, so its memory is free again"


@pytest.mark.parametrize("node", ["n1", "n2"], ids=["shm", "tcp"])
def test_q7_a_reference_to_memory_that_was_used_again_is_stale(
    who: Who, serve: Serve, connect: Connect, node: str
) -> None:
    serve()
    rollout, train = connect(who()), connect(who("train"))
    rollout.open_dataset(100, "data")
    train.begin_train(0)
    fill(rollout, 0, 4)
    client = RpcClient(who().run, wire.SERVICE, who("train"))
    request = wire.TakeChunk(0, 0, 0, 1, 20.0)
    reply = client.call("take_chunk", request, wire.TakenChunk, timeout_s=60, why="test")
    client.close()
    assert reply.groups is not None
    refs = reply.blocks
    assert {i for group in reply.groups for i in group.blocks} == set(range(len(refs)))
    reader = Reader(who("train", node=node))
    assert len(reader.read(refs, deadline=time.monotonic() + 60)) == len(refs)
    train_step(train, 0)
    while (stats := rollout.arena_stats()) is None or stats.num_blocks:
        time.sleep(0.01)  # until the producer heard that they are free
    with pytest.raises(StaleEpochError):
        reader.read(refs, deadline=time.monotonic() + 60)
    fill(rollout, 1, 8)
    with pytest.raises(StaleEpochError):
        reader.read(refs, deadline=time.monotonic() + 60)
    reader.close()


# -- Q9 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", ["n1", "n2"], ids=["shm", "tcp"])
def test_q9_a_flipped_bit_is_regenerated_and_never_trained(
    who: Who, serve: Serve, connect: Connect, folder: RunFolder, node: str
) -> None:
    serve()
    verified = TransferConfig(extent_mb=1, arena_mb=8, verify_shm=True)
    rollout, train = connect(who()), connect(who("train", node=node), config=verified)
    rollout.open_dataset(100, "data")
    train.begin_train(0)
    slots = rollout.admit(0, 4, 5.0).slots
    for slot in slots:
        rollout.put_group(slot, heavy_group(slot, nbytes=1 << 14))
    bad = slots[1]
    needle = heavy_group(bad, nbytes=1 << 14)[1].fields["pixel_values"].tobytes()
    found = [path for path in arena_files(folder) if needle in path.read_bytes()]
    assert len(found) == 1
    with found[0].open("r+b") as file:
        file.seek(found[0].read_bytes().index(needle) + 4000)
        file.write(b"\x01")
    got: list[Row] = []
    thread = threading.Thread(target=lambda: got.extend(train_step(train, 0)), daemon=True)
    thread.start()
    while train.status().redispatched != {"unreadable": 1}:
        time.sleep(0.01)
    (again,) = rollout.admit(0, 1, 5.0).slots
    assert again.prompt_index == bad.prompt_index and again.uid != bad.uid
    assert rollout.put_group(again, heavy_group(again, nbytes=1 << 14))
    thread.join(60)
    assert {row.uid for row in got} == {slot.uid for slot in slots} - {bad.uid} | {again.uid}
    for row in got:
        number = 10 * int(row.uid.split(".")[1]) + row.sample_index
        assert (row.fields["pixel_values"] == number).all()


# -- Q13 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", ["n1", "n2"], ids=["shm", "tcp"])
def test_q13_extra_fields_of_any_kind_come_back_bit_equal(
    who: Who, serve: Serve, connect: Connect, node: str
) -> None:
    serve()
    rollout, train = connect(who()), connect(who("train", node=node))
    rollout.open_dataset(100, "data")
    train.begin_train(0)
    chance = np.random.default_rng(0)

    def extras(index: int) -> dict[str, object]:
        return {
            "zero_d": np.asarray(index, np.int64),
            "empty": np.zeros((0, 3), np.float16),
            "flags": np.array([True, False, index > 2]),
            "half": np.arange(index + 1, dtype=np.float16),
            "image": bytes([index]) * (1 + index),
            "answer": f"\u00e4{index}",
            "multimodal_train_inputs": {"grid_thw": np.array([[1, 2, index]], np.int64)},
        }

    slots = rollout.admit(0, 4, 5.0).slots
    for number, slot in enumerate(slots):
        samples = make_group(slot)
        for index, sample in enumerate(samples):
            sample.fields.update(extras(2 * number + index))  # type: ignore[arg-type]
            if chance.random() < 0.5:
                del sample.fields["half"]  # the schema may differ from row to row
        assert rollout.put_group(slot, samples)
    places = {slot.uid: number for number, slot in enumerate(slots)}
    for row in train_step_views(train):
        expected = extras(2 * places[row.uid] + row.sample_index)
        for name, value in expected.items():
            if name != "half" or name in row.fields:
                assert_equal(row.fields[name], value)


def train_step_views(train: TransferQueue) -> list[Row]:
    return [r for index in (0, 1) for r in train.take_chunk(0, index, 0, 1, 20.0).rows]


def assert_equal(seen: object, value: object) -> None:
    if isinstance(value, dict):
        assert isinstance(seen, dict) and seen.keys() == value.keys()
        for name, inner in value.items():
            assert_equal(seen[name], inner)
    elif isinstance(value, np.ndarray):
        assert isinstance(seen, np.ndarray)
        assert (seen.dtype, seen.shape) == (value.dtype, value.shape)
        assert seen.tobytes() == value.tobytes()
    else:
        assert type(seen) is type(value) and seen == value


# -- Q14 ------------------------------------------------------------------------------------------


def test_q14_an_image_of_a_whole_group_is_stored_once_and_freed_with_its_step(
    who: Who, serve: Serve, connect: Connect
) -> None:
    serve(dataclasses.replace(RULES, group_size=8))
    rollout, train = connect(who()), connect(who("train"))
    rollout.open_dataset(100, "data")
    train.begin_train(0)
    for slot in rollout.admit(0, 4, 5.0).slots:
        image = np.full(MB // 4, slot.prompt_index, np.float32)
        samples = [make_sample() for _ in range(8)]
        for sample in samples:
            sample.fields["pixel_values"] = image
        assert rollout.put_group(slot, samples)
    stats = rollout.arena_stats()
    assert stats is not None and 4 * MB < stats.used < 5 * MB, "once a group, not 8 times"
    for row in train_step_views(train):
        assert (row.fields["pixel_values"] == int(row.uid.split(".")[1])).all()
    assert rollout.arena_stats().used == stats.used, "held until the step is told"  # type: ignore[union-attr]
    train.complete_step(0)
    while (stats := rollout.arena_stats()) is not None and stats.num_blocks:
        time.sleep(0.01)
    assert stats is not None and stats.used == 0


# -- Q15 ------------------------------------------------------------------------------------------


def test_q15_a_new_attempt_on_the_node_removes_what_the_killed_one_left(
    who: Who, serve: Serve, connect: Connect, folder: RunFolder
) -> None:
    """All processes of an attempt are killed at once; the next one begins with an empty folder."""
    serve()
    rollout = connect(who())
    process = producer(who, incarnation=2)
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
    assert arena_files(folder)
    rollout.close()
    agent = NodeAgent(who("dcs", attempt=2, incarnation=5))
    agent.start()
    assert not arena_files(folder)
    agent.close(remove=True)
    assert not folder.shm("n1").exists()
