"""The model's architecture as `config.json` of its Hugging Face folder states it.

Read as plain JSON: importing transformers takes seconds, and its objects moved fields between
versions (`rope_theta` into `rope_parameters` in 5.0). What we cannot train exactly is refused here.
"""

import dataclasses
import json
import typing
from pathlib import Path

from relax_hpc.errors import ConfigError

SUPPORTED = ("qwen3", "qwen2", "llama")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Architecture of a dense decoder: Qwen3, Qwen2 or Llama."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling_factor: float = 0.0
    """Llama 3.1 long-context scaling of RoPE; 0 = none."""
    tied_embeddings: bool = False

    @property
    def has_qkv_bias(self) -> bool:
        """Qwen2 adds a bias to q, k and v."""
        return self.model_type == "qwen2"

    @property
    def has_qk_norm(self) -> bool:
        """Qwen3 normalises each head's q and k."""
        return self.model_type == "qwen3"

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


def read_model_shape(folder: Path) -> ModelShape:
    """Read `config.json` of a model folder.

    Raises:
        ConfigError: no such file, or an architecture (or option of it) that is not supported.
    """
    path = folder / "config.json"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:  # ValueError: no JSON, no UTF-8
        raise ConfigError(
            f"model.path={folder}: {path} cannot be read ({err}); "
            "point model.path at a folder in Hugging Face format"
        ) from err
    if not isinstance(tree, dict):
        raise ConfigError(f"model.path={folder}: {path} holds {type(tree).__name__}, not an object")
    try:
        return shape_from_tree(tree, where=str(path))
    except (KeyError, TypeError, ValueError) as err:
        raise ConfigError(
            f"model.path={folder}: {path} lacks a key or has a wrong value ({err!r})"
        ) from err


def shape_from_tree(tree: dict[str, typing.Any], where: str) -> ModelShape:
    """Build the shape from the parsed `config.json`; errors as of `read_model_shape`."""
    model_type = tree.get("model_type")
    if model_type not in SUPPORTED:
        raise ConfigError(f"{where}: model_type={model_type!r}; supported: {', '.join(SUPPORTED)}")
    _refuse_unsupported(tree, where)
    heads = int(tree["num_attention_heads"])
    rope_theta, rope_factor = _rope(tree, where)
    head_dim = tree.get("head_dim")
    kv_heads = tree.get("num_key_value_heads")
    return ModelShape(
        model_type=model_type,
        num_layers=int(tree["num_hidden_layers"]),
        hidden_size=int(tree["hidden_size"]),
        ffn_hidden_size=int(tree["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else int(kv_heads),
        head_dim=int(tree["hidden_size"]) // heads if head_dim is None else int(head_dim),
        vocab_size=int(tree["vocab_size"]),
        max_positions=int(tree.get("max_position_embeddings", 32768)),
        norm_eps=float(tree["rms_norm_eps"]),
        rope_theta=rope_theta,
        rope_scaling_factor=rope_factor,
        tied_embeddings=bool(tree.get("tie_word_embeddings", False)),
    )


def _refuse_unsupported(tree: dict[str, typing.Any], where: str) -> None:
    wrong = {
        "attention_bias": tree.get("attention_bias", False),
        "mlp_bias": tree.get("mlp_bias", False),
        "use_sliding_window": tree.get("use_sliding_window", False),
    }
    for name, value in wrong.items():
        if value:
            raise ConfigError(f"{where}: {name}={value!r} is not supported, only false is")
    act = tree.get("hidden_act", "silu")
    if act != "silu":
        raise ConfigError(f"{where}: hidden_act={act!r} is not supported, only 'silu' is")


# The only values of Llama 3.1 that megatron-core's RoPE scaling knows.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _rope(tree: dict[str, typing.Any], where: str) -> tuple[float, float]:
    """Return (theta, scaling factor or 0.0); transformers 4 and 5 write different keys."""
    rope = tree.get("rope_parameters") or tree.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", tree.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, 0.0
    matches = all(rope.get(key) == value for key, value in _LLAMA3_ROPE.items())
    if kind != "llama3" or not matches:
        raise ConfigError(f"{where}: RoPE {rope} is not supported; known: default, llama3 (3.1)")
    return theta, float(rope["factor"])
