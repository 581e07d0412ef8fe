"""The controller behind real sockets: who is woken by what, free lists, restarts, cuts."""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pytest

from relax_hpc.control import group_commit
from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import Empty, RpcClient, RpcServer
from relax_hpc.control.rpc_message import EARLY, NUMBER_BYTES, OK, SAME, digest_of
from relax_hpc.control.rpc_near import NearPeer
from relax_hpc.errors import TransferError
from relax_hpc.transfer import controller, waiting_room, wire
from relax_hpc.transfer.queue_rules import QueueRulesConfig
from relax_hpc.transfer.queue_state import CHUNKS

RULES = QueueRulesConfig(
    groups_per_step=4, group_size=2, max_staleness=1, chunks_per_step=2, train_steps=50
)
WITH_REF = dataclasses.replace(RULES, task_fields={"ref": "ref_logprobs"})
ARENA = "rollout0.0-1.1-abcd"
Reply = TypeVar("Reply", bound=msgspec.Struct)


class Peer:
    """One process that talks to the controller, without payload."""

    def __init__(self, identity: Identity) -> None:
        self._client = RpcClient(identity.run, wire.SERVICE, identity)
        self._keys = 0
        self._epoch = 0
        self.blocks: list[wire.BlockRef] = []
        """Of what was taken last."""

    def call(self, method: str, request: msgspec.Struct, response: type[Reply]) -> Reply:
        return self._client.call(method, request, response, timeout_s=60, why="test")

    def key(self) -> str:
        self._keys += 1
        return str(self._keys)

    def open(self) -> None:
        self.call("open_dataset", wire.OpenDataset(1000, "x"), Empty)

    def admit(self, num_groups: int, version: int = 0, wait_s: float = 20.0) -> list[wire.Slot]:
        request = wire.Admit(self.key(), version, num_groups, wait_s)
        return self.call("admit", request, wire.Admitted).slots

    def group(self, uid: str, block: wire.BlockRef | None = None) -> wire.GroupInfo:
        rows = wire.Rows([2, 2], [5, 9], ["stop", "length"])
        return wire.GroupInfo(uid, block or self.block(), rows, 0)

    def block(self) -> wire.BlockRef:
        self._epoch += 1
        return wire.BlockRef("n1", f"{ARENA}.0", 64 * self._epoch, 64, self._epoch, 1)

    def put(self, *groups: wire.GroupInfo) -> list[wire.Stored]:
        return self.call("put_groups", wire.PutGroups(list(groups)), wire.StoredGroups).results

    def take(self, max_rows: int, wait_s: float = 20.0) -> list[wire.GroupRows]:
        request = wire.TakeRows("ref", self.key(), max_rows, wait_s)
        reply = self.call("take_rows", request, wire.TakenRows)
        self.blocks = reply.blocks
        return reply.groups

    def begin(self, step: int, cut: wire.LedgerCut | None = None) -> None:
        self.call("begin_train", wire.BeginTrain(f"b{self.key()}", step, cut), Empty)

    def chunk(self, step: int, index: int, rank: int = 0, size: int = 1) -> list[wire.GroupRows]:
        request = wire.TakeChunk(step, index, rank, size, 20.0)
        reply = self.call("take_chunk", request, wire.TakenChunk)
        assert reply.groups is not None, "the wait ended"
        self.blocks = reply.blocks
        return reply.groups

    def complete(self, step: int) -> wire.StepSummary:
        return self.call("complete_step", wire.CompleteStep(step), wire.StepSummary)

    def free(self, acked: list[tuple[str, int, int]], wait_s: float) -> list[tuple[str, int, int]]:
        request = wire.CollectFree(ARENA, acked, wait_s)
        return self.call("collect_free", request, wire.Freed).blocks

    def train(self, step: int) -> wire.StepSummary:
        for index in range(RULES.chunks_per_step):
            self.chunk(step, index)
        return self.complete(step)


Serve = Callable[..., RpcServer]
Who = Callable[..., Identity]


def _keys_of(groups: list[wire.GroupInfo]) -> set[tuple[str, int, int]]:
    return {(g.block.extent, g.block.offset, g.block.epoch) for g in groups}


def test_a_put_wakes_who_waits_for_rows(serve: Serve, who: Who) -> None:
    serve(WITH_REF)
    engine, ref = Peer(who()), Peer(who("ref"))
    engine.open()
    slots = engine.admit(2)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(ref.take, 3)
        groups = [engine.group(slot.uid) for slot in slots]
        assert all(stored.is_kept for stored in engine.put(*groups))
        taken = waiting.result(30)
    assert [(g.uid, g.samples) for g in taken] == [(slots[0].uid, [0, 1]), (slots[1].uid, [0])]
    assert taken[0].rows == groups[0].rows and ref.blocks == [group.block for group in groups]
    assert [g.blocks for g in taken] == [[0], [1]]
    assert taken[1].rows == wire.Rows([2], [5], ["stop"])
    assert [(g.uid, g.samples) for g in ref.take(9)] == [(slots[1].uid, [1])]


def test_every_rank_that_waits_gets_its_share_of_a_chunk(serve: Serve, who: Who) -> None:
    serve()
    engine, ranks = Peer(who()), [Peer(who("train", rank=rank)) for rank in range(2)]
    engine.open()
    ranks[0].begin(0)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = [pool.submit(ranks[r].chunk, 0, 0, r, 2) for r in range(2)]
        slots = engine.admit(2)
        engine.put(engine.group(slots[0].uid))
        engine.put(engine.group(slots[1].uid))
        shares = [future.result(30) for future in waiting]
    assert sorted(g.uid for share in shares for g in share) == sorted(s.uid for s in slots)
    assert ranks[0].chunk(0, 0, 0, 2) == shares[0], "asked again: the same"


@pytest.mark.parametrize("fast_s", [0.0, 60.0])
def test_who_waits_for_a_put_is_answered_before_its_producer(
    serve: Serve, who: Who, monkeypatch: pytest.MonkeyPatch, fast_s: float
) -> None:
    """Whether the journal is written in the loop or in its thread."""
    monkeypatch.setattr(group_commit, "_FAST_S", fast_s)
    waits, bodies = threading.Event(), []
    enter, answer = waiting_room.WaitingRoom.enter, NearPeer.answer

    def note_waiter(room: waiting_room.WaitingRoom, signal: str, *rest: Any) -> None:
        enter(room, signal, *rest)
        if signal == CHUNKS:
            waits.set()

    def note_answer(peer: NearPeer, head: bytes, body: bytes) -> None:
        bodies.append((head[NUMBER_BYTES:], body))
        answer(peer, head, body)

    monkeypatch.setattr(waiting_room.WaitingRoom, "enter", note_waiter)
    monkeypatch.setattr(NearPeer, "answer", note_answer)
    serve()
    engine, train = Peer(who()), Peer(who("train"))
    engine.open()
    train.begin(0)
    slots = engine.admit(2)
    for _ in range(group_commit._FAST_WRITES + 1):
        engine.call("finish_eval", wire.Version(0), Empty)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(train.chunk, 0, 0)
        assert waits.wait(30)
        engine.put(*(engine.group(slot.uid) for slot in slots))
        share = waiting.result(30)
    stored = wire.StoredGroups([wire.Stored(True, True)] * 2)
    taken = msgspec.msgpack.encode(wire.TakenChunk(share, train.blocks))
    assert bodies[-3:] == [
        (EARLY, taken),
        (SAME, digest_of(taken)),
        (OK, msgspec.msgpack.encode(stored)),
    ]


def test_a_completed_step_wakes_engines_and_tells_producers_what_is_free(
    serve: Serve, who: Who
) -> None:
    serve()
    engine, other, train = Peer(who()), Peer(who(index=1)), Peer(who("train"))
    engine.open()
    train.begin(0)
    groups = [engine.group(slot.uid) for slot in engine.admit(8)]
    engine.put(*groups)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        admitted = pool.submit(other.admit, 8, 1)
        freed = pool.submit(engine.free, [], 20.0)
        summary = train.train(0)
        assert len(admitted.result(30)) == 4
        trained = [group for group in groups if group.uid in summary.uids]
        assert set(freed.result(30)) == _keys_of(trained)
    assert summary.uids == [group.uid for group in groups[:4]], "first come, first served"
    assert set(engine.free([], 0.0)) == _keys_of(trained), "told again until acknowledged"
    assert engine.free(freed.result(), 0.0) == []


def test_a_block_of_several_groups_is_free_with_the_last_of_them(serve: Serve, who: Who) -> None:
    serve()
    engine, train = Peer(who()), Peer(who("train"))
    engine.open()
    train.begin(0)
    shared = engine.block()
    slots = engine.admit(5)
    engine.put(*(engine.group(slot.uid, shared) for slot in slots))
    assert [g.blocks for g in train.chunk(0, 0)] == [[0], [0]] and train.blocks == [shared]
    train.train(0)
    assert engine.free([], 0.0) == [], "the fifth group still needs it"
    train.call("reject_group", wire.EndGroup(slots[4].uid, "test"), Empty)
    assert engine.free([], 0.0) == [(shared.extent, shared.offset, shared.epoch)]


def test_a_batch_with_one_bad_group_changes_nothing(serve: Serve, who: Who) -> None:
    serve()
    engine = Peer(who())
    engine.open()
    first, second = engine.admit(2)
    bad = msgspec.structs.replace(engine.group(second.uid), rows=wire.Rows([1], [2], ["stop"]))
    with pytest.raises(TransferError, match=r"has 1 samples .* rollout.group_size is 2"):
        engine.put(engine.group(first.uid), bad)
    status = engine.call("status", Empty(), wire.QueueStatus)
    assert (status.generating, status.ready) == (2, 0)
    again = engine.group(first.uid)
    assert engine.put(again, again) == [wire.Stored(True, True)] * 2, "twice is once"
    assert engine.call("status", Empty(), wire.QueueStatus).ready == 1


def test_extents_of_dead_producers_go_when_nobody_needs_them(serve: Serve, who: Who) -> None:
    serve()
    engine, agent, train = Peer(who()), Peer(who("dcs")), Peer(who("train"))
    engine.open()
    train.begin(0)
    groups = [engine.group(slot.uid) for slot in engine.admit(4)]
    engine.put(*groups)
    names = [f"{ARENA}.0", f"{ARENA}.1"]
    request = wire.FindOrphans("n1", names)
    assert agent.call("find_orphans", request, wire.Orphans).names == names[1:]
    train.train(0)
    assert len(engine.free([], 0.0)) == 4
    assert agent.call("find_orphans", request, wire.Orphans).names == names
    assert engine.free([], 0.0) == [], "nobody is left to free single blocks"


def test_a_restarted_controller_knows_groups_blocks_and_leases(serve: Serve, who: Who) -> None:
    first = serve(WITH_REF)
    engine, ref, train = Peer(who()), Peer(who("ref")), Peer(who("train"))
    engine.open()
    train.begin(0)
    groups = [engine.group(slot.uid) for slot in engine.admit(4)]
    engine.put(*groups)
    taken = ref.take(4)
    engine.call("drop_group", wire.EndGroup("9.9.9", "unknown: harmless"), Empty)
    before = engine.call("status", Empty(), wire.QueueStatus)
    first.stop()
    serve(WITH_REF, incarnation=2)
    after = engine.call("status", Empty(), wire.QueueStatus)
    assert _without_ages(after) == _without_ages(before)
    others = ref.take(9)
    uids = [g.uid for g in taken + others]
    assert sorted(uids) == sorted(g.uid for g in groups), "each row once"
    assert engine.put(*groups) == [wire.Stored(True, True)] * 4, "sent again: known"


def _without_ages(status: wire.QueueStatus) -> object:
    tree = msgspec.to_builtins(status)
    for task in tree["tasks"].values():
        del task["oldest_s"]
    return tree


def test_the_journal_starts_anew_under_load(
    serve: Serve, who: Who, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "_ROTATE_EVENTS", 5)
    monkeypatch.setattr(group_commit, "_FAST_S", 0.0)  # all writes in the thread
    first = serve()
    engine, train = Peer(who()), Peer(who("train"))
    engine.open()
    train.begin(0)

    def generate() -> None:
        for version in range(6):
            for slot in engine.admit(4, version):
                group = msgspec.structs.replace(engine.group(slot.uid), oldest_version=version)
                engine.put(group)

    thread = threading.Thread(target=generate)
    thread.start()
    summaries = [train.train(step) for step in range(5)]
    thread.join(60)
    assert not thread.is_alive()
    before = engine.call("status", Empty(), wire.QueueStatus)
    first.stop()
    serve(incarnation=2)
    after = engine.call("status", Empty(), wire.QueueStatus)
    assert _without_ages(after) == _without_ages(before)
    assert after.trained_groups == sum(summary.num_groups for summary in summaries) == 20


def test_a_checkpoint_brings_the_ledger_back_when_the_journal_is_gone(
    serve: Serve, who: Who
) -> None:
    first = serve()
    engine, train = Peer(who()), Peer(who("train"))
    engine.open()
    train.begin(0)
    engine.put(*(engine.group(slot.uid) for slot in engine.admit(6)))
    trained = train.train(0).uids
    cut = train.call("cut_ledger", wire.CutLedger(1), wire.LedgerCut)
    first.stop()
    for path in who().run.journal.iterdir():
        path.unlink()
    serve(incarnation=2, attempt=2)
    engine, train = Peer(who(attempt=2)), Peer(who("train", attempt=2))
    train.begin(1, cut)
    engine.open()
    prompts = {uid.rpartition(".")[0] for uid in trained}
    slots = engine.admit(8, 1)
    assert len(slots) == 8
    assert not prompts & {slot.uid.rpartition(".")[0] for slot in slots}, "trained once"
    assert len({slot.uid.rpartition(".")[0] for slot in slots}) == 8
    assert engine.call("status", Empty(), wire.QueueStatus).trained_groups == 4


def test_waiters_for_what_never_comes_do_not_hold_up_others(serve: Serve, who: Who) -> None:
    serve(dataclasses.replace(WITH_REF, groups_per_step=10))
    engine = Peer(who())
    engine.open()
    waiting = [
        threading.Thread(target=Peer(who("ref", rank=i)).take, args=(1, 60.0)) for i in range(20)
    ]
    for thread in waiting:
        thread.start()
    for slot in engine.admit(8):
        engine.call("return_group", wire.EndGroup(slot.uid, "test"), Empty)
    assert all(thread.is_alive() for thread in waiting), "all of them still wait"
    engine.put(*(engine.group(slot.uid) for slot in engine.admit(10)))  # a row for each
    for thread in waiting:
        thread.join(30)
        assert not thread.is_alive()
