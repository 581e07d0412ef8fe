"""A small decoder-only transformer for inference: Qwen3, Qwen2 and Llama from Hugging Face folders.

Shapes: B sequences, T new tokens of each (padded), L context length (padded), H heads, K key/value
heads, D head dim, V vocabulary. Keys and values of all sequences live in one pool of token slots;
a sequence is a row of slot numbers, so that sequences of any length share the memory, and the
samples of one prompt share its slots. Slot 0 takes the writes of padding and is always masked.
"""

import dataclasses
import json
import math
import typing
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from relax_hpc.errors import EngineError
from relax_hpc.rollout.engine import WeightTensor

_FAMILIES = ("qwen3", "qwen2", "llama")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Architecture, read from a Hugging Face config.json."""

    family: str
    vocab_size: int
    hidden: int
    ffn: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: dict[str, typing.Any]
    """rope_theta, rope_type (default, linear, llama3) and the parameters of that type."""
    max_positions: int
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    """The output projection is the embedding; lm_head.weight is then no tensor of its own."""


def read_decoder_config(folder: Path) -> DecoderConfig:
    """Read FOLDER/config.json.

    Raises:
        EngineError: no such file, or an architecture that this decoder does not compute exactly.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise EngineError(f"{path}: cannot read the model's configuration: {err}") from err
    _refuse_unsupported(raw, path)
    family, heads = raw["model_type"], int(raw["num_attention_heads"])
    attention_bias = bool(raw.get("attention_bias", False))
    return DecoderConfig(
        family=family,
        vocab_size=int(raw["vocab_size"]),
        hidden=int(raw["hidden_size"]),
        ffn=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        norm_eps=float(raw["rms_norm_eps"]),
        rope=_rope_parameters(raw),
        max_positions=int(raw["max_position_embeddings"]),
        # Qwen2 has biases on q, k, v and none on o; the others follow attention_bias for all four.
        qkv_bias=family == "qwen2" or attention_bias,
        attention_out_bias=family != "qwen2" and attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        tied=bool(raw.get("tie_word_embeddings", False)),
    )


def _rope_parameters(raw: dict[str, typing.Any]) -> dict[str, typing.Any]:
    # transformers 5 writes rope_parameters; earlier versions rope_theta and rope_scaling.
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    return rope


def _refuse_unsupported(raw: dict[str, typing.Any], path: Path) -> None:
    problems = []
    if raw.get("model_type") not in _FAMILIES:
        problems.append(f"model_type={raw.get('model_type')!r} (has {', '.join(_FAMILIES)})")
    if raw.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act={raw['hidden_act']!r} (has silu)")
    if raw.get("use_sliding_window"):
        problems.append("use_sliding_window=true")
    rope_type = _rope_parameters(raw)["rope_type"]
    if rope_type not in _ROPE_TYPES:
        problems.append(f"rope_type={rope_type!r} (has {', '.join(_ROPE_TYPES)})")
    if problems:
        raise EngineError(
            f"{path}: the embedded engine does not support {'; '.join(problems)}: "
            'use rollout.engine = "sglang"'
        )


def canonical_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every Hugging Face tensor of the model."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {}
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes["model.embed_tokens.weight"] = (c.vocab_size, c.hidden)
    for layer in range(c.num_layers):
        prefix = f"model.layers.{layer}."
        linears = [
            ("self_attn.q_proj", q, c.hidden, c.qkv_bias),
            ("self_attn.k_proj", kv, c.hidden, c.qkv_bias),
            ("self_attn.v_proj", kv, c.hidden, c.qkv_bias),
            ("self_attn.o_proj", c.hidden, q, c.attention_out_bias),
            ("mlp.gate_proj", c.ffn, c.hidden, c.mlp_bias),
            ("mlp.up_proj", c.ffn, c.hidden, c.mlp_bias),
            ("mlp.down_proj", c.hidden, c.ffn, c.mlp_bias),
        ]
        for name, rows, columns, bias in linears:
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        norms = {"input_layernorm": c.hidden, "post_attention_layernorm": c.hidden}
        if c.qk_norm:
            norms |= {"self_attn.q_norm": c.head_dim, "self_attn.k_norm": c.head_dim}
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
    shapes["model.norm.weight"] = (c.hidden,)
    if not c.tied:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden)
    return shapes


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderWeights:
    """One whole version of the weights, in the layout that the forward pass reads."""

    embedding: torch.Tensor
    layers: list[_Layer]
    norm: torch.Tensor
    head: torch.Tensor


def load_weights(
    config: DecoderConfig,
    tensors: Mapping[str, WeightTensor],
    dtype: torch.dtype,
    device: torch.device,
) -> DecoderWeights:
    """Copy a version out of host memory; nothing of `tensors` is referenced afterwards.

    Raises:
        EngineError: names, shapes, dtypes or byte counts are not those of the model.
    """
    _check_names(config, tensors)
    shapes = canonical_shapes(config)

    def get(*names: str) -> torch.Tensor:
        # One weight at a time: the peak is one version and one tensor, not two versions.
        parts = [_as_torch(name, tensors[name], shapes[name]) for name in names]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.to(device=device, dtype=dtype)

    embedding = get("model.embed_tokens.weight")
    return DecoderWeights(
        embedding=embedding,
        layers=[_load_layer(config, get, index) for index in range(config.num_layers)],
        norm=get("model.norm.weight"),
        head=embedding if config.tied else get("lm_head.weight"),
    )


def _check_names(config: DecoderConfig, tensors: Mapping[str, WeightTensor]) -> None:
    expected = set(canonical_shapes(config))
    missing, unknown = expected - set(tensors), set(tensors) - expected
    if config.tied:
        unknown.discard("lm_head.weight")  # some exporters write the tied copy
    if missing or unknown:
        raise EngineError(
            f"weights refused: {len(missing)} tensors missing {sorted(missing)[:3]}, "
            f"{len(unknown)} unknown {sorted(unknown)[:3]}, expected {len(expected)}; "
            "trainer and engine must use the same model.path"
        )


def _as_torch(name: str, tensor: WeightTensor, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or tuple(tensor.shape) != shape:
        raise EngineError(
            f"weights refused: {name} is {tensor.dtype} {tuple(tensor.shape)}, "
            f"expected {'/'.join(_DTYPES)} {shape}"
        )
    out = torch.empty(shape, dtype=dtype)
    raw = out.view(-1).view(torch.uint8).numpy()
    if tensor.data.nbytes != raw.nbytes:
        raise EngineError(
            f"weights refused: {name} has {tensor.data.nbytes} bytes, expected {raw.nbytes}"
        )
    np.copyto(raw, tensor.data.reshape(-1).view(np.uint8))
    return out


def _load_layer(config: DecoderConfig, get: Callable[..., torch.Tensor], index: int) -> _Layer:
    attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
    qkv = [f"{attention}{part}_proj" for part in "qkv"]
    gate_up = [f"{mlp}gate_proj", f"{mlp}up_proj"]

    def biases(wanted: bool, *names: str) -> torch.Tensor | None:
        return get(*(f"{name}.bias" for name in names)) if wanted else None

    return _Layer(
        input_norm=get(f"model.layers.{index}.input_layernorm.weight"),
        qkv=get(*(f"{name}.weight" for name in qkv)),
        qkv_bias=biases(config.qkv_bias, *qkv),
        q_norm=get(f"{attention}q_norm.weight") if config.qk_norm else None,
        k_norm=get(f"{attention}k_norm.weight") if config.qk_norm else None,
        out=get(f"{attention}o_proj.weight"),
        out_bias=biases(config.attention_out_bias, f"{attention}o_proj"),
        post_norm=get(f"model.layers.{index}.post_attention_layernorm.weight"),
        gate_up=get(*(f"{name}.weight" for name in gate_up)),
        gate_up_bias=biases(config.mlp_bias, *gate_up),
        down=get(f"{mlp}down_proj.weight"),
        down_bias=biases(config.mlp_bias, f"{mlp}down_proj"),
    )


class KvPool:
    """Keys and values of `num_slots` tokens in every layer, allocated once."""

    def __init__(
        self, config: DecoderConfig, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.num_layers, num_slots + 1, config.num_kv_heads * config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self._free = np.arange(num_slots, 0, -1, dtype=np.int32)
        self._num_free = num_slots

    @property
    def num_free(self) -> int:
        """Slots that no sequence holds."""
        return self._num_free

    def take(self, count: int) -> np.ndarray:
        """Take slots: int32 [count]. The caller has checked `num_free`."""
        assert count <= self._num_free, "the scheduler checks num_free first"
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count].copy()

    def put_back(self, slots: np.ndarray) -> None:
        """Return slots to the pool."""
        self._free[self._num_free : self._num_free + slots.shape[0]] = slots
        self._num_free += slots.shape[0]


@dataclasses.dataclass(frozen=True, slots=True)
class ExtendBatch:
    """New tokens of some sequences: one decode step (T = 1) or a piece of prefill."""

    tokens: torch.Tensor
    """int64 [B, T]; padding: any token."""
    positions: torch.Tensor
    """int64 [B, T], place in the sequence; padding: 0."""
    write_slots: torch.Tensor
    """int64 [B, T]; padding: 0."""
    context_slots: torch.Tensor
    """int64 [B, L], slots of positions 0 .. L-1, the new tokens included; padding: any."""
    last: torch.Tensor
    """int64 [B], index into T of the last real token."""


class Decoder:
    """The forward pass over a pool. Not thread-safe: one thread owns the pool."""

    def __init__(self, config: DecoderConfig, device: torch.device) -> None:
        self.config = config
        self._inverse_frequency, self._rope_scale = _ROPE_TYPES[config.rope["rope_type"]](config)
        self._inverse_frequency = self._inverse_frequency.to(device)

    def extend(self, weights: DecoderWeights, pool: KvPool, batch: ExtendBatch) -> torch.Tensor:
        """Write keys and values of the new tokens; return logits after each sequence's last one.

        Returns: float32 [B, V].
        """
        x = F.embedding(batch.tokens, weights.embedding)
        cos, sin = self._rotations(batch.positions, x.dtype)
        mask = self._mask(batch, x.dtype)
        for index, layer in enumerate(weights.layers):
            x = x + self._attention(
                layer, self._norm(x, layer.input_norm), (cos, sin), mask, batch, pool, index
            )
            hidden = self._norm(x, layer.post_norm)
            gate, up = F.linear(hidden, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
        x = x[torch.arange(x.shape[0], device=x.device), batch.last]
        return F.linear(self._norm(x, weights.norm), weights.head).float()

    def _attention(
        self,
        layer: _Layer,
        x: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
        batch: ExtendBatch,
        pool: KvPool,
        index: int,
    ) -> torch.Tensor:
        c = self.config
        b, t, _ = x.shape
        groups, kv_width = c.num_heads // c.num_kv_heads, c.num_kv_heads * c.head_dim
        qkv = F.linear(x, layer.qkv, layer.qkv_bias)
        # narrow, not split: as fast, and torch has types for it.
        q = qkv.narrow(-1, 0, c.num_heads * c.head_dim)
        k = qkv.narrow(-1, c.num_heads * c.head_dim, kv_width)
        v = qkv.narrow(-1, c.num_heads * c.head_dim + kv_width, kv_width)
        q, k = q.view(b, t, c.num_heads, c.head_dim), k.view(b, t, c.num_kv_heads, c.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        q, k = _rotate(q, *rotations), _rotate(k, *rotations)
        keys, values = pool.keys[index], pool.values[index]
        write = batch.write_slots.view(-1)
        keys[write] = k.reshape(b * t, kv_width)
        values[write] = v.reshape(b * t, kv_width)
        context = batch.context_slots.view(-1)
        shape = (b, -1, c.num_kv_heads, c.head_dim)
        # The query heads of one key/value head become rows of one attention problem, so that keys
        # and values are never repeated: [B, K, groups * T, D] x [B, K, L, D].
        q = q.view(b, t, c.num_kv_heads, groups, c.head_dim).permute(0, 2, 3, 1, 4)
        out = F.scaled_dot_product_attention(
            q.reshape(b, c.num_kv_heads, groups * t, c.head_dim),
            keys.index_select(0, context).view(shape).transpose(1, 2),
            values.index_select(0, context).view(shape).transpose(1, 2),
            attn_mask=mask,
        )
        out = out.view(b, c.num_kv_heads, groups, t, c.head_dim).permute(0, 3, 1, 2, 4)
        return F.linear(out.reshape(b, t, c.num_heads * c.head_dim), layer.out, layer.out_bias)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # Statistics in float32 and the product in the model's dtype, as the reference models do.
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.config.norm_eps)
        return weight * y.to(x.dtype)

    def _rotations(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions.float()[..., None] * self._inverse_frequency
        angles = torch.cat([angles, angles], dim=-1)[:, :, None, :]
        scale = self._rope_scale
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

    def _mask(self, batch: ExtendBatch, dtype: torch.dtype) -> torch.Tensor:
        length = batch.context_slots.shape[1]
        keys = torch.arange(length, device=batch.positions.device)
        hidden = keys[None, None, :] > batch.positions[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        mask.masked_fill_(hidden, float("-inf"))
        groups = self.config.num_heads // self.config.num_kv_heads
        return mask.repeat(1, groups, 1)[:, None]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _default_frequencies(config: DecoderConfig) -> tuple[torch.Tensor, float]:
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    return 1.0 / float(config.rope["rope_theta"]) ** exponents, 1.0


def _linear_frequencies(config: DecoderConfig) -> tuple[torch.Tensor, float]:
    frequencies, scale = _default_frequencies(config)
    return frequencies / float(config.rope["factor"]), scale


def _llama3_frequencies(config: DecoderConfig) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, smooth in between."""
    rope = config.rope
    frequencies, scale = _default_frequencies(config)
    old_length = float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = old_length * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / float(rope["factor"]) + smooth * frequencies, scale


_ROPE_TYPES: dict[str, Callable[[DecoderConfig], tuple[torch.Tensor, float]]] = {
    "default": _default_frequencies,
    "linear": _linear_frequencies,
    "llama3": _llama3_frequencies,
}
