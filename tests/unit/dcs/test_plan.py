"""Weight plans: exact coverage, minimal bytes, the right bits, balance, distance, determinism."""

import heapq
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.dcs.architectures import read_model
from relax_hpc.dcs.engine_layout import EngineParallel, engine_layout
from relax_hpc.dcs.layout import Box, TensorSpec
from relax_hpc.dcs.plan import LINKS, Place, Placement, PlanCache, plan, plan_key
from relax_hpc.dcs.rank_layout import layout_of_boxes
from relax_hpc.dcs.sources import fill_up, match
from relax_hpc.dcs.trainer_layout import TrainerParallel, trainer_layout
from relax_hpc.errors import WeightSyncError
from tests.unit.dcs.weight_shapes import (
    CONFIGS,
    config_strategy,
    engine_strategy,
    random_tensors,
    trainer_strategy,
)

ROOT = Path(__file__).parents[3]


def contains(outer, inner):
    return outer.name == inner.name and all(
        a <= c and d <= b
        for a, b, c, d in zip(outer.start, outer.stop, inner.start, inner.stop, strict=True)
    )


def send(held, box):
    """Read a box from what a rank holds itself: {box: array}; its offset is inside of one box."""
    (whole,) = [own for own in held[box.name] if contains(own, box)][:1]
    inside = tuple(
        slice(a - first, b - first)
        for a, b, first in zip(box.start, box.stop, whole.start, strict=True)
    )
    return held[box.name][whole][inside]


def hold(layout, rank, tensors):
    held = {}
    for box in layout.boxes_of(rank):
        held.setdefault(box.name, {})[box] = tensors[box.name][box.slices].copy()
    return held


def check_exact(made, trainer, engine, tensors):
    """Carry the plan out with arrays, and compare each engine rank with slices of the tensors."""
    sources = {}
    needed = arrived = 0
    for rank in range(engine.num_ranks):
        received = {name: np.zeros(array.shape, array.dtype) for name, array in tensors.items()}
        times = {name: np.zeros(array.shape, int) for name, array in tensors.items()}
        for source, box in made.to_destination(rank):
            if source not in sources:
                sources[source] = hold(trainer, source, tensors)
            data = send(sources[source], box)
            received[box.name][box.slices] = data
            times[box.name][box.slices] += 1
            arrived += data.nbytes
        wanted = {name: np.zeros(array.shape, int) for name, array in tensors.items()}
        for box in engine.boxes_of(rank):
            wanted[box.name][box.slices] += 1
            needed += box.size * 2
            part = tensors[box.name][box.slices]
            assert received[box.name][box.slices].tobytes() == part.tobytes()
        for name, counted in wanted.items():
            assert np.array_equal(counted, times[name]), (rank, name)  # exactly once, no more
    assert arrived == needed == made.total_bytes == made.minimum_bytes


@st.composite
def placed(draw, num_trainer, num_engine):
    blocks = Placement.blocks(
        num_trainer,
        num_engine,
        node_ranks=draw(st.integers(1, 8)),
        leaf_nodes=draw(st.integers(1, 3)),
        spine_leaves=draw(st.integers(1, 3)),
    )
    if draw(st.booleans()):  # engines on the trainer's nodes
        shared = tuple(blocks.trainer[r % num_trainer] for r in range(num_engine))
        return Placement(blocks.trainer, shared)
    return blocks


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_byte_arrives_once_and_is_the_right_one(data):
    model = read_model(data.draw(config_strategy(max_layers=4)))
    ours = data.draw(trainer_strategy(model, max_dp=2))
    theirs = data.draw(engine_strategy(model, max_engines=2))
    trainer, engine = trainer_layout(model, ours), engine_layout(model, theirs)
    made = plan(trainer, engine, data.draw(placed(trainer.num_ranks, engine.num_ranks)))
    check_exact(made, trainer, engine, random_tensors(model, seed=0))
    check_predictions(made, engine)


def check_predictions(made, engine):
    sent = np.zeros(made.num_sources, dtype=int)
    pairs = []
    for rank in range(engine.num_ranks):
        for source, box in made.to_destination(rank):
            sent[source] += 2 * box.size
            pairs.append((source, rank, box))
    assert made.sent_bytes.tolist() == sent.tolist()
    assert np.array_equal(made.received_bytes, engine.rank_bytes)
    assert sum(made.link_bytes.values()) == made.total_bytes
    reverse = [
        (source, rank, box)
        for source in range(made.num_sources)
        for rank, box in made.from_source(source)
    ]
    assert sorted(map(str, reverse)) == sorted(map(str, pairs))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_between_very_different_layouts(name):
    model = read_model(CONFIGS[name])
    ours = TrainerParallel(tp=8, pp=2, dp=2, ep=4, etp=1, vpp=2)
    trainer = trainer_layout(model, ours)
    engine = engine_layout(model, EngineParallel(tp=4, pp=3, ep=2, num_engines=2))
    made = plan(trainer, engine, Placement.blocks(32, 24))
    check_exact(made, trainer, engine, random_tensors(model, seed=1))


# ---------------------------------------------------------------------------------------------
# Layouts that no table makes: any boxes, held by any number of ranks
# ---------------------------------------------------------------------------------------------


@st.composite
def cut_boxes(draw, shape, num_ranks, *, is_whole):
    """Cut a tensor into boxes, and give each box to ranks: to one at least if is_whole."""
    boxes = [Box("w", (0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(box.start[axis], box.stop[axis]))
        stop, start = list(box.stop), list(box.start)
        stop[axis] = start[axis] = at
        boxes += [Box("w", box.start, tuple(stop)), Box("w", tuple(start), box.stop)]
    held = {rank: [] for rank in range(num_ranks)}
    for box in boxes:
        least = 1 if is_whole else 0
        for rank in draw(st.sets(st.integers(0, num_ranks - 1), min_size=least)):
            held[rank].append(box)
    return held


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_boxes_to_any_boxes(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    spec = TensorSpec("w", "int16", shape)
    ours = data.draw(cut_boxes(shape, 4, is_whole=True))
    for rank, boxes in data.draw(cut_boxes(shape, 4, is_whole=False)).items():
        ours[rank] += boxes  # a second way to cut: held boxes overlap
    theirs = data.draw(cut_boxes(shape, 3, is_whole=False))
    trainer, engine = layout_of_boxes([spec], ours), layout_of_boxes([spec], theirs)
    made = plan(trainer, engine, data.draw(placed(4, 3)))
    words = np.arange(spec.size, dtype=np.uint16).reshape(shape)
    check_exact(made, trainer, engine, {"w": words})


def test_scalars_travel():
    spec = TensorSpec("scale", "float32", ())
    layout = layout_of_boxes([spec], {0: [spec.whole()]})
    made = plan(layout, layout, Placement.blocks(1, 1))
    assert made.to_destination(0) == [(0, spec.whole())] and made.total_bytes == 4


# ---------------------------------------------------------------------------------------------
# Who sends
# ---------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=8),
    st.integers(1, 9),
    st.integers(0, 60),
)
def test_units_go_where_least_is_sent(loads, nbytes, units):
    """Oracle: one unit after the other to the least loaded gives the smallest largest load."""
    heap = list(loads)
    heapq.heapify(heap)
    for _ in range(units):
        heapq.heapreplace(heap, heap[0] + nbytes)
    shares = fill_up(np.array(loads), nbytes, units)
    assert shares.sum() == units and shares.min() >= 0
    assert max(np.array(loads) + shares * nbytes) == max(heap)


@given(st.data())
def test_a_match_pairs_as_much_as_every_cell_has(data):
    cells = st.integers(0, 3)
    ours = data.draw(st.lists(st.tuples(st.integers(0, 9), cells), min_size=1, max_size=8))
    theirs = data.draw(st.lists(st.tuples(st.integers(0, 9), cells), min_size=1, max_size=8))
    shares, our_cell = np.array(ours).T
    wants, their_cell = np.array(theirs).T
    found = match(shares, wants, our_cell, their_cell)
    by_cell = [min(shares[our_cell == c].sum(), wants[their_cell == c].sum()) for c in range(4)]
    if found is None:
        assert sum(by_cell) == 0
        return
    given_, got = np.zeros_like(shares), np.zeros_like(wants)
    for source, destination, count, offset in zip(*found, strict=True):
        assert our_cell[source] == their_cell[destination] and count > 0
        assert offset == got[destination]  # a destination's units come in order, without gaps
        given_[source] += count
        got[destination] += count
    assert (given_ <= shares).all() and (got <= wants).all()
    assert [given_[our_cell == c].sum() for c in range(4)] == by_cell


def test_replicas_share_the_work():
    model = read_model(CONFIGS["qwen3"])
    trainer = trainer_layout(model, TrainerParallel(tp=2, dp=4))
    engine = engine_layout(model, EngineParallel(tp=4, num_engines=8))
    made = plan(trainer, engine, Placement.blocks(8, 32))
    assert made.sent_bytes.min() > 0 and made.max_vs_mean < 1.05


def test_one_large_tensor_is_cut_over_its_replicas():
    spec = TensorSpec("w", "bfloat16", (8192, 2048))
    trainer = layout_of_boxes([spec], {rank: [spec.whole()] for rank in range(8)})
    engine = layout_of_boxes([spec], {0: [spec.whole()]})
    made = plan(trainer, engine, Placement.blocks(8, 1))
    assert made.sent_bytes.tolist() == [spec.nbytes // 8] * 8


def test_the_nearest_replica_sends():
    """Replica and engine on each node: nothing leaves a node; farther apart, nothing leaves more
    than it must."""
    model = read_model(CONFIGS["qwen3"])
    trainer = trainer_layout(model, TrainerParallel(tp=2, dp=4))
    engine = engine_layout(model, EngineParallel(tp=2, num_engines=4))
    for level, link in enumerate(LINKS):
        ours = [_place(rank // 2, 0) for rank in range(8)]
        theirs = [_place(rank // 2, level) for rank in range(8)]
        made = plan(trainer, engine, Placement(tuple(ours), tuple(theirs)))
        assert made.link_bytes == {name: (name == link) * made.total_bytes for name in LINKS}


def _place(group, level):
    """Place of group 0..3 so that the classes up to `level` differ between the two sides."""
    numbers = [group, group, group]
    for apart in range(level):
        numbers[apart] += 100
    return Place(*numbers)


def test_a_box_that_a_node_holds_twice_counts_once_there():
    model = read_model(CONFIGS["qwen3"])
    trainer = trainer_layout(model, TrainerParallel())
    engine = engine_layout(model, EngineParallel(num_engines=4))
    made = plan(trainer, engine, Placement.blocks(1, 4, node_ranks=2))
    assert made.minimum_bytes == 2 * made.node_bytes


# ---------------------------------------------------------------------------------------------
# Keys, refusals, size
# ---------------------------------------------------------------------------------------------

_PROGRAM = """
from tests.unit.dcs.test_plan import example
made = example()
rows = (made.item, made.source, made.destination, made.first, made.count)
print(made.key, [column.tolist() for column in rows])
"""


def example(tp=2, dp=4):
    model = read_model(CONFIGS["qwen2_moe"])
    trainer = trainer_layout(model, TrainerParallel(tp=tp, dp=dp, ep=2, etp=1))
    engine = engine_layout(model, EngineParallel(tp=2, num_engines=2))
    return plan(trainer, engine, Placement.blocks(tp * dp, 4, node_ranks=4))


def test_every_process_makes_the_same_plan():
    found = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", _PROGRAM]
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1


def test_the_key_changes_with_layouts_and_places_and_the_cache_follows_it():
    model = read_model(CONFIGS["qwen3"])
    two = trainer_layout(model, TrainerParallel(tp=2, dp=2))
    four = trainer_layout(model, TrainerParallel(tp=4))
    engine = engine_layout(model, EngineParallel(tp=2))
    here, there = Placement.blocks(4, 2), Placement.blocks(4, 2, node_ranks=1)
    keys = {plan_key(t, engine, p) for t in (two, four) for p in (here, there)}
    assert len(keys) == 4
    cache = PlanCache()
    first = cache.get(two, engine, here)
    again = trainer_layout(model, TrainerParallel(tp=2, dp=2))
    assert cache.get(again, engine, Placement.blocks(4, 2)) is first
    assert cache.get(four, engine, here) is not first
    assert cache.get(two, engine, here).key == first.key


def test_what_the_trainer_does_not_have_is_named():
    specs = [TensorSpec("w", "bfloat16", (8, 4)), TensorSpec("v", "bfloat16", (2,))]
    half = {0: [Box("w", (0, 0), (4, 4))]}
    whole = {0: [specs[0].whole()]}
    both = {0: [spec.whole() for spec in specs]}
    places = Placement.blocks(1, 1)

    def planned(ours, theirs, our_specs=specs):
        trainer, engine = layout_of_boxes(our_specs, ours), layout_of_boxes(specs, theirs)
        return plan(trainer, engine, places)

    with pytest.raises(WeightSyncError, match=r"holds w\[4:8, 0:4\], which engine rank 0 needs"):
        planned(half, whole)
    with pytest.raises(WeightSyncError, match=r"name='v'.*trainer does not have it"):
        planned(whole, both)
    other = [TensorSpec("w", "float32", (8, 4))]
    with pytest.raises(WeightSyncError, match=r"trainer has .*float32.*the same model"):
        planned(whole, whole, other)
    assert planned(both, whole).total_bytes == specs[0].nbytes  # what nobody wants stays

    with pytest.raises(WeightSyncError, match="3 places for 1 trainer ranks"):
        one = layout_of_boxes(specs, whole)
        plan(one, one, Placement.blocks(3, 1))


def test_a_plan_of_1536_ranks_of_a_235b_model():
    """Seconds and memory are far below the bounds; the command is what a user runs."""
    command = [sys.executable, str(ROOT / "tools/plan_weights"), "--json"]
    command += ["--config", "Qwen3-235B-A22B", "--trainer-ranks", "1024", "--engine-ranks", "512"]
    command += ["--tp", "4", "--pp", "8", "--ep", "16", "--etp", "1"]
    command += ["--first-stage-layers", "11", "--last-stage-layers", "11", "--engine-tp", "8"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["bytes"] == found["minimum_bytes"] > 64 * 470e9
    assert found["max_rank_bytes_vs_mean"] <= 1.2
    assert found["plan_s"] < 10 and found["peak_memory_gb"] < 2
