"""Client and controller over real sockets and shared memory."""

import concurrent.futures
import dataclasses
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from relax_hpc.control import group_commit
from relax_hpc.control.identity import Identity
from relax_hpc.control.journal import GenerationalJournal
from relax_hpc.control.rpc import RpcServer, create_keys
from relax_hpc.errors import ControlError, DeadlineError, StaleIncarnationError, TransferError
from relax_hpc.runfolder import RunFolder, create_run_folder
from relax_hpc.transfer.agent import NodeAgent
from relax_hpc.transfer.controller import QueueController
from relax_hpc.transfer.transfer_queue import TransferQueue

from .conftest import RULES, SMALL
from .queue_process import make_group, make_sample

Who = Callable[..., Identity]
Serve = Callable[..., RpcServer]
Connect = Callable[..., TransferQueue]
StartAgent = Callable[..., NodeAgent]


def _fill(queue: TransferQueue, version: int, num_groups: int) -> list[str]:
    slots = queue.admit(version, num_groups, 0.0).slots
    for slot in slots:
        assert queue.put_group(slot, make_group(slot, version))
    return [slot.uid for slot in slots]


def _num_blocks(queue: TransferQueue) -> int:
    stats = queue.arena_stats()
    return 0 if stats is None else stats.num_blocks


def _train_step(train: TransferQueue, step: int, dp_size: int = 1) -> list[str]:
    uids = []
    for index in range(RULES.chunks_per_step):
        for dp_rank in range(dp_size):
            chunk = train.take_chunk(step, index, dp_rank, dp_size, 20.0)
            uids += list(dict.fromkeys(row.uid for row in chunk.rows))
    train.complete_step(step)
    return uids


def test_a_run_from_prompts_to_steps(
    who: Who, serve: Serve, folder: RunFolder, connect: Connect
) -> None:
    serve()
    rollout, train = connect(who()), connect(who("train"))
    rollout.open_dataset(100, "data")
    train.begin_train(0)
    seen = []
    for step in range(RULES.train_steps):
        _fill(rollout, step, 8)
        seen += _train_step(train, step)
    assert len(seen) == len(set(seen)) == 20
    admission = rollout.admit(RULES.train_steps, 8, 5.0)
    assert admission.done and not admission.slots
    status = rollout.status()
    assert (status.version, status.trained_groups, status.in_flight, status.done) == (
        5,
        20,
        0,
        True,
    )


def test_rows_come_back_bit_equal_in_whole_groups(who: Who, serve: Serve, connect: Connect) -> None:
    serve()
    rollout, train = connect(who()), connect(who("train"))
    rollout.open_dataset(100, "data")
    train.begin_train(0)
    slots = rollout.admit(0, 8, 5.0).slots
    put = {slot.uid: make_group(slot) for slot in slots}
    for slot in slots:
        rollout.put_group(slot, put[slot.uid])
    chunk = train.take_chunk(0, 0, 0, 1, 20.0)
    assert [row.sample_index for row in chunk.rows] == [0, 1, 0, 1]
    for row in chunk.rows:
        sample = put[row.uid][row.sample_index]
        assert row.group_size == 2 and row.finish_reason == sample.finish_reason
        assert row.num_prompt_tokens == 2 and row.num_tokens == 2 + 1 + row.sample_index
        assert set(row.fields) == set(sample.fields)
        for name, array in sample.fields.items():
            np.testing.assert_array_equal(row.fields[name], array)
            assert row.fields[name].dtype == array.dtype
            assert row.fields[name].shape == array.shape
            assert not row.fields[name].flags.writeable


def test_take_chunk_is_the_same_for_all_ranks_and_again(
    who: Who, serve: Serve, connect: Connect
) -> None:
    rules = dataclasses.replace(RULES, chunks_per_step=1)
    serve(rules)
    rollout = connect(who())
    rollout.open_dataset(100, "data")
    _fill(rollout, 0, 8)
    ranks = [connect(who("train", rank=rank)) for rank in range(4)]
    ranks[0].begin_train(0)
    shares: dict[int, list[list[tuple[str, int]]]] = {0: [], 1: []}
    for rank, queue in enumerate(ranks * 2):
        chunk = queue.take_chunk(0, 0, rank % 2, 2, 20.0)
        shares[rank % 2].append([(row.uid, row.sample_index) for row in chunk.rows])
    for dp_rank in (0, 1):
        assert all(share == shares[dp_rank][0] for share in shares[dp_rank])
        assert shares[dp_rank][0]
    uids = {uid for share in shares.values() for uid, _ in share[0]}
    assert len(uids) == 4
    assert not {u for u, _ in shares[0][0]} & {u for u, _ in shares[1][0]}


def test_put_is_idempotent_and_refused_when_unwanted(
    who: Who, serve: Serve, connect: Connect
) -> None:
    serve()
    rollout = connect(who())
    rollout.open_dataset(100, "data")
    first, second = rollout.admit(0, 2, 5.0).slots
    assert rollout.put_group(first, make_group(first))
    assert rollout.put_group(first, make_group(first))
    assert _num_blocks(rollout) == 1, "the second copy is freed"
    rollout.return_group(second, "aborted")
    assert not rollout.put_group(second, make_group(second))
    assert _num_blocks(rollout) == 1
    again = rollout.admit(0, 1, 5.0).slots[0]
    assert again.prompt_index == second.prompt_index and again.uid != second.uid
    with pytest.raises(TransferError, match="was put already"):
        rollout.drop_group(first, "late")
    assert rollout.status().redispatched == {"aborted": 1}


def test_capacity_blocks_and_a_dropped_group_frees_it(
    who: Who, serve: Serve, connect: Connect
) -> None:
    serve()
    rollout = connect(who())
    rollout.open_dataset(100, "data")
    slots = rollout.admit(0, 100, 5.0).slots
    assert len(slots) == 8
    assert rollout.admit(0, 1, 0.0).slots == []
    got: list[str] = []
    waiter = threading.Thread(
        target=lambda: got.extend(s.uid for s in connect(who(index=1)).admit(0, 9, 60).slots)
    )
    waiter.start()
    rollout.drop_group(slots[0], "uninformative")
    waiter.join()
    assert len(got) == 1 and got[0] != slots[0].uid
    assert rollout.status().dropped == {"uninformative": 1}


def test_ref_and_logprob_complete_groups(who: Who, serve: Serve, connect: Connect) -> None:
    tasks = {"ref": "ref_logprobs", "logprob": "train_logprobs"}
    serve(dataclasses.replace(RULES, task_fields=tasks))
    rollout, train = connect(who()), connect(who("train"))
    rollout.open_dataset(100, "data")
    train.begin_train(0)
    _fill(rollout, 0, 4)
    with pytest.raises(DeadlineError, match=r"chunk 0 of step 0.*waiting=4"):
        train.take_chunk(0, 0, 0, 1, 0.1)
    for task, name in tasks.items():
        queue = connect(who(task))
        taken = []
        while rows := queue.take_rows(task, 3, 0.2 if taken else 20.0):
            arrays = [np.full(row.num_tokens - 2, -float(len(task)), np.float32) for row in rows]
            assert queue.put_fields(rows, name, arrays)
            taken += [(row.uid, row.sample_index) for row in rows]
        assert len(taken) == len(set(taken)) == 8
    for index in (0, 1):
        for row in train.take_chunk(0, index, 0, 1, 20.0).rows:
            assert row.fields["ref_logprobs"][0] == -3.0
            assert row.fields["train_logprobs"][0] == -7.0
    with pytest.raises(TransferError, match="task 'critic' is not part"):
        connect(who("critic")).take_rows("critic", 1, 0.0)


def test_leases_return_when_the_role_restarts(who: Who, serve: Serve, connect: Connect) -> None:
    serve(dataclasses.replace(RULES, task_fields={"ref": "ref_logprobs"}))
    rollout, ref = connect(who()), connect(who("ref"))
    rollout.open_dataset(100, "data")
    _fill(rollout, 0, 2)
    first = ref.take_rows("ref", 4, 20.0)
    assert len(first) == 4
    assert ref.take_rows("ref", 4, 0.0) == []
    again = connect(who("ref", incarnation=2))
    rows = again.take_rows("ref", 4, 20.0)
    assert {(r.uid, r.sample_index) for r in rows} == {(r.uid, r.sample_index) for r in first}
    with pytest.raises(StaleIncarnationError):
        ref.put_fields(first, "ref_logprobs", [np.zeros(r.num_tokens - 2, "f4") for r in first])


def test_remote_nodes_get_the_same_rows(who: Who, serve: Serve, connect: Connect) -> None:
    serve()
    rollout = connect(who())
    rollout.open_dataset(100, "data")
    _fill(rollout, 0, 4)
    near, far = connect(who("train")), connect(who("train", rank=1, node="n2"))
    near.begin_train(0)
    for index in (0, 1):
        ours = near.take_chunk(0, index, 0, 1, 20.0).rows
        theirs = far.take_chunk(0, index, 0, 1, 20.0).rows
        assert [(r.uid, r.sample_index) for r in ours] == [(r.uid, r.sample_index) for r in theirs]
        for left, right in zip(ours, theirs, strict=True):
            assert set(left.fields) == set(right.fields)
            for name, array in left.fields.items():
                other = right.fields[name]
                assert (array.dtype, array.shape) == (other.dtype, other.shape)
                assert array.tobytes() == other.tobytes() and not other.flags.writeable


def test_corrupt_payload_is_replaced_not_delivered(
    who: Who, serve: Serve, connect: Connect
) -> None:
    serve()
    rollout = connect(who())
    train = connect(who("train"), config=dataclasses.replace(SMALL, verify_shm=True))
    rollout.open_dataset(100, "data")
    train.begin_train(0)
    slots = rollout.admit(0, 4, 5.0).slots
    for slot in slots:
        rollout.put_group(slot, make_group(slot))
    bad = slots[0]
    (path,) = (who().run.shm("n1") / "arenas").iterdir()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        data[data.find(make_group(bad)[1].fields["tokens"].tobytes())] ^= 1
    uids = [row.uid for row in train.take_chunk(0, 0, 0, 1, 5.0).rows]
    assert bad.uid not in uids and len(set(uids)) == 2, "another group takes its place"
    assert train.status().redispatched == {"unreadable": 1}
    assert len({row.uid for row in train.take_chunk(0, 0, 0, 1, 5.0).rows}) == 2
    extra = _fill(rollout, 0, 2)
    assert bad.prompt_index in {int(uid.split(".")[1]) for uid in extra}
    uids += [row.uid for row in train.take_chunk(0, 1, 0, 1, 5.0).rows]
    assert train.complete_step(0).num_groups == 4


@pytest.mark.parametrize(
    ("field", "array", "message"),
    [
        ("tokens", None, "field tokens is missing"),
        ("tokens", np.zeros(5, np.int64), "tokens is int64, must be int32"),
        ("tokens", np.zeros(1, np.int32), r"tokens has shape \(1,\)"),
        ("rollout_logprobs", np.zeros(2, np.float32), r"has shape \(2,\), must be \(3,\)"),
        ("rollout_logprobs", np.full(3, np.nan, np.float32), "rollout_logprobs is not finite"),
        ("reward", np.zeros(1, np.float32), r"reward has shape \(1,\), must be \(\)"),
        ("accuracy", np.asarray(np.inf, np.float32), "accuracy is not finite"),
        ("extra", np.array(["a"], object), "put numeric arrays"),
    ],
)
def test_malformed_samples_are_refused(
    who: Who, serve: Serve, field: str, array: np.ndarray | None, message: str, connect: Connect
) -> None:
    serve()
    rollout = connect(who())
    rollout.open_dataset(100, "data")
    slot = rollout.admit(0, 1, 5.0).slots[0]
    sample = make_sample()
    if array is None:
        del sample.fields[field]
    else:
        sample.fields[field] = array
    with pytest.raises(TransferError, match=message):
        rollout.put_group(slot, [sample, make_sample()])
    assert _num_blocks(rollout) == 0
    with pytest.raises(TransferError, match=r"has 1 samples.*group_size is 2"):
        rollout.put_group(slot, [make_sample()])
    assert rollout.put_group(slot, make_group(slot))


def test_wrong_order_is_refused_with_the_reason(who: Who, serve: Serve, connect: Connect) -> None:
    serve()
    rollout, train = connect(who()), connect(who("train"))
    with pytest.raises(TransferError, match="admit before open_dataset"):
        rollout.admit(0, 1, 0.0)
    rollout.open_dataset(100, "data")
    rollout.open_dataset(100, "data")
    with pytest.raises(TransferError, match=r"began with a data set of 100.*init_from"):
        rollout.open_dataset(101, "other")
    with pytest.raises(TransferError, match="before begin_train"):
        train.complete_step(0)
    train.begin_train(0)
    _fill(rollout, 0, 8)
    with pytest.raises(TransferError, match="0 of 2 chunks taken"):
        train.complete_step(0)
    with pytest.raises(TransferError, match="chunks_per_step is 2"):
        train.take_chunk(0, 2, 0, 1, 0.0)
    train.take_chunk(0, 0, 0, 1, 5.0)
    with pytest.raises(TransferError, match="all with one dp size"):
        train.take_chunk(0, 1, 0, 2, 0.0)
    train.take_chunk(0, 1, 0, 1, 5.0)
    summary = train.complete_step(0)
    assert train.complete_step(0) == summary, "a repeated message is harmless"
    assert (summary.num_groups, summary.num_samples, summary.num_tokens) == (4, 8, 28)
    with pytest.raises(TransferError, match="that step is complete"):
        train.take_chunk(0, 0, 0, 1, 0.0)


def test_ranks_that_are_ahead_wait(who: Who, serve: Serve, connect: Connect) -> None:
    """dp rank 1 may ask for step 1 before rank 0 told the end of step 0, or began at all."""
    serve()
    rollout, train = connect(who()), connect(who("train"))
    rollout.open_dataset(100, "data")
    _fill(rollout, 0, 8)
    got: list[int] = []
    early = connect(who("train", rank=1))

    def ask(step: int) -> threading.Thread:
        thread = threading.Thread(
            target=lambda: got.append(early.take_chunk(step, 0, 0, 1, 60.0).step)
        )
        thread.start()
        return thread

    before_begin = ask(0)
    train.begin_train(0)
    before_begin.join()
    before_end = ask(1)
    _train_step(train, 0)
    before_end.join()
    assert got == [0, 1]


def test_evaluations_are_claimed_once(who: Who, serve: Serve, connect: Connect) -> None:
    serve(dataclasses.replace(RULES, eval_interval=2))
    engines = [connect(who(index=i)) for i in (0, 1)]
    train = connect(who("train"))
    engines[0].open_dataset(100, "data")
    train.begin_train(0)
    assert engines[0].evals_pending() == [0]
    assert [q.claim_eval(0) for q in (*engines, engines[0])] == [True, False, True]
    assert not engines[1].claim_eval(2), "not due yet"
    again = connect(who(index=0, incarnation=2))
    assert again.evals_pending() == [0]
    assert engines[1].claim_eval(0), "the claim of a dead engine is free"
    engines[1].finish_eval(0)
    assert engines[1].evals_pending() == []
    assert not again.claim_eval(0)
    for step in range(RULES.train_steps):
        _fill(again, step, 8)
        _train_step(train, step)
    assert again.evals_pending() == [2, 4, 5]


def test_two_runs_on_one_host_do_not_meet(
    who: Who, serve: Serve, connect: Connect, tmp_path: Path, start_agent: StartAgent
) -> None:
    serve()
    other_folder = create_run_folder(tmp_path / "elsewhere", "run")
    create_keys(other_folder)
    other = dataclasses.replace(who(), run=other_folder)
    other_dcs = dataclasses.replace(other, role="dcs")
    server = RpcServer(other_folder, "transfer", other_dcs)
    QueueController(server, other_dcs, RULES)
    server.start_thread()
    other_agent = start_agent(other_dcs)
    ours, theirs = connect(who()), connect(other)
    ours.open_dataset(100, "a")
    theirs.open_dataset(50, "b")
    _fill(ours, 0, 3)
    _fill(theirs, 0, 2)
    assert (ours.status().ready, theirs.status().ready) == (3, 2)
    assert who().run.shm("n1") != other_folder.shm("n1")
    theirs.close()
    other_agent.close(remove=True)
    assert not other_folder.shm("n1").exists()
    assert list((who().run.shm("n1") / "arenas").iterdir())
    server.stop()


def test_a_known_death_is_told_over_the_wire(who: Who, serve: Serve, connect: Connect) -> None:
    serve()
    rollout = connect(who())
    rollout.open_dataset(100, "data")
    slots = rollout.admit(0, 3, 0.0).slots
    supervisor = connect(who("supervisor"))
    supervisor.release_producer("rollout", 0, 1)
    supervisor.release_producer("rollout", 0, 1)
    status = supervisor.status()
    assert (status.generating, status.to_dispatch) == (0, 3)
    assert status.redispatched == {"producer_lost": 3}
    assert not rollout.put_group(slots[0], make_group(slots[0]))


def test_a_journal_that_cannot_be_written_ends_the_service(
    who: Who, folder: RunFolder, serve: Serve, connect: Connect
) -> None:
    """What was not journalled is not acknowledged; the next start has the state before it."""
    identity = who("dcs")
    server = RpcServer(folder, "transfer", identity)
    controller = QueueController(server, identity, RULES)
    server.start_thread()
    rollout = connect(who(), grace_s=60)
    rollout.open_dataset(100, "data")
    journal = controller._journal._journal
    assert journal is not None
    journal._file = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(ControlError, match=r"cannot write journal.*No space left"):
        rollout.admit(0, 3, 0.0)
    assert server._thread is not None
    server._thread.join(30)
    assert not server.is_running and isinstance(server._failure, ControlError)
    serve(incarnation=2)
    assert rollout.status().in_flight == 0
    assert len(rollout.admit(0, 3, 0.0).slots) == 3


class _HeldJournal:
    """Writes of a journal wait until they are let go, or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write, self.fails = threading.Event(), False
        self.may_write.set()
        self.begun = threading.Event()
        append = GenerationalJournal.append_lines

        def hold(journal: GenerationalJournal, lines: Iterable[bytes]) -> None:
            self.begun.set()
            assert self.may_write.wait(60)
            if self.fails:
                raise ControlError("cannot write journal: No space left on device")
            append(journal, lines)

        monkeypatch.setattr(GenerationalJournal, "append_lines", hold)
        monkeypatch.setattr(group_commit, "_FAST_S", 0.0)  # in its thread: the loop goes on


def _note_opened(queue: TransferQueue, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    opened, open_groups = threading.Event(), queue._open_groups

    def note(*args: object) -> object:
        result = open_groups(*args)  # type: ignore[arg-type]
        opened.set()
        return result

    monkeypatch.setattr(queue, "_open_groups", note)
    return opened


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_chunk_is_prepared_early_and_given_out_when_it_is_on_disk(
    who: Who, serve: Serve, connect: Connect, start_agent: StartAgent,
    monkeypatch: pytest.MonkeyPatch, node: str,
) -> None:  # fmt: skip
    """By the UNIX socket of the node, and by TCP."""
    serve()
    journal = _HeldJournal(monkeypatch)
    rollout, train = connect(who()), connect(who("train", node=node))
    rollout.open_dataset(100, "data")
    train.begin_train(0)
    _fill(rollout, 0, 2)
    opened = _note_opened(train, monkeypatch)
    journal.may_write.clear()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        chunk = pool.submit(train.take_chunk, 0, 0, 0, 1, 30.0)
        assert opened.wait(30), "the rows are mapped while the journal is written"
        assert not chunk.done()
        journal.may_write.set()
        assert len(chunk.result(30).rows) == 4


def test_a_chunk_that_does_not_get_on_disk_is_not_given_out(
    who: Who, serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start decides anew, and that is what counts."""
    first = serve()
    journal = _HeldJournal(monkeypatch)
    rollout, train = connect(who()), connect(who("train"))
    rollout.open_dataset(100, "data")
    train.begin_train(0)
    uids = _fill(rollout, 0, 2)
    opened = _note_opened(train, monkeypatch)
    journal.may_write.clear()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        chunk = pool.submit(train.take_chunk, 0, 0, 0, 1, 30.0)
        assert opened.wait(30)
        journal.fails = True
        journal.may_write.set()
        with pytest.raises(ControlError, match="cannot write journal"):
            chunk.result(30)
    assert first._thread is not None
    first._thread.join(30)
    journal.fails = False
    serve(incarnation=2)
    assert train.status().assigned == 0
    assert _train_chunk(train) == uids


def _train_chunk(train: TransferQueue) -> list[str]:
    return list(dict.fromkeys(row.uid for row in train.take_chunk(0, 0, 0, 1, 30.0).rows))
