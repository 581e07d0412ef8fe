"""Packed sequences through megatron-core without Transformer Engine: attention, RoPE and norm.

Legend: T packed tokens, H query heads, K key/value heads, D head size, B sequences, L length.

megatron's own DotProductAttention refuses packed sequences and its packed RoPE loops over them with
a host synchronisation each. Here: `varlen_attn` of PyTorch on GPUs in half precision; else (CPU, or
float32, which that kernel does not know) sequences of similar length go through one batched SDPA,
right-padded, so that the causal mask alone hides the padding.
"""

import dataclasses
import functools
import inspect
import math
import typing

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

from relax_hpc.algorithms.fused import fused

_WASTE = 1.5
"""A bucket may hold sequences up to this much shorter than its longest: bounds the padding."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar length as one padded batch."""

    rows: torch.Tensor
    """[B * L] int64 packed row of each place; padding repeats the sequence's last row."""
    places: torch.Tensor
    """[tokens of the bucket] int64 place in [B * L] of each real token."""
    packed: torch.Tensor
    """[tokens of the bucket] int64 packed row of each real token."""
    shape: tuple[int, int]
    """(B, L)."""

    def to(self, device: torch.device) -> "Bucket":
        """Move the indices to a device."""
        return Bucket(
            self.rows.to(device), self.places.to(device), self.packed.to(device), self.shape
        )


@dataclasses.dataclass
class PackedBatch(PackedSeqParams):  # type: ignore[misc]  # megatron is not typed
    """megatron's packed-sequence parameters and what our attention and RoPE need beside them."""

    positions: torch.Tensor | None = None
    """[T] int64 position of each token inside its sequence."""
    lengths: tuple[int, ...] = ()
    """Tokens of each sequence; their sum is T."""

    @functools.cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Sequences grouped by length, for batched attention."""
        assert self.positions is not None  # set by pack()
        sizes = torch.tensor(self.lengths)
        return tuple(b.to(self.positions.device) for b in _buckets(sizes.cumsum(0) - sizes, sizes))

    @functools.cached_property
    def order(self) -> torch.Tensor:
        """[T] int64: row of the concatenated buckets that holds packed token t."""
        return torch.argsort(torch.cat([bucket.packed for bucket in self.buckets]))


def pack(lengths: typing.Sequence[int], device: torch.device) -> PackedBatch:
    """Describe sequences that lie one after the other.

    Args:
        lengths: tokens of each sequence, all > 0; their sum is T.
        device: where the model runs.
    """
    sizes = torch.tensor(list(lengths), dtype=torch.int64)
    ends = sizes.cumsum(0)
    bounds = torch.cat([ends.new_zeros(1), ends])
    positions = torch.arange(int(ends[-1])) - torch.repeat_interleave(bounds[:-1], sizes)
    cu_seqlens = bounds.to(torch.int32).to(device)
    batch = PackedBatch(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        positions=positions.to(device),
        lengths=tuple(lengths),
    )
    # apply_rotary_pos_emb hands only cu_seqlens on, so the positions ride on that tensor.
    cu_seqlens.relax_positions = batch.positions  # type: ignore[attr-defined]
    return batch


def _buckets(starts: torch.Tensor, sizes: torch.Tensor) -> list[Bucket]:
    by_length = torch.argsort(sizes, descending=True, stable=True).tolist()
    groups: list[list[int]] = []
    for sequence in by_length:
        longest = int(sizes[groups[-1][0]]) if groups else 0
        if groups and longest <= _WASTE * int(sizes[sequence]):
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
    return [_bucket(starts[group], sizes[group]) for group in groups]


def _bucket(starts: torch.Tensor, sizes: torch.Tensor) -> Bucket:
    length = int(sizes.max())
    offsets = torch.arange(length)
    rows = starts[:, None] + torch.minimum(offsets[None], sizes[:, None] - 1)
    places = (offsets[None] < sizes[:, None]).flatten().nonzero()[:, 0]
    rows = rows.flatten()
    return Bucket(rows=rows, places=places, packed=rows[places], shape=(len(sizes), length))


class PackedAttention(MegatronModule):  # type: ignore[misc]  # megatron is not typed
    """Causal core attention of a layer spec, for packed ([T, H, D]) batches."""

    def __init__(
        self,
        config: typing.Any,
        layer_number: int,
        attn_mask_type: typing.Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **kwargs: typing.Any,
    ) -> None:
        # kwargs: cp_comm_type, pg_collection, attention_dropout; they differ between versions.
        del layer_number, attn_mask_type, attention_type, kwargs
        super().__init__(config=config)
        scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.scale = scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: typing.Any,
    ) -> torch.Tensor:
        """Attend inside each sequence: [T, H, D], [T, K, D], [T, K, D] -> [T, H * D]."""
        del attention_mask, kwargs
        if not isinstance(packed_seq_params, PackedBatch):
            raise TypeError("PackedAttention: packed_seq_params must come from pack()")
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            return _varlen(query, key, value, packed_seq_params, self.scale).flatten(1)
        return _bucketed(query, key, value, packed_seq_params, self.scale).flatten(1)


@functools.cache
def _varlen_options() -> dict[str, typing.Any]:
    """Keyword arguments that mean `causal, grouped query` in this version of torch."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options: dict[str, typing.Any] = {}
    options |= {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    return options


def _varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: PackedBatch, scale: float
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens, longest = batch.cu_seqlens_q, int(batch.max_seqlen_q)
    out = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=scale, **_varlen_options()
    )
    return typing.cast("torch.Tensor", out)


def _pad(x: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """[T, H, D] -> [B, H, L, D] of the bucket's sequences."""
    return x.index_select(0, bucket.rows).view(*bucket.shape, *x.shape[1:]).transpose(1, 2)


def _bucketed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: PackedBatch, scale: float
) -> torch.Tensor:
    """One SDPA per bucket of similar lengths. Returns [T, H, D]."""
    outs = []
    for bucket in batch.buckets:
        padded_q, padded_k, padded_v = (_pad(x, bucket) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            padded_q,
            padded_k,
            padded_v,
            is_causal=True,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, bucket.places))
    return torch.cat(outs).index_select(0, batch.order)


def install_packed_rope() -> None:
    """Replace megatron's loop over packed sequences by one gather of the rotary angles."""
    from megatron.core.models.common.embeddings import rope_utils

    def apply_packed(
        t: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        rotary_interleaved: bool = False,
        *args: typing.Any,
        mscale: float = 1.0,
        **kwargs: typing.Any,
    ) -> torch.Tensor:
        # args, kwargs: latent-attention switches whose names differ between versions, and cp_group
        del args, kwargs
        positions: torch.Tensor = cu_seqlens.relax_positions  # type: ignore[attr-defined]
        if not rotary_interleaved and mscale == 1.0 and freqs.shape[-1] == t.shape[-1]:
            return _rotate(t, freqs, positions)
        angles = freqs.index_select(0, positions)
        rotated = rope_utils._apply_rotary_pos_emb_bshd(
            t.unsqueeze(1), angles, rotary_interleaved=rotary_interleaved, mscale=mscale
        )
        return typing.cast("torch.Tensor", rotated.squeeze(1))

    rope_utils._apply_rotary_pos_emb_thd = apply_packed


@fused
def _rotate(t: torch.Tensor, freqs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate halves: [T, H, D] by angles freqs [S, 1, 1, D] at positions [T] (arXiv:2104.09864)."""
    angles = freqs.index_select(0, positions)[:, 0]
    first, second = t.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return t * angles.cos().to(t.dtype) + turned * angles.sin().to(t.dtype)


class PackedRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the arguments of a layer spec.

    megatron's own wrapper refuses sequence parallelism; it needs only this mark on the weight, for
    `finalize_model_grads` to sum its gradient over the tensor parallel ranks.
    """

    def __init__(
        self, config: typing.Any, hidden_size: int, eps: float = 1e-5, **kwargs: typing.Any
    ) -> None:
        del kwargs
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
