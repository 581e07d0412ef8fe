"""One map between Hugging Face tensors and megatron parameters; loading, publishing, export use it.

For each local megatron parameter the map lists `Held` boxes: this rectangle of that canonical
tensor lives in this (strided) view of the parameter. Copying box -> view loads a model, copying
view -> box publishes one; nothing is gathered, for any TP x PP.

megatron fuses and shards: linear_qkv holds, per key/value head, its query heads, then k, then v
(each head_dim rows); linear_fc1 holds this rank's gate rows, then its up rows; embeddings are
padded to a multiple of TP, the padding rows are zero and belong to no box.
Source of the layout: megatron-core 0.16 to 0.19, transformer/attention.py and mlp.py.
"""

import contextlib
import dataclasses
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from relax_hpc.dcs.layout import Box, TensorSpec
from relax_hpc.dcs.shares import share
from relax_hpc.errors import ConfigError
from relax_hpc.trainer.model_config import ModelShape


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """A box of a canonical tensor and where it lives in a local parameter."""

    box: Box
    view: torch.Tensor
    """View into the parameter with the box's elements in the box's order (any strides)."""
    is_copy: bool = False
    """True: loaded but never published; another parameter holds the original (tied output layer of
    the last pipeline stage)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlace:
    """Which part of the model this rank's parameters are."""

    tp_rank: int
    tp_size: int
    first_layer: int
    """Global number of the local layer 0 of this pipeline stage."""


def padded_vocab_size(shape: ModelShape, tp_size: int) -> int:
    """Vocabulary rows of the model: the next multiple of the tensor parallel size."""
    return -(-shape.vocab_size // tp_size) * tp_size


def check_parallel(shape: ModelShape, tp_size: int, pp_size: int) -> None:
    """Refuse parallel sizes that do not divide the model; raises ConfigError with valid values."""
    for name, count in (("num_key_value_heads", shape.num_kv_heads),):
        if count % tp_size:
            raise ConfigError(f"train.tp={tp_size}: must divide the model's {name}={count}")
    if shape.ffn_hidden_size % tp_size:
        raise ConfigError(f"train.tp={tp_size}: must divide {shape.ffn_hidden_size=}")
    if shape.num_layers % pp_size:
        raise ConfigError(f"train.pp={pp_size}: must divide the model's {shape.num_layers} layers")


def canonical_specs(shape: ModelShape, dtype: str) -> list[TensorSpec]:
    """List all tensors of the model under their Hugging Face names; tied embeddings occur once."""
    hidden, vocab = shape.hidden_size, shape.vocab_size
    specs = [TensorSpec("model.embed_tokens.weight", dtype, (vocab, hidden))]
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        for name, size in _layer_tensors(shape).items():
            specs.append(TensorSpec(prefix + name, dtype, size))
    specs.append(TensorSpec("model.norm.weight", dtype, (hidden,)))
    if not shape.tied_embeddings:
        specs.append(TensorSpec("lm_head.weight", dtype, (vocab, hidden)))
    return specs


def _layer_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    hidden, ffn, head = shape.hidden_size, shape.ffn_hidden_size, shape.head_dim
    rows = {"q": shape.num_heads * head, "k": shape.num_kv_heads * head}
    rows["v"] = rows["k"]
    tensors: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
        "self_attn.o_proj.weight": (hidden, rows["q"]),
    }
    for letter, size in rows.items():
        tensors[f"self_attn.{letter}_proj.weight"] = (size, hidden)
        if shape.has_qkv_bias:
            tensors[f"self_attn.{letter}_proj.bias"] = (size,)
    if shape.has_qk_norm:
        tensors |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    return tensors


# ---------------------------------------------------------------------------------------------
# The map
# ---------------------------------------------------------------------------------------------


def held_boxes(
    parameters: Mapping[str, torch.Tensor], shape: ModelShape, place: ShardPlace
) -> list[Held]:
    """Map every local parameter to boxes of canonical tensors.

    Replicated tensors (norms) are held by all tensor parallel ranks; `is_copy` marks them on all
    but the first, so that each element is published once.

    Args:
        parameters: local megatron parameters by name, as `GPTModel.named_parameters()`.
        shape: the model.
        place: whose parameters these are.

    Raises:
        ConfigError: a parameter that the map does not know (another architecture or layer spec).
    """
    return [held for name, p in parameters.items() for held in _held_of(name, p.data, shape, place)]


def _held_of(
    name: str, parameter: torch.Tensor, shape: ModelShape, place: ShardPlace
) -> list[Held]:
    if name == "embedding.word_embeddings.weight":
        return _vocab_rows("model.embed_tokens.weight", parameter, shape, place)
    if name == "output_layer.weight":
        if not shape.tied_embeddings:
            return _vocab_rows("lm_head.weight", parameter, shape, place)
        copies = _vocab_rows("model.embed_tokens.weight", parameter, shape, place)
        return [dataclasses.replace(held, is_copy=True) for held in copies]
    if name == "decoder.final_layernorm.weight":
        return _replicated("model.norm.weight", parameter, place)
    parts = name.split(".", 3)
    if len(parts) != 4 or parts[:2] != ["decoder", "layers"]:
        raise _unknown(name)
    prefix = f"model.layers.{place.first_layer + int(parts[2])}."
    return _held_of_layer(parts[3], prefix, parameter, shape, place)


# Replicated tensors of a layer; Transformer Engine's spec fuses two norms into the next linear.
_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
# Sharded along the input dimension (row parallel).
_COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


def _held_of_layer(
    name: str, prefix: str, parameter: torch.Tensor, shape: ModelShape, place: ShardPlace
) -> list[Held]:
    if name in _NORMS:
        return _replicated(prefix + _NORMS[name], parameter, place)
    if name in _COLUMNS:
        rows, width = parameter.shape
        left = place.tp_rank * width
        box = Box(prefix + _COLUMNS[name], (0, left), (rows, left + width))
        return [Held(box, parameter)]
    if name == "mlp.linear_fc1.weight":
        gate, up = parameter.chunk(2)
        return [
            _row_block(prefix + "mlp.gate_proj.weight", gate, place.tp_rank * len(gate)),
            _row_block(prefix + "mlp.up_proj.weight", up, place.tp_rank * len(up)),
        ]
    if name in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        return _qkv(prefix + "self_attn.", name.rpartition(".")[2], parameter, shape, place)
    raise _unknown(prefix + name)


def _unknown(name: str) -> ConfigError:
    return ConfigError(
        f"hf_weights: megatron parameter {name!r} has no Hugging Face counterpart; "
        "known are dense Qwen3, Qwen2 and Llama models"
    )


def _replicated(name: str, parameter: torch.Tensor, place: ShardPlace) -> list[Held]:
    box = Box(name, (0,) * parameter.dim(), tuple(parameter.shape))
    return [Held(box, parameter, is_copy=place.tp_rank != 0)]


def _row_block(name: str, view: torch.Tensor, first_row: int) -> Held:
    rest = tuple(view.shape[1:])
    start = (first_row, *(0 for _ in rest))
    return Held(Box(name, start, (first_row + len(view), *rest)), view)


def _vocab_rows(
    name: str, parameter: torch.Tensor, shape: ModelShape, place: ShardPlace
) -> list[Held]:
    first = place.tp_rank * len(parameter)
    num_real = max(0, min(len(parameter), shape.vocab_size - first))
    return [_row_block(name, parameter[:num_real], first)] if num_real else []


def _qkv(
    prefix: str, kind: str, parameter: torch.Tensor, shape: ModelShape, place: ShardPlace
) -> list[Held]:
    head, per_group, rest = shape.head_dim, shape.heads_per_group, tuple(parameter.shape[1:])
    groups = shape.num_kv_heads // place.tp_size
    grouped = parameter.view(groups, per_group + 2, head, *rest)
    views = {"q": grouped[:, :per_group], "k": grouped[:, -2:-1], "v": grouped[:, -1:]}
    held = []
    for letter, view in views.items():
        rows = groups * view.shape[1] * head
        start = (place.tp_rank * rows, *(0 for _ in rest))
        stop = ((place.tp_rank + 1) * rows, *rest)
        held.append(Held(Box(f"{prefix}{letter}_proj.{kind}", start, stop), view))
    return held


# ---------------------------------------------------------------------------------------------
# Loading and publishing
# ---------------------------------------------------------------------------------------------

ReadBox = typing.Callable[[Box], torch.Tensor]


@torch.no_grad()
def load_held(
    parameters: Mapping[str, torch.Tensor],
    held: typing.Sequence[Held],
    read: ReadBox,
) -> None:
    """Fill local parameters from boxes of canonical tensors; rows that no box holds become zero."""
    for parameter in parameters.values():
        parameter.data.zero_()
    for item in held:
        item.view.copy_(read(item.box).reshape(item.view.shape))


@contextlib.contextmanager
def open_hf_folder(folder: Path) -> Iterator[ReadBox]:
    """Open a folder of *.safetensors; yields a function that reads one box, and only its bytes.

    A missing `lm_head.weight` is an error of the folder, tied models never ask for it.

    Raises:
        ConfigError: no safetensors in the folder, or one is damaged; on reading, a tensor that is
            missing or has another shape.
    """
    from safetensors import SafetensorError, safe_open

    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"model.path={folder}: holds no *.safetensors files")
    with contextlib.ExitStack() as stack:
        where: dict[str, typing.Any] = {}
        for path in paths:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as err:
                raise ConfigError(
                    f"model.path={folder}: {path.name} cannot be read ({err}); copy it again"
                ) from err
            where |= dict.fromkeys(file.keys(), file)

        def read(box: Box) -> torch.Tensor:
            if box.name not in where:
                raise ConfigError(f"model.path={folder}: tensor {box.name} is in none of its files")
            part = where[box.name].get_slice(box.name)
            if any(b > n for b, n in zip(box.stop, part.get_shape(), strict=True)):
                raise ConfigError(
                    f"{folder}: {box.name} has shape {part.get_shape()}, config.json says {box}"
                )
            return typing.cast("torch.Tensor", part[box.slices])

        yield read


def published_pieces(
    held: typing.Sequence[Held], dtype: torch.dtype, replica: int, num_replicas: int
) -> Iterator[tuple[Box, str, np.ndarray]]:
    """Yield what this rank publishes: (box, dtype name, uint8 bytes in the box's C order).

    Copies one box at a time from the device; the array is this caller's own.

    Args:
        held: all that it holds.
        dtype: in which it is published.
        replica: which of the replicas of these parameters it is; each publishes its share.
        num_replicas: how many there are.
    """
    originals = [item for item in held if not item.is_copy]
    boxes, itemsizes = [item.box for item in originals], [dtype.itemsize] * len(originals)
    for index, box in share(boxes, itemsizes, replica, num_replicas):
        item = originals[index]
        view = item.view if box == item.box else _rows_of(item, box)
        yield box, dtype_name(dtype), _host_bytes(view.to(dtype))


def _rows_of(item: Held, box: Box) -> torch.Tensor:
    """View a part of a box; copies all of it on the device if its view is not one rectangle."""
    edges = zip(box.start, box.stop, item.box.start, strict=True)
    inside = tuple(slice(a - first, b - first) for a, b, first in edges)
    return item.view.reshape(item.box.shape)[inside]


def _host_bytes(view: torch.Tensor) -> np.ndarray:
    flat = view.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy()


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype as the weight service spells it: float32, bfloat16."""
    return str(dtype).removeprefix("torch.")
