"""Boxes of every trainer rank: Megatron-core's sharding in coordinates of canonical tensors.

Source of the rules: megatron-core 0.16 to 0.19, core/parallel_state.py (order of ranks),
transformer/transformer_block.py (layers of a stage), transformer/attention.py and mlp.py (fused
rows). Sequence and context parallelism cut activations, not weights: their ranks hold copies.
"""

import dataclasses
import typing

import numpy as np

from relax_hpc.dcs.architectures import Model, Part, Split, Stage, Tensor
from relax_hpc.dcs.rank_layout import (
    Interval,
    Layout,
    LayoutBuilder,
    Sharding,
    divide,
    even,
    padded,
    spread,
    whole,
)
from relax_hpc.errors import WeightSyncError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainerParallel:
    """Degrees of parallelism as Megatron-core takes them."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    """Replicas of the dense layers; expert replicas follow: tp * cp * dp / (etp * ep)."""
    pp: int = 1
    vpp: int = 1
    """Virtual stages (model chunks) of each rank."""
    ep: int = 1
    etp: int = 0
    """Tensor parallelism inside an expert; 0 = tp, as Megatron's default."""
    first_stage_layers: int = 0
    """`num_layers_in_first_pipeline_stage`, all virtual stages together; 0 = as the others."""
    last_stage_layers: int = 0
    """`num_layers_in_last_pipeline_stage`."""
    is_embedding_counted: bool = False
    """`account_for_embedding_in_pipeline_split`: the first stage has a layer less."""
    is_loss_counted: bool = False
    """`account_for_loss_in_pipeline_split`: the last stage has a layer less."""
    vocab_multiple: int = 1
    """Vocabulary is padded to a multiple of this times tp (ours: 1; Megatron's scripts: 128)."""

    @property
    def num_ranks(self) -> int:
        """World size of the trainer."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_tp(self) -> int:
        """Tensor parallel ranks of one expert."""
        return self.etp if self.etp else self.tp


def trainer_layout(model: Model, parallel: TrainerParallel, dtype: str = "bfloat16") -> Layout:
    """Say what every trainer rank holds.

    Global rank = tp + TP (cp + CP (dp + DP pp)), and for experts etp + ETP (ep + EP (edp + EDP
    pp)): Megatron's order `tp-cp-ep-dp-pp`. Copies count: the tied output layer of the last stage
    holds the embedding.

    Raises:
        WeightSyncError: degrees that Megatron refuses, with the number that does not divide.
    """
    rules = _Rules(model, parallel)
    builder = LayoutBuilder(parallel.num_ranks)
    for tensor, spec in zip(model.tensors, model.specs(dtype), strict=True):
        builder.add(spec, rules.sharding(tensor))
    return builder.build()


def stage_of_layers(num_layers: int, parallel: TrainerParallel) -> list[int]:
    """Pipeline rank of every layer. Layers go round all ranks once per virtual stage."""
    sizes = _chunk_sizes(num_layers, parallel)
    stages = [rank for _ in range(parallel.vpp) for rank in range(parallel.pp)]
    owner = [rank for rank, size in zip(stages, sizes, strict=True) for _ in range(size)]
    if len(owner) != num_layers:
        raise WeightSyncError(f"{num_layers} layers: the pipeline stages hold {len(owner)}")
    return owner


def _chunk_sizes(num_layers: int, parallel: TrainerParallel) -> list[int]:
    """Layers of each model chunk, in order of the layers."""
    pp, vpp = parallel.pp, parallel.vpp
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    counted = (int(parallel.is_embedding_counted), int(parallel.is_loss_counted))
    if (first or last) and any(counted):
        raise WeightSyncError("uneven first or last stage: embedding and loss cannot be counted")
    middle = pp - bool(first) - bool(last)
    left = num_layers - first - last + sum(counted)
    if middle < 0 or left < 0 or (middle == 0 and left):
        raise WeightSyncError(
            f"{num_layers} layers on {pp} stages: first_stage_layers={first} and "
            f"last_stage_layers={last} must leave as many layers as the other stages can hold"
        )
    each = divide(left, middle, "layers of the other stages") if middle else 0
    per_stage = [each] * pp
    if first:
        per_stage[0] = first
    if last:
        per_stage[-1] = last
    sizes = [divide(size, vpp, "layers of a stage (virtual)") for size in per_stage] * vpp
    sizes[0] -= counted[0]
    sizes[-1] -= counted[1]
    if min(sizes) < 0:
        raise WeightSyncError(f"{num_layers} layers on {pp} x {vpp} stages: a stage has none left")
    return sizes


class _Rules:
    """Shardings of one model on one set of degrees; equal tensors get the same object."""

    def __init__(self, model: Model, parallel: TrainerParallel) -> None:
        divide(model.num_heads, parallel.tp, "num_attention_heads")
        kv_heads, tp = model.num_kv_heads, parallel.tp
        divide(max(kv_heads, tp), min(kv_heads, tp), "the larger of num_key_value_heads and tp")
        replica = parallel.tp * parallel.cp * parallel.dp
        ep, etp = parallel.ep, parallel.expert_tp
        if model.num_experts:
            divide(replica, ep * etp, "ranks of a pipeline stage")
            divide(model.num_experts, ep, "num_experts")
        else:
            ep, etp = 1, 1
        self._model, self._parallel = model, parallel
        ranks = np.arange(parallel.num_ranks)
        self._dense = ranks.reshape(parallel.pp, -1, parallel.tp)
        self._experts = ranks.reshape(parallel.pp, -1, ep, etp)
        self._stage = stage_of_layers(model.num_layers, parallel)
        self._made: dict[tuple[typing.Any, ...], Sharding] = {}

    def sharding(self, tensor: Tensor) -> Sharding:
        stages = self._stages(tensor)
        ep_rank = -1
        if tensor.expert >= 0:
            local = self._model.num_experts // self._parallel.ep
            ep_rank = tensor.expert // local
        key = (tensor.shape, tensor.split, tensor.part, stages, ep_rank)
        if key not in self._made:
            self._made[key] = self._make(tensor, list(stages), ep_rank)
        return self._made[key]

    def _stages(self, tensor: Tensor) -> tuple[int, ...]:
        last = self._parallel.pp - 1
        if tensor.stage is Stage.LAYER:
            return (self._stage[tensor.layer],)
        if tensor.stage is Stage.HEAD:
            return (last,)
        return (0, last) if self._model.is_tied and last else (0,)

    def _make(self, tensor: Tensor, stages: list[int], ep_rank: int) -> Sharding:
        if tensor.part is Part.EXPERT:
            ranks = self._experts[stages, :, ep_rank, :]
        else:
            ranks = self._dense[stages]
        if tensor.split is Split.WHOLE:
            return whole(tensor.shape, ranks.ravel().tolist())
        axis = 1 if tensor.split is Split.COLUMNS else 0
        intervals = self._intervals(tensor, tensor.shape[axis], ranks.shape[-1])
        shares = [(cut, ranks[..., tp].ravel().tolist()) for tp, cut in enumerate(intervals)]
        return spread(tensor.shape, axis, shares)

    def _intervals(self, tensor: Tensor, count: int, parts: int) -> list[Interval]:
        if tensor.split is Split.VOCAB:
            return padded(count, self._parallel.vocab_multiple * parts, parts)
        if tensor.split in (Split.QUERY, Split.KEY, Split.VALUE):
            return _fused_intervals(self._model, tensor.split, parts)
        return even(count, parts, tensor.name)


def _fused_intervals(model: Model, split: Split, parts: int) -> list[Interval]:
    """Rows of q, k or v in each equal part of linear_qkv.

    linear_qkv lists per key/value head: its query heads, k, v. The parts may cut inside of a head
    when there are fewer key/value heads than ranks: Megatron then gathers activations.
    """
    head = model.head_dim
    queries = divide(model.num_heads, model.num_kv_heads, "num_attention_heads") * head
    group = queries + 2 * head
    before, size = {
        Split.QUERY: (0, queries),
        Split.KEY: (queries, head),
        Split.VALUE: (queries + head, head),
    }[split]

    def rows_before(fused: int) -> int:
        groups, rest = divmod(fused, group)
        return groups * size + min(max(rest - before, 0), size)

    cuts = even(model.num_kv_heads * group, parts, "rows of linear_qkv")
    return [(rows_before(first), rows_before(behind)) for first, behind in cuts]
