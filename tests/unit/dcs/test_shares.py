"""Replicas share what they publish: every element once, evenly, in few pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.dcs.architectures import read_model
from relax_hpc.dcs.layout import Box, TensorSpec, check_coverage
from relax_hpc.dcs.shares import share
from relax_hpc.dcs.trainer_layout import TrainerParallel, trainer_layout
from tests.unit.dcs.weight_shapes import CONFIGS


@settings(max_examples=200, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=8),
    parts=st.integers(1, 7),
    data=st.data(),
)
def test_all_parts_are_every_element_once_and_differ_by_a_row(shapes, parts, data):
    specs = [TensorSpec(f"w{i}", "uint8", tuple(shape)) for i, shape in enumerate(shapes)]
    element_bytes = [data.draw(st.sampled_from([1, 2, 4])) for _ in specs]
    boxes = [spec.whole() for spec in specs]
    found = {part: share(boxes, element_bytes, part, parts) for part in range(parts)}
    for mine in found.values():
        assert [index for index, _ in mine] == sorted({index for index, _ in mine})
        assert all(box.name == boxes[index].name and box.size for index, box in mine)
    check_coverage(specs, {part: [box for _, box in mine] for part, mine in found.items()})
    loads = [sum(box.size * element_bytes[i] for i, box in mine) for mine in found.values()]
    rows = [
        box.size * each // next((n for n in box.shape if n > 1), 1)
        for box, each in zip(boxes, element_bytes, strict=True)
    ]
    assert max(loads) - min(loads) <= 2 * max(rows, default=0) + 1
    assert sum(len(mine) for mine in found.values()) <= len(boxes) + parts - 1


@pytest.mark.parametrize("name", ["qwen3", "llama-tied-bias"])
def test_replicas_of_a_real_layout_cover_the_model_once(name):
    model = read_model(CONFIGS[name])
    dp = 3
    layout = trainer_layout(model, TrainerParallel(tp=2, pp=2, dp=dp, vocab_multiple=4))
    by_boxes = {}
    for rank in range(layout.num_ranks):
        by_boxes.setdefault(tuple(layout.boxes_of(rank)), []).append(rank)
    published, seen = {}, set()
    for boxes, ranks in by_boxes.items():
        assert len(ranks) == dp
        own = [box for box in boxes if box not in seen]  # norms and tied copies: the first rank's
        seen.update(own)
        for part, rank in enumerate(ranks):
            published[rank] = [box for _, box in share(own, [2] * len(own), part, dp)]
        nbytes = [sum(box.size for box in published[rank]) for rank in ranks]
        assert max(nbytes) <= 1.1 * sum(nbytes) / dp
    check_coverage(layout.specs, published)


def test_scalars_belong_to_one_part():
    box = Box("s", (), ())
    assert sum(bool(share([box], [4], part, 3)) for part in range(3)) == 1
