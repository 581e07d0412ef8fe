"""Stages and order of ranks of the trainer layout against Megatron-core's own functions."""

import types

import pytest

from relax_hpc.dcs.architectures import read_model
from relax_hpc.dcs.trainer_layout import TrainerParallel, stage_of_layers, trainer_layout
from tests.unit.dcs.weight_shapes import CONFIGS


def megatron_stages(parallel, num_layers):
    block = pytest.importorskip("megatron.core.transformer.transformer_block")
    layer = pytest.importorskip("megatron.core.transformer.transformer_layer")
    vpp = parallel.vpp if parallel.vpp > 1 else None
    config = types.SimpleNamespace(
        num_layers=num_layers,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=vpp,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers or None,
        num_layers_in_last_pipeline_stage=parallel.last_stage_layers or None,
        account_for_embedding_in_pipeline_split=parallel.is_embedding_counted,
        account_for_loss_in_pipeline_split=parallel.is_loss_counted,
    )
    owner = [-1] * num_layers
    for pp in range(parallel.pp):
        for chunk in range(parallel.vpp):
            stage = chunk if vpp else None
            count = block.get_num_layers_to_build(config, stage, pp)
            first = layer.get_transformer_layer_offset(config, stage, pp)
            for number in range(first, first + count):
                assert owner[number] == -1
                owner[number] = pp
    return owner


@pytest.mark.parametrize(
    ("num_layers", "degrees"),
    [
        (8, {"pp": 1}),
        (8, {"pp": 4}),
        (8, {"pp": 2, "vpp": 2}),
        (16, {"pp": 4, "vpp": 2}),
        (7, {"pp": 3, "first_stage_layers": 1}),
        (7, {"pp": 3, "last_stage_layers": 1}),
        (94, {"pp": 8, "first_stage_layers": 11, "last_stage_layers": 11}),
        (9, {"pp": 2, "first_stage_layers": 4, "last_stage_layers": 5}),
        (12, {"pp": 4, "vpp": 2, "first_stage_layers": 2, "last_stage_layers": 2}),
        (14, {"pp": 4, "is_embedding_counted": True, "is_loss_counted": True}),
        (15, {"pp": 4, "vpp": 2, "is_loss_counted": True}),
        (14, {"pp": 4, "vpp": 2, "is_embedding_counted": True, "is_loss_counted": True}),
    ],
)
def test_stages_are_those_of_megatron(num_layers, degrees):
    parallel = TrainerParallel(**degrees)
    assert stage_of_layers(num_layers, parallel) == megatron_stages(parallel, num_layers)


@pytest.mark.parametrize(
    ("tp", "cp", "dp", "pp", "ep", "etp"),
    [(2, 1, 4, 2, 4, 1), (2, 2, 2, 2, 2, 2), (4, 1, 2, 1, 2, 1), (1, 1, 8, 2, 4, 2)],
)
def test_the_order_of_ranks_is_that_of_megatron(tp, cp, dp, pp, ep, etp):
    state = pytest.importorskip("megatron.core.parallel_state")
    parallel = TrainerParallel(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp)
    model = read_model(CONFIGS["qwen3_moe"])
    layout = trainer_layout(model, parallel)
    order = "tp-cp-ep-dp-pp"
    dense = state.RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    edp = tp * cp * dp // (ep * etp)
    expert = state.RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=order)
    holders = {spec.name: layout.shardings[n].holders for spec, n in _numbered(layout)}
    groups = {tuple(sorted(group)) for group in dense.get_ranks("cp-dp")}
    assert set(holders["model.layers.0.self_attn.q_proj.weight"]) <= groups
    assert holders["model.embed_tokens.weight"][0] == min(groups)
    expert_groups = {tuple(sorted(group)) for group in expert.get_ranks("dp")}
    for number in range(model.num_experts):
        assert set(holders[f"model.layers.0.mlp.experts.{number}.up_proj.weight"]) <= expert_groups
    tensor_groups = [tuple(group) for group in expert.get_ranks("tp-ep")]
    first = holders["model.layers.0.mlp.experts.0.up_proj.weight"]
    last = holders[f"model.layers.0.mlp.experts.{model.num_experts - 1}.up_proj.weight"]
    assert (first[0][0], last[-1][0]) == (tensor_groups[0][0], tensor_groups[0][-1])


def _numbered(layout):
    return zip(layout.specs, layout.sharding_of, strict=True)
