"""Packing, staging and the refusals of a reshard; both ends are threads joined by gloo.

Whole exchanges between processes, and their deaths: tests/distributed/test_reshard.py.
"""

import contextlib
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.dcs.architectures import read_model
from relax_hpc.dcs.engine_layout import EngineParallel, engine_layout
from relax_hpc.dcs.layout import Box, TensorSpec
from relax_hpc.dcs.packing import Bundle, Part, incoming, outgoing, plan_digest
from relax_hpc.dcs.plan import Placement, plan
from relax_hpc.dcs.rank_layout import layout_of_boxes
from relax_hpc.dcs.reshard import ShardReceiver, ShardSender
from relax_hpc.dcs.staging import Staging, checksum, weighted_sums
from relax_hpc.dcs.trainer_layout import TrainerParallel, trainer_layout
from relax_hpc.dcs.weight_group import WeightGroup
from relax_hpc.errors import WeightSyncError
from tests.unit.dcs.weight_shapes import CONFIGS

CPU = torch.device("cpu")
SPECS = [
    TensorSpec("w", "bfloat16", (8, 4)),
    TensorSpec("scale", "float32", ()),
    TensorSpec("v", "float32", (6,)),
]


def two_to_one(order=(0, 1)):
    """Trainer ranks with a half of w each, one engine with all."""
    halves = [Box("w", (0, 0), (4, 4)), Box("w", (4, 0), (8, 4))]
    rest = [spec.whole() for spec in SPECS[1:]]
    trainer = layout_of_boxes(SPECS, {0: [halves[order[0]], *rest], 1: [halves[order[1]], *rest]})
    engine = layout_of_boxes(SPECS, {0: [spec.whole() for spec in SPECS]})
    return plan(trainer, engine, Placement.blocks(2, 1)), trainer


def held_by(trainer, rank, value=0.0):
    dtypes = {spec.name: getattr(torch, spec.dtype) for spec in SPECS}
    boxes = trainer.boxes_of(rank)
    return [(box, torch.full(box.shape, value, dtype=dtypes[box.name])) for box in boxes]


# ---------------------------------------------------------------------------------------------
# Packing
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_both_ends_pack_the_same_bytes(name):
    model = read_model(CONFIGS[name])
    trainer = trainer_layout(model, TrainerParallel(tp=2, pp=2, dp=2))
    engine = engine_layout(model, EngineParallel(tp=2, num_engines=3))
    made = plan(trainer, engine, Placement.blocks(8, 6))
    sent = {
        (rank, peer): (bundle.parts, bundle.nbytes)
        for rank in range(8)
        for bundle in outgoing(made, rank)
        for peer in bundle.peers
    }
    received = {
        (bundle.peers[0], rank): (bundle.parts, bundle.nbytes)
        for rank in range(6)
        for bundle in incoming(made, rank)
    }
    assert sent == received
    assert sum(nbytes for _, nbytes in sent.values()) == made.minimum_bytes
    for parts, nbytes in sent.values():
        ends = [part.offset + part.nbytes for part in parts]
        assert [part.offset for part in parts] == [0, *ends[:-1]] and ends[-1] == nbytes


def test_receivers_of_the_same_boxes_share_a_bundle():
    layout = layout_of_boxes(SPECS, {0: [spec.whole() for spec in SPECS]})
    engines = layout_of_boxes(SPECS, {rank: [s.whole() for s in SPECS] for rank in range(3)})
    (bundle,) = outgoing(plan(layout, engines, Placement.blocks(1, 3)), 0)
    assert bundle.peers == (0, 1, 2) and bundle.nbytes == 64 + 4 + 24
    assert [part.dtype for part in bundle.parts] == ["float32", "float32", "bfloat16"]


def test_the_digest_tells_plans_apart():
    digests = {plan_digest(two_to_one()[0]), plan_digest(two_to_one((1, 0))[0])}
    assert len(digests) == 2 and plan_digest(two_to_one()[0]) in digests


# ---------------------------------------------------------------------------------------------
# Staging
# ---------------------------------------------------------------------------------------------


def staging_of(box):
    nbytes = 4 * box.size
    bundle = Bundle((Part(box, "int32", 0, nbytes),), nbytes, (0,))
    return Staging([bundle], CPU, is_pinned=False)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_rows_and_columns_of_a_view_with_spread_rows(data):
    """Rows spread over up to three axes of a larger parameter; both directions."""
    axes = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    columns = tuple(data.draw(st.lists(st.integers(1, 4), max_size=2)))
    larger = tuple(size + 1 for size in axes + columns)
    parameter = torch.arange(int(np.prod(larger)), dtype=torch.int32).reshape(larger)
    view = parameter[tuple(slice(0, size) for size in axes + columns)]
    whole = (int(np.prod(axes)), *columns)
    first = tuple(data.draw(st.integers(0, 3)) for _ in whole)  # where the view's box lies
    own = Box("w", first, tuple(a + n for a, n in zip(first, whole, strict=True)))
    cuts = [sorted(data.draw(st.sets(st.integers(0, n), min_size=2, max_size=2))) for n in whole]
    start = tuple(a + lo for a, (lo, _) in zip(first, cuts, strict=True))
    box = Box("w", start, tuple(a + hi for a, (_, hi) in zip(first, cuts, strict=True)))
    staging = staging_of(box)
    binding = staging.binding([(own, view)], "rank")
    binding.fill()
    wanted = view.reshape(whole)[tuple(slice(lo, hi) for lo, hi in cuts)]
    packed = staging.data[0].view(torch.int32).view(box.shape)
    assert torch.equal(packed, wanted)

    packed += 1000
    before = parameter.clone()
    binding.empty()
    changed = (parameter != before).sum()
    assert changed == box.size and torch.equal(
        view.reshape(whole)[tuple(slice(lo, hi) for lo, hi in cuts)], packed
    )


def test_a_view_of_another_shape_and_a_missing_box_are_refused():
    box = Box("w", (0, 0), (4, 2))
    staging = staging_of(box)
    with pytest.raises(WeightSyncError, match=r"trainer rank 3 does not hold w\[0:4, 0:2\]"):
        staging.binding([(Box("w", (1, 0), (4, 2)), torch.zeros(3, 2))], "trainer rank 3")
    with pytest.raises(WeightSyncError, match=r"shape \[2, 4\].*must make 4 rows"):
        staging.binding([(box, torch.zeros(2, 4))], "trainer rank 3")


@pytest.mark.parametrize("function", [checksum, weighted_sums])
@pytest.mark.parametrize("size", [1, 8, 100, 8 * 1024 * 3 + 8 * 5 + 3])
def test_a_checksum_sees_every_bit_and_swap(function, size):
    generator = torch.Generator().manual_seed(size)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    seen = [function(data)]
    for place in {0, size // 2, size - 1}:
        data[place] ^= 128
        seen.append(function(data))
    for distance in (8, 8 * 1024):  # neighbours in a row, and in a column
        if size > distance + 8:
            swapped = data.clone()
            swapped[:8], swapped[distance : distance + 8] = data[distance : distance + 8], data[:8]
            seen.append(function(swapped))
    assert len(set(seen)) == len(seen) and all(-(2**63) <= value < 2**63 for value in seen)


def test_the_bits_of_a_nan_are_kept():
    box = Box("w", (0,), (2**16,))
    nans = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    bundle = Bundle((Part(box, "bfloat16", 0, 2**17),), 2**17, (0,))
    staging = Staging([bundle], CPU, is_pinned=False)
    staging.binding([(box, nans.view(torch.bfloat16))], "rank").fill()
    assert torch.equal(staging.data[0].view(torch.int16), nans)
    staging.binding([(box, nans.view(torch.bfloat16).to(torch.float32))], "rank").fill()
    numbers = nans.view(torch.bfloat16)
    converted = staging.data[0].view(torch.bfloat16)
    assert torch.equal(converted.nan_to_num(), numbers.nan_to_num())  # another dtype: as numbers


# ---------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def joined(monkeypatch):
    """Make the groups of all ranks; each connects in a thread."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with contextlib.ExitStack() as stack:

        def join(size, *, name="one", deadline_s=60.0):
            store = dist.HashStore()
            groups = each(
                size,
                lambda rank: WeightGroup(store, rank, size, name=name, deadline_s=deadline_s),
            )
            for group in groups:
                stack.callback(group.abort)
            return groups

        yield join


def each(size, act):
    """Call act(rank) in a thread each; raises what the lowest failing rank raised."""
    results, errors = [None] * size, {}

    def run(rank):
        try:
            results[rank] = act(rank)
        except WeightSyncError as err:
            errors[rank] = err

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[min(errors)]
    return results


def members_of(groups, plans, deadline_s=60.0):
    def make(rank):
        made, trainer = plans[rank]
        if rank == 2:
            return ShardReceiver(made, 0, groups[2], deadline_s=deadline_s)
        held = held_by(trainer, rank, rank + 1.0)
        return ShardSender(made, rank, groups[rank], held, deadline_s=deadline_s)

    return each(3, make)


def test_scalars_floats_and_several_dtypes_arrive(joined):
    *senders, receiver = members_of(joined(3), [two_to_one()] * 3)
    for sender in senders:
        sender.snapshot(7)
    got = {box.name: tensor for box, tensor in receiver.receive(7).items()}
    assert receiver.version == 7
    assert got["w"].tolist() == [[1.0] * 4] * 4 + [[2.0] * 4] * 4
    assert got["scale"].item() in (1.0, 2.0) and got["v"].shape == (6,)
    for sender in senders:
        sender.drain()
        sender.close()


def test_a_trainer_rank_that_nobody_needs_sends_nothing(joined):
    layout = layout_of_boxes(SPECS[2:], {rank: [SPECS[2].whole()] for rank in (0, 1)})
    engine = layout_of_boxes(SPECS[2:], {0: [SPECS[2].whole()]})
    made = plan(layout, engine, Placement.blocks(2, 1))
    *senders, receiver = members_of(joined(3), [(made, layout)] * 3)
    for sender in senders:
        sender.send(1) if sender.plan.sent_bytes[sender.rank] == 0 else sender.snapshot(1)
    receiver.receive(1)
    for sender in senders:
        sender.drain()
        sender.close()
    assert sorted(sender.sent_bytes for sender in senders) == [0, SPECS[2].nbytes]


def test_different_plans_are_an_error_that_names_both(joined):
    plans = [two_to_one(), two_to_one(), two_to_one((1, 0))]
    mine, other = (f"{plan_digest(made) >> 1:016x}" for made, _ in plans[1:])
    with pytest.raises(WeightSyncError, match=f"rank 0 has {mine}, rank 2 has {other}"):
        members_of(joined(3), plans)


def test_another_version_is_not_taken(joined):
    *senders, receiver = members_of(joined(3), [two_to_one()] * 3)
    for sender in senders:
        sender.snapshot(2)
    with pytest.raises(WeightSyncError, match="header has version 0x2 instead of 0x3"):
        receiver.receive(3)
    assert receiver.version is None and receiver.is_broken
    with pytest.raises(WeightSyncError, match="group one is broken"):
        receiver.receive(2)
    for sender in senders:  # they learn it from the closed connection
        with contextlib.suppress(WeightSyncError):
            sender.drain()
        sender.close()


def damaged(data):
    """The checksum of a receiver, which is the main thread here, of data with another first bit."""
    if threading.current_thread() is threading.main_thread():
        data[0] ^= 1
    return checksum(data)


def test_damaged_bytes_are_not_taken_and_a_new_group_is_whole(joined, monkeypatch):
    *senders, receiver = members_of(joined(3), [two_to_one()] * 3)
    for sender in senders:
        sender.snapshot(1)
    before = {box: tensor.clone() for box, tensor in receiver.receive(1).items()}
    for sender in senders:
        sender.drain()
        for _, view in sender._held:
            view += 5
        sender.snapshot(2)
    with monkeypatch.context() as patch:  # what the receiver (this thread) gets differs by a bit
        patch.setattr("relax_hpc.dcs.reshard.checksum", damaged)
        with pytest.raises(WeightSyncError, match=r"checksum .* was sent; nothing of it"):
            receiver.receive(2)
    assert receiver.version == 1
    assert all(torch.equal(receiver._tensors[box], tensor) for box, tensor in before.items())
    groups = joined(3, name="two")
    each(3, lambda rank: [*senders, receiver][rank].rebuild(groups[rank]))
    for sender in senders:
        sender.snapshot(3)
    (w,) = [tensor for box, tensor in receiver.receive(3).items() if box.name == "w"]
    assert w[:, 0].tolist() == [6.0] * 4 + [7.0] * 4 and receiver.version == 3
    for sender in senders:
        sender.close()


def test_no_free_buffer_is_an_error_with_the_version_that_keeps_it(joined):
    *senders, receiver = members_of(joined(3), [two_to_one()] * 3)
    sender = senders[0]
    sender.snapshot(1)
    until = time.monotonic() + 60
    while sender._flow.version != 1:  # on its way, with its own deadline of 60 s
        assert time.monotonic() < until
        time.sleep(0.001)
    sender.deadline_s = 0.2
    sender.snapshot(2)
    with pytest.raises(
        WeightSyncError, match=r"version 3: .* free buffer; weights version 1 \(0 of"
    ):
        sender.snapshot(3)
    assert receiver.version is None and not sender.is_broken
    for member in senders:
        member.close()


def test_an_engine_that_gets_nothing_is_refused(joined):
    layout = layout_of_boxes(SPECS, {0: [spec.whole() for spec in SPECS]})
    engine = layout_of_boxes(SPECS, {0: [spec.whole() for spec in SPECS], 1: []})
    made = plan(layout, engine, Placement.blocks(1, 2))
    groups = joined(3)
    with pytest.raises(WeightSyncError, match="gives engine rank 1 0 bytes"):
        ShardReceiver(made, 1, groups[2])
    with pytest.raises(WeightSyncError, match="rank 2 of 3; the plan has 3 ranks"):
        ShardReceiver(made, 0, groups[2])


def test_a_missing_rank_and_a_used_name_are_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()
    with pytest.raises(WeightSyncError, match=r"waited 0.2 s for settings of ranks 1, 2; are they"):
        WeightGroup(store, 0, 3, name="one", deadline_s=0.2)
    with pytest.raises(WeightSyncError, match=r"rank 0 joined it before; .* needs a new name"):
        WeightGroup(store, 0, 3, name="one", deadline_s=0.2)


def test_nothing_is_applied_before_it_is_verified(joined):
    *senders, receiver = members_of(joined(3), [two_to_one()] * 3)
    with pytest.raises(WeightSyncError, match="no verified version"):
        receiver.apply()
    for sender in senders:
        sender.snapshot(1)
    receiver.fetch(1)
    assert receiver.version is None
    receiver.apply()
    assert receiver.version == 1
    for sender in senders:
        sender.drain()
        sender.close()
