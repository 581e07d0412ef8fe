"""Payload through the client: views, recycling, back-pressure, shared blocks, other rows."""

import dataclasses
import shutil
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from relax_hpc.config import TransferConfig
from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import RpcServer
from relax_hpc.errors import ArenaFullError, TransferError
from relax_hpc.records import FinishReason, PromptSlot, Row, Sample
from relax_hpc.transfer.schema import Length, RowSchema, column
from relax_hpc.transfer.transfer_queue import TransferQueue

from .conftest import RULES, SMALL
from .queue_process import make_group, make_sample

Who = Callable[..., Identity]
Serve = Callable[..., RpcServer]
Connect = Callable[..., TransferQueue]

ONE_CHUNK = dataclasses.replace(RULES, chunks_per_step=1, train_steps=100)
TENSORS = RowSchema(columns={"pixels": column("float32", Length.ANY)})


def _begin(
    who: Who, connect: Connect, config: TransferConfig = SMALL, schema: RowSchema | None = None
) -> tuple[TransferQueue, TransferQueue]:
    options = {"config": config} | ({"schema": schema} if schema else {})
    rollout, train = connect(who(), **options), connect(who("train"), **options)
    rollout.open_dataset(1000, "data")
    train.begin_train(0)
    return rollout, train


def _take(train: TransferQueue, step: int) -> list[Row]:
    return train.take_chunk(step, 0, 0, 1, 30.0).rows


def _tensors(slot: PromptSlot, nbytes: int = 120_000) -> list[Sample]:
    """Two samples whose values are a function of the slot."""
    rng = np.random.default_rng([int(part) for part in slot.uid.split(".")])
    return [
        Sample(
            num_prompt_tokens=1,
            finish_reason=FinishReason.STOP,
            fields={"pixels": rng.random((nbytes // 40, 10), dtype=np.float32)},
        )
        for _ in range(2)
    ]


def _check_tensors(rows: Sequence[Row], nbytes: int = 120_000) -> None:
    for row in rows:
        slot = PromptSlot(uid=row.uid, prompt_index=0, epoch=0, deadline_version=0)
        wanted = _tensors(slot, nbytes)[row.sample_index].fields["pixels"]
        assert np.array_equal(row.fields["pixels"], wanted), "not what this group put"


def _wait_until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def _num_blocks(queue: TransferQueue) -> int:
    stats = queue.arena_stats()
    assert stats is not None
    return stats.num_blocks


def test_rows_are_views_of_the_producers_memory(who: Who, serve: Serve, connect: Connect) -> None:
    serve(ONE_CHUNK)
    rollout, train = _begin(who, connect)
    slots = rollout.admit(0, 4, 5.0).slots
    rollout.put_groups([(slot, make_group(slot)) for slot in slots])
    rows = _take(train, 0)
    tokens = rows[0].fields["tokens"]
    before = tokens.tobytes()
    (extent,) = (who().run.shm("n1") / "arenas").iterdir()
    with extent.open("r+b") as file:
        data = file.read()
        file.seek(data.find(before))
        file.write(bytes(len(before)))
    assert data.find(before) > 0
    assert not tokens.any(), "what is written to the extent is seen in the row: no copy"


def test_memory_is_used_again_when_its_step_is_complete(
    who: Who, serve: Serve, connect: Connect
) -> None:
    serve(ONE_CHUNK)
    config = dataclasses.replace(SMALL, arena_mb=2)
    rollout, train = _begin(who, connect, config, TENSORS)
    for step in range(12):  # 1 MB each
        for slot in rollout.admit(step, 4, 5.0).slots:
            assert rollout.put_group(slot, _tensors(slot))
        _check_tensors(_take(train, step))
        train.complete_step(step)
    _wait_until(lambda: _num_blocks(rollout) == 0, "trained groups are freed")
    stats = rollout.arena_stats()
    assert stats is not None and stats.reserved <= 2 << 20 and stats.high_water > 0
    assert stats.ignored_frees == 0, "what was freed is acknowledged, and not told again"


def test_a_full_arena_holds_puts_back_until_a_step_is_complete(
    who: Who, serve: Serve, connect: Connect
) -> None:
    serve(ONE_CHUNK)
    config = dataclasses.replace(SMALL, arena_mb=1)
    rollout, train = _begin(who, connect, config, TENSORS)
    slots = rollout.admit(0, 8, 5.0).slots
    for slot in slots[:4]:
        rollout.put_group(slot, _tensors(slot))
    late = threading.Thread(target=rollout.put_group, args=(slots[4], _tensors(slots[4])))
    late.start()
    _check_tensors(_take(train, 0))
    assert late.is_alive() and rollout.status().generating == 4
    train.complete_step(0)
    late.join(60)
    assert not late.is_alive() and rollout.status().ready == 1
    stats = rollout.arena_stats()
    assert stats is not None and stats.blocked_s > 0


def test_no_room_in_time_is_an_error_that_leaves_nothing_behind(
    who: Who, serve: Serve, connect: Connect
) -> None:
    serve(ONE_CHUNK)
    config = dataclasses.replace(SMALL, arena_mb=1, put_timeout_s=0.5)
    rollout, train = _begin(who, connect, config, TENSORS)
    slots = rollout.admit(0, 8, 5.0).slots
    for slot in slots[:4]:
        rollout.put_group(slot, _tensors(slot))
    with pytest.raises(ArenaFullError, match=r"is full.*raise transfer.arena_mb"):
        rollout.put_groups([(slot, _tensors(slot)) for slot in slots[4:6]])
    assert _num_blocks(rollout) == 4 and rollout.status().generating == 4
    _check_tensors(_take(train, 0))
    train.complete_step(0)
    _wait_until(lambda: _num_blocks(rollout) == 0, "trained groups are freed")
    assert rollout.put_group(slots[4], _tensors(slots[4]))


def test_groups_of_one_put_share_a_block_and_are_judged_alone(
    who: Who, serve: Serve, connect: Connect
) -> None:
    serve(dataclasses.replace(ONE_CHUNK, groups_per_step=2))
    rollout, train = _begin(who, connect)
    slots = rollout.admit(0, 4, 5.0).slots
    rollout.return_group(slots[1], "aborted")
    pairs = [(slot, make_group(slot)) for slot in slots]
    assert rollout.put_groups(pairs) == [True, False, True, True]
    assert rollout.put_groups(pairs) == [True, False, True, True], "again is harmless"
    assert rollout.put_groups([]) == []
    assert _num_blocks(rollout) == 1
    for row in _take(train, 0):
        assert row.fields["tokens"][0] == 1000 * int(row.uid.split(".")[1])
    train.complete_step(0)
    assert _num_blocks(rollout) == 1, "the third group is not trained yet"
    (again,) = rollout.admit(1, 1, 5.0).slots
    assert rollout.put_group(again, make_group(again, 1))
    assert len({row.uid for row in _take(train, 1)}) == 2
    train.complete_step(1)
    _wait_until(lambda: _num_blocks(rollout) == 0, "all groups of the block are trained")


def test_one_bad_sample_refuses_the_whole_put(who: Who, serve: Serve, connect: Connect) -> None:
    serve(ONE_CHUNK)
    rollout, _ = _begin(who, connect)
    first, second = rollout.admit(0, 2, 5.0).slots
    bad = make_group(second)
    bad[1].fields["rollout_logprobs"][1] = np.inf
    with pytest.raises(TransferError, match=rf"{second.uid} sample 1: rollout_logprobs is not fin"):
        rollout.put_groups([(first, make_group(first)), (second, bad)])
    del bad[0].fields["reward"]
    with pytest.raises(TransferError, match=rf"{second.uid} sample 0: field reward is missing"):
        rollout.put_groups([(first, make_group(first)), (second, bad)])
    assert _num_blocks(rollout) == 0 and rollout.status().generating == 2


def test_more_fields_than_the_schema_asks_for(who: Who, serve: Serve, connect: Connect) -> None:
    serve(ONE_CHUNK)
    rollout, train = _begin(who, connect)
    image = {"mime": "image/png", "data": bytes(range(256)), "size": {"hw": np.array([3, 5])}}
    put = {}
    for slot in rollout.admit(0, 4, 5.0).slots:
        put[slot.uid] = make_group(slot)
        put[slot.uid][1].fields["image"] = image  # type: ignore[assignment]
        rollout.put_group(slot, put[slot.uid])
    for row in _take(train, 0):
        assert ("image" in row.fields) == (row.sample_index == 1)
        found = row.fields.get("image", image)
        assert isinstance(found, dict)
        assert (found["mime"], bytes(found["data"])) == (image["mime"], image["data"])
        assert found["size"]["hw"].tolist() == [3, 5]


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_full_arena_spills_and_spilled_rows_are_read(
    who: Who, serve: Serve, connect: Connect, node: str
) -> None:
    serve(ONE_CHUNK)
    config = dataclasses.replace(SMALL, arena_mb=1, spill_mb=64)
    rollout, _ = _begin(who, connect, config, TENSORS)
    train = connect(who("train", rank=1, node=node), config=config, schema=TENSORS)
    for slot in rollout.admit(0, 8, 5.0).slots:
        rollout.put_group(slot, _tensors(slot))
    stats = rollout.arena_stats()
    assert stats is not None and stats.spilled_bytes > 0
    for step in range(2):
        _check_tensors(_take(train, step))
        train.complete_step(step)
    _wait_until(lambda: not list((who().run.path / "spill").rglob("*.s*")), "segments are removed")


def test_partial_tokens_reach_the_next_dispatch(who: Who, serve: Serve, connect: Connect) -> None:
    serve(ONE_CHUNK)
    rollout, _ = _begin(who, connect)
    other = connect(who(index=1))
    (slot,) = rollout.admit(0, 1, 5.0).slots
    assert slot.partial is None and rollout.read_partial(slot) == []
    fields = make_sample(0, 5).fields
    begun = {name: fields[name] for name in ("tokens", "token_versions")}
    nothing = {name: array[:0] for name, array in begun.items()}
    assert rollout.save_partial(slot, [nothing, nothing])
    assert rollout.save_partial(slot, [begun, nothing])
    rollout.return_group(slot, "aborted")
    (again,) = other.admit(0, 1, 5.0).slots
    assert again.prompt_index == slot.prompt_index and again.uid != slot.uid
    first, second = other.read_partial(again)
    assert first["tokens"].tolist() == begun["tokens"].tolist() and second["tokens"].size == 0
    assert not rollout.save_partial(slot, [begun, nothing]), "its uid is of the past"
    assert other.put_group(again, make_group(again))
    _wait_until(lambda: _num_blocks(rollout) == 0, "the partial tokens are freed")


def test_the_queue_goes_on_from_the_ledger_of_a_checkpoint(
    who: Who, serve: Serve, connect: Connect
) -> None:
    server = serve(ONE_CHUNK)
    rollout, train = _begin(who, connect)
    trained = []
    for step in range(3):
        slots = rollout.admit(step, 4, 5.0).slots
        rollout.put_groups([(slot, make_group(slot, step)) for slot in slots])
        trained += list(dict.fromkeys(row.uid for row in _take(train, step)))
        train.complete_step(step)
    cut = train.cut_ledger(2)
    with pytest.raises(TransferError, match="of step 2"):
        train.begin_train(3, cut)
    with pytest.raises(TransferError, match="not one"):
        train.begin_train(2, b"garbage")
    server.stop()
    shutil.rmtree(who().run.journal)
    who().run.journal.mkdir()
    serve(ONE_CHUNK, incarnation=2)
    train = connect(who("train", incarnation=2))
    rollout = connect(who(incarnation=2))
    train.begin_train(2, cut)
    rollout.open_dataset(1000, "data")
    status = train.status()
    assert (status.version, status.trained_groups) == (2, 8)
    slots = rollout.admit(2, 8, 5.0).slots
    again = {slot.prompt_index for slot in slots}
    assert not again & {int(uid.split(".")[1]) for uid in trained[:8]}, "trained once"
    assert {int(uid.split(".")[1]) for uid in trained[8:]} <= again, "the lost step's prompts"
    assert not {slot.uid for slot in slots} & set(trained)
