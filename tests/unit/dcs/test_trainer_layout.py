"""Trainer layout against a naive sharding by element numbers, and our backend's own map.

Stages and the order of ranks: test_trainer_megatron.py.
"""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from relax_hpc.dcs.architectures import read_model
from relax_hpc.dcs.trainer_layout import TrainerParallel, stage_of_layers, trainer_layout
from relax_hpc.errors import WeightSyncError
from tests.unit.dcs.weight_shapes import CONFIGS, config_strategy, trainer_strategy

# ---------------------------------------------------------------------------------------------
# The oracle: every element has a number; parameters are built whole as Megatron fuses them, then
# split with numpy. It knows names only, none of the table's words.
# ---------------------------------------------------------------------------------------------


def element_numbers(model):
    return {t.name: np.arange(int(np.prod(t.shape))).reshape(t.shape) for t in model.tensors}


def fuse_qkv(model, q, k, v):
    """Rows in Megatron's order: per key/value head its query heads, then k, then v."""
    head, per_group = model.head_dim, model.num_heads // model.num_kv_heads
    rows = []
    for group in range(model.num_kv_heads):
        for query in range(group * per_group, (group + 1) * per_group):
            rows += [("q", row, q[row]) for row in range(query * head, (query + 1) * head)]
        for letter, source in (("k", k), ("v", v)):
            rows += [(letter, row, source[row]) for row in range(group * head, (group + 1) * head)]
    return rows


def cut(rows, parts, part):
    size, rest = divmod(len(rows), parts)
    assert rest == 0
    return rows[part * size : (part + 1) * size]


class NaiveRank:
    """The elements of one rank: {tensor name: sorted element numbers}."""

    def __init__(self, model, numbers, parallel, place):
        self.held = {}
        self._model, self._numbers, self._parallel = model, numbers, parallel
        tp, stages, ep, etp = place["tp"], parallel.pp, place["ep"], place["etp"]
        if place["pp"] == 0:
            self.vocabulary("model.embed_tokens.weight", tp)
        if place["pp"] == stages - 1:
            self.take("model.norm.weight", numbers["model.norm.weight"])
            head = "model.embed_tokens.weight" if model.is_tied else "lm_head.weight"
            self.vocabulary(head, tp)
        for layer in place["layers"]:
            self.layer(f"model.layers.{layer}.", tp, ep, etp)

    def take(self, name, elements):
        flat = np.asarray(elements, dtype=int).ravel()
        if flat.size:
            self.held.setdefault(name, set()).update(flat.tolist())

    def vocabulary(self, name, tp):
        rows = list(self._numbers[name])
        multiple = self._parallel.vocab_multiple * self._parallel.tp
        while len(rows) % multiple:
            rows.append(None)  # padding: nobody's canonical byte
        for row in cut(rows, self._parallel.tp, tp):
            if row is not None:
                self.take(name, row)

    def layer(self, prefix, tp, ep, etp):
        ways = self._parallel.tp
        inside = {n: x for n, x in self._numbers.items() if n.startswith(prefix)}
        for kind in ("weight", "bias"):
            names = {letter: f"{prefix}self_attn.{letter}_proj.{kind}" for letter in "qkv"}
            if names["q"] in inside:
                fused = fuse_qkv(self._model, *(inside[names[letter]] for letter in "qkv"))
                for letter, _, elements in cut(fused, ways, tp):
                    self.take(names[letter], elements)
        for name, numbers in inside.items():
            if ".experts." in name:
                self.expert(name, numbers, ep, etp)
            elif name.endswith(("gate_proj.weight", "up_proj.weight")):
                self.take(name, cut(list(numbers), ways, tp))
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                self.take(name, cut(list(numbers.T), ways, tp))
            elif "q_proj" not in name and "k_proj" not in name and "v_proj" not in name:
                self.take(name, numbers)

    def expert(self, name, numbers, ep, etp):
        expert = int(name.split(".experts.")[1].split(".")[0])
        local = self._model.num_experts // self._parallel.ep
        if expert in range(ep * local, (ep + 1) * local):
            rows = list(numbers.T if "down_proj" in name else numbers)
            self.take(name, cut(rows, self._parallel.etp or self._parallel.tp, etp))


def naive_places(model, parallel):
    """Megatron's order of ranks, tp-cp-ep-dp-pp, once for dense layers and once for experts."""
    dense = [
        {"pp": pp, "tp": tp}
        for pp in range(parallel.pp)
        for _dp in range(parallel.dp)
        for _cp in range(parallel.cp)
        for tp in range(parallel.tp)
    ]
    ep, etp = (parallel.ep, parallel.etp or parallel.tp) if model.num_experts else (1, 1)
    replicas = parallel.tp * parallel.cp * parallel.dp // (ep * etp)
    experts = [
        {"ep": e, "etp": t}
        for _pp in range(parallel.pp)
        for _edp in range(replicas)
        for e in range(ep)
        for t in range(etp)
    ]
    owner = stage_of_layers(model.num_layers, parallel)
    return [
        one | two | {"layers": [layer for layer, pp in enumerate(owner) if pp == one["pp"]]}
        for one, two in zip(dense, experts, strict=True)
    ]


def held_elements(layout, rank, numbers):
    held = {}
    for box in layout.boxes_of(rank):
        elements = numbers[box.name][box.slices].ravel().tolist()
        assert not held.get(box.name, set()) & set(elements), f"{box} holds an element twice"
        held.setdefault(box.name, set()).update(elements)
    return held


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_rank_holds_what_the_naive_sharding_gives_it(data):
    config = data.draw(config_strategy(max_layers=4))
    model = read_model(config)
    parallel = data.draw(trainer_strategy(model, max_dp=2))
    layout, numbers = trainer_layout(model, parallel), element_numbers(model)
    places = naive_places(model, parallel)
    assert layout.num_ranks == len(places) == parallel.num_ranks
    seen = {}  # replicas are alike: the oracle is asked once per place, the layout for all
    for rank, place in enumerate(places):
        key = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in place.items())
        if key not in seen:
            seen[key] = NaiveRank(model, numbers, parallel, place).held
        assert held_elements(layout, rank, numbers) == seen[key], (rank, place)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_tensor_parallel_ranks_of_every_architecture(name, tp):
    model = read_model(CONFIGS[name])
    parallel = TrainerParallel(tp=tp, etp=1, ep=tp, vocab_multiple=4)
    layout, numbers = trainer_layout(model, parallel), element_numbers(model)
    for rank, place in enumerate(naive_places(model, parallel)):
        naive = NaiveRank(model, numbers, parallel, place).held
        assert held_elements(layout, rank, numbers) == naive


# ---------------------------------------------------------------------------------------------
# Our own backend's map of megatron parameters
# ---------------------------------------------------------------------------------------------


def megatron_parameters(torch, shape, tp, first, behind, is_first, is_last):
    """Parameters of one rank by name, with the shapes that megatron-core gives them."""
    hidden, head = shape.hidden_size, shape.head_dim
    rows = (shape.num_heads + 2 * shape.num_kv_heads) * head // tp
    ffn, vocab = shape.ffn_hidden_size // tp, -(-shape.vocab_size // tp)
    sizes = {}
    if is_first:
        sizes["embedding.word_embeddings.weight"] = (vocab, hidden)
    for layer in range(behind - first):
        prefix = f"decoder.layers.{layer}."
        sizes[prefix + "input_layernorm.weight"] = (hidden,)
        sizes[prefix + "self_attention.linear_qkv.weight"] = (rows, hidden)
        if shape.has_qkv_bias:
            sizes[prefix + "self_attention.linear_qkv.bias"] = (rows,)
        if shape.has_qk_norm:
            sizes[prefix + "self_attention.q_layernorm.weight"] = (head,)
            sizes[prefix + "self_attention.k_layernorm.weight"] = (head,)
        sizes[prefix + "self_attention.linear_proj.weight"] = (hidden, shape.num_heads * head // tp)
        sizes[prefix + "pre_mlp_layernorm.weight"] = (hidden,)
        sizes[prefix + "mlp.linear_fc1.weight"] = (2 * ffn, hidden)
        sizes[prefix + "mlp.linear_fc2.weight"] = (hidden, ffn)
    if is_last:
        sizes["decoder.final_layernorm.weight"] = (hidden,)
        if not shape.tied_embeddings or not is_first:
            sizes["output_layer.weight"] = (vocab, hidden)
    return {name: torch.empty(size) for name, size in sizes.items()}


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 1, 2), (4, 2, 1), (1, 4, 2)])
def test_dense_boxes_are_those_of_the_backend(name, tp, pp, dp):
    torch = pytest.importorskip("torch")
    from relax_hpc.trainer import hf_weights
    from relax_hpc.trainer.model_config import shape_from_tree

    tree = CONFIGS[name] | {"rms_norm_eps": 1e-6}
    shape, model = shape_from_tree(tree, "here"), read_model(tree)
    layout = trainer_layout(model, TrainerParallel(tp=tp, pp=pp, dp=dp), "float32")
    specs = hf_weights.canonical_specs(shape, "float32")
    assert sorted(layout.specs, key=str) == sorted(specs, key=str)
    each = shape.num_layers // pp
    for rank in range(tp * pp * dp):
        stage, tp_rank = rank // (tp * dp), rank % tp
        first = stage * each
        parameters = megatron_parameters(
            torch, shape, tp, first, first + each, stage == 0, stage == pp - 1
        )
        place = hf_weights.ShardPlace(tp_rank=tp_rank, tp_size=tp, first_layer=first)
        held = hf_weights.held_boxes(parameters, shape, place)
        expected = sorted({item.box for item in held}, key=_by_name)
        assert sorted(layout.boxes_of(rank), key=_by_name) == expected


def _by_name(box):
    return (box.name, box.start)


# ---------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tp": 3}, "num_attention_heads=8 does not divide into 3"),
        ({"pp": 3}, "layers of the other stages=4 does not divide into 3"),
        ({"pp": 2, "vpp": 4}, "virtual"),
        ({"pp": 2, "first_stage_layers": 1, "last_stage_layers": 1}, "first_stage_layers=1"),
        ({"pp": 2, "first_stage_layers": 1, "is_loss_counted": True}, "cannot be counted"),
        ({"ep": 2}, "ranks of a pipeline stage=1 does not divide into 2"),
        ({"dp": 16, "ep": 16}, "num_experts=8 does not divide into 16"),
    ],
)
def test_degrees_that_megatron_refuses(degrees, message):
    with pytest.raises(WeightSyncError, match=message):
        trainer_layout(read_model(CONFIGS["qwen3_moe"]), TrainerParallel(**degrees))


def test_equal_layouts_have_equal_digests_and_others_do_not():
    model = read_model(CONFIGS["qwen3"])
    digests = {
        trainer_layout(model, TrainerParallel(tp=tp, dp=dp), dtype).digest
        for tp, dp, dtype in [(1, 2, "bfloat16"), (2, 1, "bfloat16"), (2, 1, "float32")] * 2
    }
    assert len(digests) == 3


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_bytes_of_a_rank_are_those_of_its_boxes(data):
    model = read_model(data.draw(config_strategy()))
    parallel = data.draw(trainer_strategy(model))
    assume(parallel.num_ranks <= 64)
    layout = trainer_layout(model, parallel, "float32")
    counted = [4 * sum(b.size for b in layout.boxes_of(r)) for r in range(layout.num_ranks)]
    assert layout.rank_bytes.tolist() == counted
