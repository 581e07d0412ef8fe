"""Boxes of every SGLang rank in coordinates of canonical tensors.

Source of the rules: SGLang 0.5.17 to 0.5.23, layers/linear.py (QKVParallelLinear),
layers/vocab_parallel_embedding.py, layers/moe, distributed/utils.py (get_pp_indices). SGLang fuses
q, k, v into qkv_proj and gate, up into gate_up_proj (w13 of experts): here each stays a box of its
own canonical tensor. This table is the oracle of a layout traced from the engine's own loader.
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
class EngineParallel:
    """Degrees of parallelism as SGLang takes them; engines are alike."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    """`--ep-size`: divides tp; each expert is cut into tp / ep."""
    attention_dp: int = 1
    """`--dp-size` with `--enable-dp-attention`: attention is cut into tp / attention_dp."""
    num_engines: int = 1
    stage_layers: tuple[int, ...] = ()
    """SGLANG_PP_LAYER_PARTITION; () = even, the last stages take the rest."""
    is_lm_head_dp: bool = False
    """`--enable-dp-lm-head`: the output layer is cut as attention is."""
    is_shared_expert_whole: bool = False
    """Shared experts are not cut: all-to-all back ends such as DeepEP."""
    vocab_multiple: int = 64
    """SGLang's DEFAULT_VOCAB_PADDING_SIZE."""

    @property
    def num_ranks(self) -> int:
        """Ranks (GPUs) of all engines."""
        return self.num_engines * self.pp * self.tp


def engine_layout(model: Model, parallel: EngineParallel, dtype: str = "bfloat16") -> Layout:
    """Say what every engine rank holds. Rank = tp + TP (pp + PP engine).

    Raises:
        WeightSyncError: degrees that SGLang refuses, with the number that does not divide.
    """
    rules = _Rules(model, parallel)
    builder = LayoutBuilder(parallel.num_ranks)
    for tensor, spec in zip(model.tensors, model.specs(dtype), strict=True):
        builder.add(spec, rules.sharding(tensor))
    return builder.build()


def stage_of_layers(num_layers: int, parallel: EngineParallel) -> list[int]:
    """Pipeline rank of every layer (get_pp_indices)."""
    sizes, pp = parallel.stage_layers, parallel.pp
    if not sizes:
        base, more = divmod(num_layers, pp)
        sizes = tuple(base + (rank >= pp - more) for rank in range(pp))
    if len(sizes) != pp or sum(sizes) != num_layers:
        raise WeightSyncError(f"engine stages {sizes}: need {pp} numbers, sum {num_layers}")
    return [rank for rank, size in enumerate(sizes) for _ in range(size)]


class _Rules:
    """Shardings of one model on one set of degrees; equal tensors get the same object."""

    def __init__(self, model: Model, parallel: EngineParallel) -> None:
        self._attention_tp = divide(parallel.tp, parallel.attention_dp, "engine tp")
        self._expert_tp = divide(parallel.tp, parallel.ep, "engine tp")
        divide(model.num_heads, self._attention_tp, "num_attention_heads")
        if model.num_experts:
            divide(model.num_experts, parallel.ep, "num_experts")
        self._model, self._parallel = model, parallel
        ranks = np.arange(parallel.num_ranks)
        self._ranks = ranks.reshape(parallel.num_engines, parallel.pp, parallel.tp)
        self._stage = stage_of_layers(model.num_layers, parallel)
        self._made: dict[tuple[typing.Any, ...], Sharding] = {}

    def sharding(self, tensor: Tensor) -> Sharding:
        stage = self._stages(tensor)[0]
        ep_rank = -1
        if tensor.expert >= 0:
            ep_rank = tensor.expert // (self._model.num_experts // self._parallel.ep)
        key = (tensor.shape, tensor.split, tensor.part, tensor.stage, stage, ep_rank)
        if key not in self._made:
            self._made[key] = self._make(tensor, ep_rank)
        return self._made[key]

    def _stages(self, tensor: Tensor) -> list[int]:
        if tensor.stage is Stage.LAYER:
            return [self._stage[tensor.layer]]
        return [0 if tensor.stage is Stage.EMBEDDING else self._parallel.pp - 1]

    def _make(self, tensor: Tensor, ep_rank: int) -> Sharding:
        stage, tp = self._stages(tensor)[0], self._parallel.tp
        ranks = self._ranks[:, stage]
        if tensor.part is Part.EXPERT:
            first = ep_rank * self._expert_tp
            ranks = ranks[:, first : first + self._expert_tp]
        is_whole = tensor.part is Part.SHARED_EXPERT and self._parallel.is_shared_expert_whole
        if tensor.split is Split.WHOLE or is_whole:
            return whole(tensor.shape, ranks.ravel().tolist())
        shares = self._shares(tensor, self._cut_ways(tensor), ranks)
        if tensor.stage is Stage.EMBEDDING and self._model.is_tied and self._parallel.pp > 1:
            # The last stage keeps the embedding as its lm_head, cut as an untied one is.
            head = self._attention_tp if self._parallel.is_lm_head_dp else tp
            shares += self._shares(tensor, head, self._ranks[:, -1])
        return spread(tensor.shape, 1 if tensor.split is Split.COLUMNS else 0, shares)

    def _cut_ways(self, tensor: Tensor) -> int:
        """Into how many parts a tensor is cut."""
        if tensor.part is Part.EXPERT:
            return self._expert_tp
        if tensor.part in (Part.MLP, Part.SHARED_EXPERT):
            return self._parallel.tp
        if tensor.stage is Stage.HEAD and not self._parallel.is_lm_head_dp:
            return self._parallel.tp
        if tensor.stage is Stage.EMBEDDING and self._model.model_type == "llama":
            return self._parallel.tp  # models/llama.py: the whole group, also with DP attention
        return self._attention_tp

    def _shares(
        self, tensor: Tensor, ways: int, ranks: np.ndarray
    ) -> list[tuple[Interval, list[int]]]:
        """Give part tp % ways to every rank: groups of `ways` neighbours share a tensor."""
        count = tensor.shape[1 if tensor.split is Split.COLUMNS else 0]
        if tensor.split is Split.VOCAB:
            multiple = self._parallel.vocab_multiple
            is_even = -(-count // multiple) * multiple % ways == 0
            cuts = padded(count, multiple if is_even else multiple * ways, ways)
        elif tensor.split in (Split.KEY, Split.VALUE) and ways > self._model.num_kv_heads:
            heads = self._model.num_kv_heads
            copies = divide(ways, heads, "attention tp")
            cuts = [cut for cut in even(count, heads, tensor.name) for _ in range(copies)]
        elif tensor.split in (Split.KEY, Split.VALUE):
            divide(self._model.num_kv_heads, ways, "num_key_value_heads")
            cuts = even(count, ways, tensor.name)
        else:
            cuts = even(count, ways, tensor.name)
        return [(cut, ranks[:, part::ways].ravel().tolist()) for part, cut in enumerate(cuts)]
