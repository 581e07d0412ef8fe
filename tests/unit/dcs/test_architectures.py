"""Tables of architectures: against transformers' own models, and what they refuse."""

import pytest
from hypothesis import given, settings

from relax_hpc.dcs.architectures import ARCHITECTURES, Part, Split, Stage, read_model
from relax_hpc.errors import ConfigError
from tests.unit.dcs.weight_shapes import CONFIGS, config_strategy

# What the names stand for is asked of transformers, which is written apart.
_CLASSES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
}


def hugging_face_shapes(config):
    """Oracle: parameters of the model that transformers builds, without memory for them."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    stem = _CLASSES[config["model_type"]]
    keys = {k: v for k, v in config.items() if k != "model_type"}
    made = getattr(transformers, f"{stem}Config")(**keys)
    with torch.device("meta"):
        model = getattr(transformers, f"{stem}ForCausalLM")(made)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return _unfused(shapes)


def _unfused(shapes):
    """transformers 5 stacks the experts in memory; files keep one tensor per expert."""
    found = {}
    for name, shape in shapes.items():
        prefix, stacked, what = name.partition(".experts.")
        if not stacked or what[0].isdigit():
            found[name] = shape
            continue
        num_experts, rows, columns = shape
        for expert in range(num_experts):
            inner = f"{prefix}.experts.{expert}."
            if what.startswith("gate_up_proj"):
                found[inner + "gate_proj.weight"] = (rows // 2, columns)
                found[inner + "up_proj.weight"] = (rows // 2, columns)
            else:
                found[inner + "down_proj.weight"] = (rows, columns)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes_are_those_of_transformers(name):
    config = CONFIGS[name]
    ours = {tensor.name: tensor.shape for tensor in read_model(config).tensors}
    assert ours == hugging_face_shapes(config)


def test_all_tables_are_compared_with_transformers():
    assert {config["model_type"] for config in CONFIGS.values()} == set(ARCHITECTURES)


@settings(max_examples=50, deadline=None)
@given(config_strategy())
def test_tensors_are_unique_and_in_order_of_the_pipeline(config):
    model = read_model(config)
    assert len({tensor.name for tensor in model.tensors}) == len(model.tensors)
    stages = [tensor.stage for tensor in model.tensors]
    assert stages == sorted(stages, key=list(Stage).index)
    layers = [tensor.layer for tensor in model.tensors if tensor.stage is Stage.LAYER]
    assert layers == sorted(layers) and set(layers) == set(range(model.num_layers))
    assert ("lm_head.weight" in {t.name for t in model.tensors}) is not model.is_tied
    for tensor in model.tensors:
        assert (tensor.expert >= 0) is (tensor.part is Part.EXPERT)
        assert len(tensor.shape) == 2 or tensor.split is not Split.COLUMNS


def test_the_number_of_parameters_of_known_models():
    def parameters(config):
        return sum(spec.size for spec in read_model(config).specs())

    large = {"model_type": "qwen3_moe", "num_hidden_layers": 94, "hidden_size": 4096}
    large |= {"intermediate_size": 12288, "moe_intermediate_size": 1536, "head_dim": 128}
    large |= {"num_attention_heads": 64, "num_key_value_heads": 4, "vocab_size": 151936}
    large |= {"num_experts": 128, "mlp_only_layers": []}
    assert parameters(large) == 235_093_634_560  # model card of Qwen3-235B-A22B: 235B
    small = {"model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896}
    small |= {"intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
    small |= {"vocab_size": 151936, "tie_word_embeddings": True}
    assert parameters(small) == 494_032_768  # Qwen2.5-0.5B: 0.49B


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, r"'gpt2' has no table; known: llama, qwen2"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_models_without_a_table_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        read_model(CONFIGS["llama"] | change)


def test_a_missing_key_is_named():
    config = {k: v for k, v in CONFIGS["qwen3"].items() if k != "vocab_size"}
    with pytest.raises(ConfigError, match=r"model/config.json: key 'vocab_size' is missing"):
        read_model(config, where="model/config.json")
