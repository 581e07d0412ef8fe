"""The prompt ledger: packing, data sets, cuts that go with checkpoints."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.errors import TransferError
from relax_hpc.transfer import queue_data as q
from relax_hpc.transfer import wire
from relax_hpc.transfer.ledger import Ledger, LedgerData, PackedTickets, Ticket, ticket_of
from relax_hpc.transfer.ledger_cut import cut_ledger
from relax_hpc.transfer.queue_rules import QueueRules

from .queue_simulation import CONFIG, Simulation


def test_another_data_set_stops_the_run_unless_that_is_allowed() -> None:
    run = Simulation(CONFIG, 1)
    run.admit(0)
    run.do(run.rules.return_group(wire.EndGroup(run.slots[0].pop().uid, "aborted")))
    held = run.slots[0].pop()
    with pytest.raises(TransferError, match=r"37 prompts.*now it has 11.*allow_changed"):
        run.rules.open_dataset(wire.OpenDataset(11, "y"))
    run.do(run.rules.open_dataset(wire.OpenDataset(11, "y", True)))
    run.do(run.rules.open_dataset(wire.OpenDataset(11, "y", True)))
    assert run.rules.state.ledger.epoch == 1 and run.data.ledger.position == 11
    run.do(run.rules.return_group(wire.EndGroup(held.uid, "aborted")))
    assert run.data.ledger.dropped == {"dataset_changed": 2}
    run.admit(1)
    assert run.slots[1] and all(s.epoch == 1 and s.prompt_index < 11 for s in run.slots[1])


def test_a_cut_of_another_data_set_is_refused_unless_that_is_allowed() -> None:
    run = Simulation(CONFIG, 2)
    while run.data.version < 2:
        run.turn()
    cut = cut_ledger(run.data, 2)
    for allowed in (False, True):
        fresh = QueueRules(CONFIG, CONFIG.new_state(q.QueueData()))
        for event in fresh.open_dataset(wire.OpenDataset(11, "y", allowed)):
            fresh.state.apply(event)
        request = wire.BeginTrain("k", 2, cut)
        if not allowed:
            with pytest.raises(TransferError, match=r"checkpoint of step 2 belongs to .* 37"):
                fresh.begin_train(run.train_caller(), request)
            continue
        for event in fresh.begin_train(run.train_caller(), request):
            fresh.state.apply(event)
        assert fresh.state.data.ledger.num_prompts == 11
        assert fresh.state.ledger.trained_groups == 8


@pytest.mark.parametrize("damage", ["flip", "step", "torn"])
def test_a_damaged_cut_is_refused(damage: str) -> None:
    run = Simulation(CONFIG, 2)
    while run.data.version < 2:
        run.turn()
    cut = cut_ledger(run.data, 2)
    broken = {
        "flip": msgspec.structs.replace(cut, data=bytes([cut.data[0] ^ 1]) + cut.data[1:]),
        "step": msgspec.structs.replace(cut_ledger(run.data, 1), step=2),
        "torn": msgspec.structs.replace(cut, data=cut.data[:-1]),
    }[damage]
    fresh = QueueRules(CONFIG, CONFIG.new_state(q.QueueData()))
    with pytest.raises(TransferError, match="ledger cut of step 2"):
        fresh.begin_train(run.train_caller(), wire.BeginTrain("k", 2, broken))
    with pytest.raises(TransferError, match=r"cut_ledger\(3\): the queue is at version 2"):
        cut_ledger(run.data, 3)


def test_a_cut_is_what_a_rollback_to_its_step_would_give() -> None:
    run = Simulation(CONFIG, 3)
    while run.data.version < 4:
        run.turn()
    cut = cut_ledger(run.data, 2)
    before = msgspec.json.encode(run.data)
    in_flight = {(g.ticket.epoch, g.ticket.prompt_index) for g in run.data.groups.values()}
    fresh = QueueRules(CONFIG, CONFIG.new_state(q.QueueData()))
    for event in fresh.begin_train(run.train_caller(), wire.BeginTrain("k", 2, cut)):
        fresh.state.apply(event)
    assert msgspec.json.encode(run.data) == before, "a cut changes nothing"
    run.begin(2)
    ours, theirs = fresh.state.data.ledger, run.data.ledger
    assert ours.trained == theirs.trained and ours.position == theirs.position
    prompts = [(t.epoch, t.prompt_index) for t in ours.again]
    left = {(g.ticket.epoch, g.ticket.prompt_index) for g in run.data.groups.values()}
    assert set(prompts) == {(t.epoch, t.prompt_index) for t in theirs.again} | left
    assert prompts[:8] == [(t.epoch, t.prompt_index) for t in theirs.again[:8]]
    assert set(prompts) >= in_flight


_NUMBERS = st.integers(0, 2**40)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.builds(Ticket, _NUMBERS, _NUMBERS, _NUMBERS), max_size=20))
def test_packed_tickets_are_the_tickets(tickets: list[Ticket]) -> None:
    packed = PackedTickets.pack(tickets)
    through_json = msgspec.json.decode(msgspec.json.encode(packed), type=PackedTickets)
    assert packed.unpack() == through_json.unpack() == tickets
    assert [ticket_of(t.uid) for t in tickets] == tickets


def test_a_million_trained_rows_take_a_few_bytes_each() -> None:
    groups = [Ticket(3, (7919 * i) % 1_000_000, 0) for i in range(1024)]
    assert len(msgspec.msgpack.encode(PackedTickets.pack(groups))) < 5 * len(groups)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 7), st.lists(st.integers(0, 9), max_size=8), st.booleans())
def test_every_epoch_has_every_prompt_once(
    num_prompts: int, sizes: list[int], is_shuffled: bool
) -> None:
    data = LedgerData()
    ledger = Ledger(data, seed=3, is_shuffled=is_shuffled)
    ledger.open(num_prompts, "x", False)
    taken: list[Ticket] = []
    for size in sizes:
        tickets, num_again = ledger.peek(size)
        assert len(tickets) == size and num_again == 0
        ledger.advance(size, 0)
        taken += tickets
    for number, ticket in enumerate(taken):
        assert ticket.epoch == number // num_prompts
    whole = taken[: len(taken) // num_prompts * num_prompts]
    for begin in range(0, len(whole), num_prompts):
        epoch = whole[begin : begin + num_prompts]
        assert sorted(t.prompt_index for t in epoch) == list(range(num_prompts))
