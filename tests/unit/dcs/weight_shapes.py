"""Small models and random ones for the tests of layouts; imported by them."""

import numpy as np
from hypothesis import strategies as st

from relax_hpc.dcs.engine_layout import EngineParallel
from relax_hpc.dcs.trainer_layout import TrainerParallel

_BASE = {
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "vocab_size": 37,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts": 8, "moe_intermediate_size": 8, "num_experts_per_tok": 2}

CONFIGS = {
    "llama": {"model_type": "llama"} | _BASE,
    "llama-tied-bias": {"model_type": "llama"}
    | _BASE
    | {"tie_word_embeddings": True, "attention_bias": True},
    "qwen2": {"model_type": "qwen2"} | {k: v for k, v in _BASE.items() if k != "head_dim"},
    "qwen3": {"model_type": "qwen3"} | _BASE | {"tie_word_embeddings": True},
    "qwen2_moe": {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 40}
    | {k: v for k, v in _BASE.items() if k != "head_dim"}
    | _MOE,
    "qwen3_moe": {"model_type": "qwen3_moe"} | _BASE | _MOE | {"mlp_only_layers": [1]},
    "qwen3_moe-every-second": {"model_type": "qwen3_moe", "decoder_sparse_step": 2} | _BASE | _MOE,
}


@st.composite
def config_strategy(draw, *, max_layers=6):
    """A config.json of sizes that every degree up to 8 divides, except the vocabulary."""
    kind = draw(st.sampled_from(["llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"]))
    heads = draw(st.sampled_from([8, 16, 24]))
    config = {
        "model_type": kind,
        "num_hidden_layers": draw(st.integers(1, max_layers)),
        "hidden_size": draw(st.sampled_from([3, 16])),
        "intermediate_size": 8 * draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4, 8])),
        "head_dim": draw(st.sampled_from([4, 8])),
        "vocab_size": draw(st.integers(1, 150)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if kind.endswith("moe"):
        config["num_experts"] = draw(st.sampled_from([8, 16]))
        config["moe_intermediate_size"] = 8 * draw(st.integers(1, 2))
        config["shared_expert_intermediate_size"] = 8
        config["decoder_sparse_step"] = draw(st.integers(1, 2))
    return config


def random_tensors(model, seed):
    """Whole canonical tensors of random 16-bit words."""
    generator = np.random.default_rng(seed)
    return {
        tensor.name: generator.integers(0, 2**16, tensor.shape, dtype=np.uint16)
        for tensor in model.tensors
    }


@st.composite
def trainer_strategy(draw, model, *, max_dp=4):
    """Degrees of Megatron that fit the model: TP 1-8, PP 1-4, VPP, EP 1-8, ETP, uneven stages."""
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    replica = tp * draw(st.integers(1, max_dp)) * (cp := draw(st.integers(1, 2)))
    ep, etp = 1, draw(st.sampled_from([0, 1]))
    if model.num_experts:
        etp = draw(st.sampled_from([0, 1, 2]))
        if replica % (etp or tp):
            etp = 1
        fitting = [n for n in (1, 2, 4, 8) if replica % (n * (etp or tp)) == 0]
        ep = draw(st.sampled_from(fitting))
    pipeline = draw(_pipeline(model.num_layers))
    multiple = draw(st.sampled_from([1, 4, 128]))
    dp = replica // tp // cp
    return TrainerParallel(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp, vocab_multiple=multiple, **pipeline)


@st.composite
def _pipeline(draw, num_layers):
    """Any pipeline that Megatron takes: drawn from all of them."""
    found = [
        {"pp": pp, "vpp": vpp, "first_stage_layers": first, "last_stage_layers": last}
        | {"is_embedding_counted": counted, "is_loss_counted": counted}
        for pp in range(1, 5)
        for vpp in (1, 2)
        for first in range(3)
        for last in range(3)
        for counted in (False, True)
        if _fits(num_layers, pp, vpp, first, last, counted)
    ]
    return draw(st.sampled_from(found))


def _fits(num_layers, pp, vpp, first, last, counted):
    if pp == 1:
        return not (first or last or counted) and num_layers % vpp == 0
    others = pp - bool(first) - bool(last)
    left = num_layers - first - last + 2 * counted
    if ((first or last) and counted) or left < 0 or (others == 0 and left):
        return False
    if others and left % others:
        return False
    each = left // others if others else 0
    sizes = [first or each, last or each, each if others else 0]
    return all(size % vpp == 0 for size in sizes) and (not counted or each // vpp >= 1)


@st.composite
def engine_strategy(draw, model, *, max_engines=3):
    """Degrees of SGLang that fit the model: TP 1-8, PP 1-4, EP, DP attention."""
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    ways = [n for n in (1, 2, 4, 8) if tp % n == 0]
    return EngineParallel(
        tp=tp,
        pp=draw(st.integers(1, min(4, model.num_layers))),
        ep=draw(st.sampled_from(ways)) if model.num_experts else 1,
        attention_dp=draw(st.sampled_from(ways)),
        num_engines=draw(st.integers(1, max_engines)),
        is_lm_head_dp=draw(st.booleans()),
        is_shared_expert_whole=draw(st.booleans()),
        vocab_multiple=draw(st.sampled_from([1, 64])),
    )
