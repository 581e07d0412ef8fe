"""Ranks and groups against Megatron-core's own generator and against arithmetic done by hand."""

import ast
import functools
import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.errors import TopologyError
from relax_hpc.topology.ranks import DEFAULT_ORDER, PIPELINE_INNER_ORDER, Shape

SHAPES = [
    Shape(world=64, tp=8, pp=4),
    Shape(world=64, tp=2, cp=4, pp=2),
    Shape(world=96, tp=2, pp=3, ep=8),
    Shape(world=64, tp=4, cp=2, pp=2, ep=8, etp=1),
    Shape(world=64, tp=4, pp=2, order=PIPELINE_INNER_ORDER),
    Shape(world=64, tp=2, cp=2, pp=4, order="cp-tp-dp-ep-pp"),
    Shape(world=1),
]


@functools.cache
def megatron_generator() -> Any:
    """Megatron's RankGenerator alone: the import of its whole package takes ten seconds."""
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("megatron-core is not installed")
    path = Path(spec.submodule_search_locations[0]) / "parallel_state.py"
    wanted = ("generate_masked_orthogonal_rank_groups", "RankGenerator")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if getattr(node, "name", "") in wanted]
    names: dict[str, Any] = {"List": list}
    exec(compile(tree, str(path), "exec"), names)
    return names["RankGenerator"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_groups_are_those_of_megatron(shape: Shape) -> None:
    generator = megatron_generator()
    dense = generator(tp=shape.tp, ep=1, dp=shape.dp, pp=shape.pp, cp=shape.cp, order=shape.order)
    for axes in ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-dp"):
        assert shape.groups(axes).tolist() == dense.get_ranks(axes), axes
    expert = generator(
        tp=shape.expert_tp, ep=shape.ep, dp=shape.expert_dp, pp=shape.pp, cp=1, order=shape.order
    )
    theirs = {"etp": "tp", "ep": "ep", "edp": "dp", "etp-ep": "tp-ep"}
    for ours, name in theirs.items():
        assert shape.groups(ours).tolist() == expert.get_ranks(name), ours


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_coordinates_and_ranks_undo_each_other(shape: Shape) -> None:
    seen = set()
    axes = (range(shape.pp), range(shape.dp), range(shape.cp), range(shape.tp))
    for pp, dp, cp, tp in itertools.product(*axes):
        rank = shape.rank_of(tp=tp, cp=cp, dp=dp, pp=pp)
        place = shape.coordinates(rank)
        assert (place["tp"], place["cp"], place["dp"], place["pp"]) == (tp, cp, dp, pp)
        seen.add(rank)
    assert seen == set(range(shape.world))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_rank_is_in_one_group_and_differs_there_on_one_axis(shape: Shape) -> None:
    for axis in ("tp", "cp", "dp", "pp", "etp", "ep", "edp"):
        groups = shape.groups(axis)
        assert sorted(groups.ravel().tolist()) == list(range(shape.world))
        table = shape.dense_axes() if axis in ("tp", "cp", "dp", "pp") else shape.expert_axes()
        for group in groups.tolist():
            places = [shape.coordinates(rank) for rank in group]
            for name, _ in table:
                values = [place[name] for place in places]
                assert values == (
                    list(range(len(group))) if name == axis else values[:1] * len(group)
                )


def test_orders_as_computed_for_16_nodes() -> None:
    """tp 8, dp 4, pp 4: by default 4 consecutive nodes are a stage, else they are a replica."""
    default = Shape(world=128, tp=8, pp=4)
    inner = Shape(world=128, tp=8, pp=4, order=PIPELINE_INNER_ORDER)
    assert default.dp == inner.dp == 4
    assert default.groups("dp")[0].tolist() == [0, 8, 16, 24]
    assert default.groups("pp")[0].tolist() == [0, 32, 64, 96]
    assert inner.groups("pp")[0].tolist() == [0, 8, 16, 24]
    assert inner.groups("dp")[0].tolist() == [0, 32, 64, 96]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"world": 12, "tp": 8}, "tp x cp x pp = 8"),
        ({"world": 24, "tp": 2, "ep": 8}, "etp x ep x pp = 16"),
        ({"world": 8, "tp": 0}, "at least 1"),
        ({"world": 8, "order": "tp-dp-pp"}, "must hold each of"),
        ({"world": 16, "pp": 2, "ep": 2, "order": PIPELINE_INNER_ORDER}, "end with pp"),
    ],
)
def test_shapes_that_cannot_be(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        Shape(**sizes)  # type: ignore[arg-type]


def test_wrong_questions() -> None:
    shape = Shape(world=8, tp=2)
    with pytest.raises(TopologyError, match="not mixed"):
        shape.groups("tp-ep")
    with pytest.raises(TopologyError, match="rank 8"):
        shape.coordinates(8)
    with pytest.raises(TopologyError, match="tp=2 is not in"):
        shape.rank_of(tp=2)
    assert shape.order == DEFAULT_ORDER
