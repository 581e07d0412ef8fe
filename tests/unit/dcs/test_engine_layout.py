"""Engine layout against SGLang's loading rules, written down apart as offsets of each rank."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.dcs.architectures import read_model
from relax_hpc.dcs.engine_layout import EngineParallel, engine_layout, stage_of_layers
from relax_hpc.errors import WeightSyncError
from tests.unit.dcs.weight_shapes import CONFIGS, config_strategy, engine_strategy


def sglang_stages(num_layers, pp):
    """distributed/utils.py, get_pp_indices: the last stages take one layer more."""
    base, remainder = divmod(num_layers, pp)
    owner = []
    for rank in range(pp):
        if rank >= pp - remainder:
            start = rank * (base + 1) - (pp - remainder)
            end = start + base + 1
        else:
            start, end = rank * base, (rank + 1) * base
        assert start == len(owner)
        owner += [rank] * (end - start)
    return owner


def sglang_rows(count, size, rank, padding):
    """layers/vocab_parallel_embedding.py: real rows of a padded shard."""
    if -(-count // padding) * padding % size:
        padding *= size
    per_rank = -(-count // padding) * padding // size
    return range(min(rank * per_rank, count), min((rank + 1) * per_rank, count))


def part(count, size, rank):
    shard = count // size
    assert shard * size == count
    return range(shard * rank, shard * (rank + 1))


class SglangRank:
    """What the weight loaders of one rank copy: (rows, columns) of each canonical tensor."""

    def __init__(self, model, parallel, rank):
        self._model, self._parallel = model, parallel
        self.tp_rank, stage = rank % parallel.tp, rank // parallel.tp % parallel.pp
        self.attention_tp = parallel.tp // parallel.attention_dp
        self.attention_rank = self.tp_rank % self.attention_tp
        self.moe_tp = parallel.tp // parallel.ep
        self.moe_rank, self.ep_rank = self.tp_rank % self.moe_tp, self.tp_rank // self.moe_tp
        self.is_first, self.is_last = stage == 0, stage == parallel.pp - 1
        owner = sglang_stages(model.num_layers, parallel.pp)
        self.layers = {layer for layer, pp in enumerate(owner) if pp == stage}

    def slices(self, tensor):
        """Ranges that are loaded of a tensor: a list of (rows, columns), empty if none."""
        name, rows = tensor.name, range(tensor.shape[0])
        columns = range(tensor.shape[1] if len(tensor.shape) == 2 else 1)
        if name == "model.norm.weight":
            return [(rows, columns)] if self.is_last else []
        if name == "lm_head.weight":
            return [(self.head(rows), columns)] if self.is_last else []
        if name == "model.embed_tokens.weight":
            return self.embedding(rows, columns)
        if int(name.split(".")[2]) not in self.layers:
            return []
        return self.in_layer(name, rows, columns)

    def vocabulary(self, rows, is_attention):
        ways = self.attention_tp if is_attention else self._parallel.tp
        rank = self.attention_rank if is_attention else self.tp_rank
        return sglang_rows(len(rows), ways, rank, self._parallel.vocab_multiple)

    def head(self, rows):
        return self.vocabulary(rows, self._parallel.is_lm_head_dp)

    def embedding(self, rows, columns):
        found = []
        if self.is_first:
            found.append((self.vocabulary(rows, self._model.model_type != "llama"), columns))
        if self.is_last and not self.is_first and self._model.is_tied:
            found.append((self.head(rows), columns))
        return found

    def in_layer(self, name, rows, columns):
        if ".experts." in name:
            local = self._model.num_experts // self._parallel.ep
            if int(name.split(".experts.")[1].split(".")[0]) // local != self.ep_rank:
                return []
            ways, rank = self.moe_tp, self.moe_rank
        elif "self_attn" in name:
            ways, rank = self.attention_tp, self.attention_rank
        else:
            ways, rank = self._parallel.tp, self.tp_rank
            if "shared_expert." in name and self._parallel.is_shared_expert_whole:
                ways, rank = 1, 0
        if "k_proj" in name or "v_proj" in name:  # QKVParallelLinear: num_kv_head_replicas
            heads = self._model.num_kv_heads
            if ways >= heads:
                ways, rank = heads, rank // (ways // heads)
            return [(part(len(rows), ways, rank), columns)]
        if "q_proj" in name or "gate_proj" in name or "up_proj" in name:
            return [(part(len(rows), ways, rank), columns)]
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return [(rows, part(len(columns), ways, rank))]
        return [(rows, columns)]


def as_slices(box):
    columns = range(box.start[1], box.stop[1]) if len(box.start) == 2 else range(1)
    return (range(box.start[0], box.stop[0]), columns)


def check_against_sglang(model, parallel):
    layout = engine_layout(model, parallel)
    for rank in range(parallel.num_ranks):
        sglang = SglangRank(model, parallel, rank)
        expected = {
            (tensor.name, rows, columns)
            for tensor in model.tensors
            for rows, columns in sglang.slices(tensor)
            if len(rows) and len(columns)
        }
        boxes = layout.boxes_of(rank)
        assert {(box.name, *as_slices(box)) for box in boxes} == expected
        assert len(boxes) == len(expected)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_rank_holds_what_sglang_loads(data):
    model = read_model(data.draw(config_strategy(max_layers=5)))
    check_against_sglang(model, data.draw(engine_strategy(model, max_engines=2)))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("degrees", [{"tp": 1}, {"tp": 4, "pp": 2}, {"tp": 8, "attention_dp": 4}])
def test_every_architecture(name, degrees):
    check_against_sglang(read_model(CONFIGS[name]), EngineParallel(**degrees))


def test_key_and_value_heads_are_copied_when_there_are_fewer_than_ranks():
    layout = engine_layout(read_model(CONFIGS["qwen3"]), EngineParallel(tp=8))
    held = [
        [
            (b.start[0], b.stop[0])
            for b in layout.boxes_of(r)
            if b.name.endswith("0.self_attn.k_proj.weight")
        ]
        for r in range(8)
    ]
    assert held == [[(4 * head, 4 * head + 4)] for head in (0, 0, 1, 1, 2, 2, 3, 3)]


def test_engines_are_copies_of_each_other():
    model = read_model(CONFIGS["qwen3_moe"])
    layout = engine_layout(model, EngineParallel(tp=2, pp=2, ep=2, num_engines=3))
    for rank in range(4):
        assert layout.boxes_of(rank) == layout.boxes_of(rank + 4) == layout.boxes_of(rank + 8)
    one = engine_layout(model, EngineParallel(tp=2, pp=2, ep=2))
    assert np.array_equal(layout.rank_bytes, np.tile(one.rank_bytes, 3))


def test_stages_by_hand_and_even_ones():
    assert stage_of_layers(7, EngineParallel(pp=3)) == [0, 0, 1, 1, 2, 2, 2]
    by_hand = EngineParallel(pp=2, stage_layers=(5, 2))
    assert stage_of_layers(7, by_hand) == [0] * 5 + [1] * 2
    with pytest.raises(WeightSyncError, match="need 2 numbers, sum 6"):
        stage_of_layers(6, by_hand)


def test_padding_of_the_vocabulary_belongs_to_nobody():
    layout = engine_layout(read_model(CONFIGS["llama"]), EngineParallel(tp=8))  # 37 of 64 rows
    rows = [
        (box.start[0], box.stop[0])
        for rank in range(8)
        for box in layout.boxes_of(rank)
        if box.name == "lm_head.weight"
    ]
    assert rows == [(0, 8), (8, 16), (16, 24), (24, 32), (32, 37)]


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tp": 3}, "num_attention_heads=8 does not divide into 3"),
        ({"tp": 4, "ep": 3}, "engine tp=4 does not divide into 3"),
        ({"tp": 4, "attention_dp": 3}, "engine tp=4 does not divide into 3"),
        ({"tp": 16, "ep": 16, "attention_dp": 16}, "num_experts=8 does not divide into 16"),
    ],
)
def test_degrees_that_sglang_refuses(degrees, message):
    with pytest.raises(WeightSyncError, match=message):
        engine_layout(read_model(CONFIGS["qwen3_moe"]), EngineParallel(**degrees))
