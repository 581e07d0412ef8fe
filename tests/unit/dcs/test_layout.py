"""Box algebra against an oracle that counts every element of an array."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.dcs.layout import (
    DTYPE_BYTES,
    Box,
    TensorSpec,
    check_coverage,
    intersect,
    itemsize,
    subtract,
)
from relax_hpc.errors import WeightSyncError


def count(shape, boxes):
    """Oracle: how many boxes hold each element."""
    held = np.zeros(shape, dtype=int)
    for box in boxes:
        held[box.slices] += 1
    return held


@st.composite
def shape_and_boxes(draw, number=2):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    boxes = []
    for _ in range(number):
        edges = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        boxes.append(Box("w", tuple(e[0] for e in edges), tuple(e[1] for e in edges)))
    return shape, boxes


@given(shape_and_boxes())
def test_intersect_and_subtract_equal_the_counted_elements(case):
    shape, (a, b) = case
    both = (count(shape, [a]) > 0) & (count(shape, [b]) > 0)
    common = intersect(a, b)
    assert np.array_equal(count(shape, [] if common is None else [common]) > 0, both)
    left = count(shape, subtract(a, b))
    assert left.max(initial=0) <= 1
    assert np.array_equal(left > 0, (count(shape, [a]) > 0) & ~both)


@settings(max_examples=300)
@given(shape_and_boxes(number=3))
def test_coverage_agrees_with_counting(case):
    shape, boxes = case
    exact = bool((count(shape, boxes) == 1).all())
    spec = TensorSpec("w", "float32", shape)
    by_rank = {rank: [box] for rank, box in enumerate(boxes)}
    if exact:
        check_coverage([spec], by_rank)
    else:
        with pytest.raises(WeightSyncError):
            check_coverage([spec], by_rank)


@st.composite
def guillotine(draw):
    """Cut a tensor into boxes that cover it exactly, as TP, PP and EP splits do."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    boxes = [Box("w", (0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(box.start[axis], box.stop[axis]))
        stop, start = list(box.stop), list(box.start)
        stop[axis] = start[axis] = at
        boxes += [Box("w", box.start, tuple(stop)), Box("w", tuple(start), box.stop)]
    return shape, draw(st.permutations(boxes))


@given(guillotine(), st.randoms())
def test_every_exact_split_passes_and_one_box_less_or_more_fails(case, random):
    shape, boxes = case
    spec = TensorSpec("w", "bfloat16", shape)
    check_coverage([spec], {r: [box] for r, box in enumerate(boxes)})
    chosen = random.choice([box for box in boxes if box.size])
    less = [box for box in boxes if box is not chosen]
    with pytest.raises(WeightSyncError, match="held by no shard"):
        check_coverage([spec], {r: [box] for r, box in enumerate(less)})
    with pytest.raises(WeightSyncError, match="held twice"):
        check_coverage([spec], {r: [box] for r, box in enumerate([*boxes, chosen])})


def test_messages_name_the_gap_and_the_owners():
    spec = TensorSpec("model.norm.weight", "float32", (8, 4))
    left = Box("model.norm.weight", (0, 0), (4, 4))
    with pytest.raises(WeightSyncError, match=r"model.norm.weight\[4:8, 0:4\] are held by no"):
        check_coverage([spec], {0: [left]})
    with pytest.raises(WeightSyncError, match=r"\[3:4, 0:4\] are held twice.*rank 0 and 7"):
        check_coverage([spec], {0: [left], 7: [Box("model.norm.weight", (3, 0), (8, 4))]})


@pytest.mark.parametrize(
    ("start", "stop"),
    [((-1, 0), (4, 4)), ((0, 0), (9, 4)), ((5, 0), (4, 4)), ((0,), (8,)), ((0, 0), (8,)), ((), ())],
)
def test_boxes_outside_of_the_tensor_are_refused(start, stop):
    spec = TensorSpec("w", "float32", (8, 4))
    with pytest.raises(WeightSyncError, match="outside"):
        check_coverage([spec], {0: [Box("w", start, stop)]})


def test_unknown_and_double_names_are_refused():
    spec = TensorSpec("w", "float32", (2,))
    with pytest.raises(WeightSyncError, match="no tensor 'v'"):
        check_coverage([spec], {0: [spec.whole(), Box("v", (0,), (1,))]})
    with pytest.raises(WeightSyncError, match="twice"):
        check_coverage([spec, spec], {0: [spec.whole()]})


def test_scalars_and_empty_tensors():
    scalar, empty = TensorSpec("s", "float32", ()), TensorSpec("e", "float32", (0, 3))
    check_coverage([scalar, empty], {0: [scalar.whole()]})
    with pytest.raises(WeightSyncError, match="held twice"):
        check_coverage([scalar], {0: [scalar.whole()], 1: [scalar.whole()]})
    with pytest.raises(WeightSyncError, match="no shard"):
        check_coverage([scalar], {0: []})


def test_dtype_names_are_those_of_torch():
    torch = pytest.importorskip("torch")
    for name, nbytes in DTYPE_BYTES.items():
        assert getattr(torch, name).itemsize == nbytes
    with pytest.raises(WeightSyncError, match=r"float31.*valid"):
        itemsize("float31", "w")
