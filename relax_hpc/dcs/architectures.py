"""Which tensors a model has and how each may be split: one table per architecture.

Names and shapes are those of the Hugging Face folder (canonical). `Split` says how tensor and
expert parallelism cut a tensor, in words that hold for Megatron and for SGLang; trainer_layout and
engine_layout turn it into boxes.
"""

import dataclasses
import enum
import typing
from collections.abc import Mapping

from relax_hpc.dcs.layout import TensorSpec, itemsize
from relax_hpc.errors import ConfigError


class Split(enum.Enum):
    """How the ranks of one replica share a tensor."""

    WHOLE = "whole"
    """Every rank has all of it: norms, routers."""
    VOCAB = "vocab"
    """Rows, after padding to a number that the ranks divide; padding is no canonical byte."""
    QUERY = "query"
    """Rows by query heads; fused with key and value."""
    KEY = "key"
    """Rows by key/value heads, the first of the two behind a group's query heads."""
    VALUE = "value"
    """Rows by key/value heads, the second of the two."""
    ROWS = "rows"
    """Output features (column parallel): gate and up, which are fused."""
    COLUMNS = "columns"
    """Input features (row parallel): o_proj, down_proj."""


class Stage(enum.Enum):
    """Where along the pipeline a tensor belongs."""

    EMBEDDING = "embedding"
    LAYER = "layer"
    HEAD = "head"
    """The last stage: final norm and output layer."""


class Part(enum.Enum):
    """Which parallel group cuts a tensor."""

    ATTENTION = "attention"
    MLP = "mlp"
    EXPERT = "expert"
    SHARED_EXPERT = "shared_expert"


class Row(typing.NamedTuple):
    """One line of an architecture's table."""

    name: str
    """Below `model.layers.N.`; of experts below `mlp.experts.N.`."""
    shape: tuple[str, ...]
    """Names of sizes, see `_sizes`."""
    split: Split
    part: Part = Part.ATTENTION


class Tensor(typing.NamedTuple):
    """One canonical tensor of a model."""

    name: str
    shape: tuple[int, ...]
    split: Split
    part: Part
    stage: Stage
    layer: int = -1
    """Layer number; -1 outside of the layers."""
    expert: int = -1
    """Expert number; -1: not of a routed expert."""


_NORMS = (
    Row("input_layernorm.weight", ("hidden",), Split.WHOLE),
    Row("post_attention_layernorm.weight", ("hidden",), Split.WHOLE),
)
_ATTENTION = (
    Row("self_attn.q_proj.weight", ("q", "hidden"), Split.QUERY),
    Row("self_attn.k_proj.weight", ("kv", "hidden"), Split.KEY),
    Row("self_attn.v_proj.weight", ("kv", "hidden"), Split.VALUE),
    Row("self_attn.o_proj.weight", ("hidden", "q"), Split.COLUMNS),
)
_QKV_BIAS = (
    Row("self_attn.q_proj.bias", ("q",), Split.QUERY),
    Row("self_attn.k_proj.bias", ("kv",), Split.KEY),
    Row("self_attn.v_proj.bias", ("kv",), Split.VALUE),
)
_O_BIAS = (Row("self_attn.o_proj.bias", ("hidden",), Split.WHOLE),)
_QK_NORM = (
    Row("self_attn.q_norm.weight", ("head",), Split.WHOLE),
    Row("self_attn.k_norm.weight", ("head",), Split.WHOLE),
)


def _gated(prefix: str, size: str, part: Part) -> tuple[Row, ...]:
    return (
        Row(f"{prefix}gate_proj.weight", (size, "hidden"), Split.ROWS, part),
        Row(f"{prefix}up_proj.weight", (size, "hidden"), Split.ROWS, part),
        Row(f"{prefix}down_proj.weight", ("hidden", size), Split.COLUMNS, part),
    )


_DENSE = _gated("mlp.", "ffn", Part.MLP)
_ROUTER = (Row("mlp.gate.weight", ("experts", "hidden"), Split.WHOLE, Part.MLP),)
_SHARED = (
    *_gated("mlp.shared_expert.", "shared_ffn", Part.SHARED_EXPERT),
    Row("mlp.shared_expert_gate.weight", ("one", "hidden"), Split.WHOLE, Part.SHARED_EXPERT),
)


class Architecture(typing.NamedTuple):
    """The table of one `model_type`."""

    layer: tuple[Row, ...]
    """In every layer."""
    dense: tuple[Row, ...] = _DENSE
    """In layers without experts."""
    sparse: tuple[Row, ...] = ()
    """In layers with experts, beside them."""
    expert: tuple[Row, ...] = ()
    """In every routed expert."""
    qkv_bias_key: str = "attention_bias"
    """Key of config.json that switches the bias of q, k and v."""
    qkv_bias_default: bool = False
    has_o_bias: bool = True
    """With a bias of q, k and v comes one of o."""


_EXPERT = _gated("", "expert_ffn", Part.EXPERT)
ARCHITECTURES: typing.Final[Mapping[str, Architecture]] = {
    "llama": Architecture(_NORMS + _ATTENTION),
    "qwen2": Architecture(
        _NORMS + _ATTENTION, qkv_bias_key="", qkv_bias_default=True, has_o_bias=False
    ),
    "qwen3": Architecture(_NORMS + _ATTENTION + _QK_NORM),
    "qwen2_moe": Architecture(
        _NORMS + _ATTENTION,
        sparse=_ROUTER + _SHARED,
        expert=_EXPERT,
        qkv_bias_key="qkv_bias",
        qkv_bias_default=True,
        has_o_bias=False,
    ),
    "qwen3_moe": Architecture(_NORMS + _ATTENTION + _QK_NORM, sparse=_ROUTER, expert=_EXPERT),
}
"""By `model_type` of config.json."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model as its layouts see it: sizes and canonical tensors."""

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int
    """Routed experts of a sparse layer; 0 = dense."""
    is_tied: bool
    """The output layer is the embedding; there is no `lm_head.weight`."""
    tensors: tuple[Tensor, ...]
    """Embedding, layers in order (experts behind the rest of their layer), final norm, head."""

    def specs(self, dtype: str = "bfloat16") -> list[TensorSpec]:
        """Tensors as the weight service lists them, all of one dtype."""
        itemsize(dtype)
        return [TensorSpec(tensor.name, dtype, tensor.shape) for tensor in self.tensors]


def read_model(config: Mapping[str, typing.Any], where: str = "config.json") -> Model:
    """List the canonical tensors of a parsed `config.json`.

    Raises:
        ConfigError: an architecture without a table, an option that changes the tensors and that
            no table knows (quantised weights, biases of the MLP), or a missing key.
    """
    model_type = str(config.get("model_type"))
    if model_type not in ARCHITECTURES:
        raise ConfigError(
            f"{where}: model_type={model_type!r} has no table; known: {', '.join(ARCHITECTURES)}"
        )
    for key in ("quantization_config", "mlp_bias"):
        if config.get(key):
            raise ConfigError(f"{where}: {key}={config[key]!r} is not supported; use plain weights")
    try:
        sizes = _sizes(config)
        return _model(ARCHITECTURES[model_type], config, sizes)
    except KeyError as err:
        raise ConfigError(f"{where}: key {err} is missing; copy the model's folder again") from err


def _sizes(config: Mapping[str, typing.Any]) -> dict[str, int]:
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    head_dim, kv_heads = config.get("head_dim"), config.get("num_key_value_heads")
    head = hidden // heads if head_dim is None else int(head_dim)
    return {
        "one": 1,
        "hidden": hidden,
        "head": head,
        "q": heads * head,
        "kv": (heads if kv_heads is None else int(kv_heads)) * head,
        "ffn": int(config["intermediate_size"]),
        "vocab": int(config["vocab_size"]),
        "experts": int(config.get("num_experts", 0)),
        "expert_ffn": int(config.get("moe_intermediate_size", 0)),
        "shared_ffn": int(config.get("shared_expert_intermediate_size", 0)),
    }


def _model(table: Architecture, config: Mapping[str, typing.Any], sizes: dict[str, int]) -> Model:
    num_layers, is_tied = int(config["num_hidden_layers"]), bool(config.get("tie_word_embeddings"))
    num_experts = sizes["experts"] if table.expert else 0
    bias = config.get(table.qkv_bias_key, table.qkv_bias_default)
    layer_rows = table.layer
    if bias:
        layer_rows += _QKV_BIAS + (_O_BIAS if table.has_o_bias else ())
    vocab = (sizes["vocab"], sizes["hidden"])
    tensors = [_outer("model.embed_tokens.weight", vocab, Split.VOCAB, Stage.EMBEDDING)]
    for layer in range(num_layers):
        is_sparse = num_experts > 0 and _is_sparse(config, layer)
        rows = layer_rows + (table.sparse if is_sparse else table.dense)
        prefix = f"model.layers.{layer}."
        tensors += [_tensor(row, prefix, sizes, layer) for row in rows]
        for expert in range(num_experts if is_sparse else 0):
            inner = f"{prefix}mlp.experts.{expert}."
            tensors += [_tensor(row, inner, sizes, layer, expert) for row in table.expert]
    tensors.append(_outer("model.norm.weight", vocab[1:], Split.WHOLE, Stage.HEAD))
    if not is_tied:
        tensors.append(_outer("lm_head.weight", vocab, Split.VOCAB, Stage.HEAD))
    return Model(
        model_type=str(config["model_type"]),
        num_layers=num_layers,
        num_heads=int(config["num_attention_heads"]),
        num_kv_heads=sizes["kv"] // sizes["head"],
        head_dim=sizes["head"],
        vocab_size=sizes["vocab"],
        num_experts=num_experts,
        is_tied=is_tied,
        tensors=tuple(tensors),
    )


def _is_sparse(config: Mapping[str, typing.Any], layer: int) -> bool:
    """As transformers' Qwen2MoeDecoderLayer and Qwen3MoeDecoderLayer decide."""
    step = int(config.get("decoder_sparse_step", 1))
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % step == 0


def _outer(name: str, shape: tuple[int, ...], split: Split, stage: Stage) -> Tensor:
    return Tensor(name, shape, split, Part.ATTENTION, stage)


def _tensor(row: Row, prefix: str, sizes: dict[str, int], layer: int, expert: int = -1) -> Tensor:
    shape = tuple(sizes[size] for size in row.shape)
    return Tensor(prefix + row.name, shape, row.split, row.part, Stage.LAYER, layer, expert)
