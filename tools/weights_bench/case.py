"""What is synced in the benchmark: a model of a given size, both layouts, and its tensors' bits."""

import dataclasses
from collections.abc import Mapping

import torch

from relax_hpc.dcs.architectures import Model, read_model
from relax_hpc.dcs.engine_layout import EngineParallel, engine_layout
from relax_hpc.dcs.layout import Box, TensorSpec
from relax_hpc.dcs.plan import Placement, Plan, plan
from relax_hpc.dcs.rank_layout import Layout
from relax_hpc.dcs.trainer_layout import TrainerParallel, trainer_layout

# Sizes of Qwen3-0.6B and Qwen3-4B; the number of layers is what makes the asked bytes.
SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}
LARGE = {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32}
LARGE_GB = 4.0


@dataclasses.dataclass(frozen=True)
class Case:
    """Computed alike by every rank. Global rank: trainer ranks, then engine ranks."""

    trainer: Layout
    engine: Layout
    plan: Plan
    specs: Mapping[str, tuple[int, TensorSpec]]
    """Number and spec by name."""
    stage_ranks: int
    """Trainer ranks of one pipeline stage."""

    @property
    def world_size(self) -> int:
        return self.trainer.num_ranks + self.engine.num_ranks

    @property
    def model_bytes(self) -> int:
        return sum(spec.nbytes for _, spec in self.specs.values())

    def content(self, box: Box, version: int, device: torch.device) -> torch.Tensor:
        """Bits of a box: each element is a number that its place, tensor and version decide."""
        number, spec = self.specs[box.name]
        place = torch.zeros((), dtype=torch.int32, device=device)
        for axis, (first, behind) in enumerate(zip(box.start, box.stop, strict=True)):
            along = torch.arange(first, behind, dtype=torch.int32, device=device)
            place = place[..., None] * spec.shape[axis] + along
        return (place * 31 + number * 7 + version).to(torch.int16).view(torch.bfloat16)


def make_case(gb: float, ours: Mapping[str, int], theirs: Mapping[str, int]) -> Case:
    parallel = TrainerParallel(**ours)
    model = _model(gb, parallel.pp)
    trainer = trainer_layout(model, parallel)
    engine = engine_layout(model, EngineParallel(**theirs))
    places = Placement.blocks(trainer.num_ranks, engine.num_ranks)
    specs = {spec.name: (number, spec) for number, spec in enumerate(trainer.specs)}
    stage_ranks = parallel.num_ranks // parallel.pp
    return Case(trainer, engine, plan(trainer, engine, places), specs, stage_ranks)


def _model(gb: float, multiple: int) -> Model:
    """A dense Qwen3 with as many layers as make the size best, a multiple of the stages."""

    def with_layers(count: int) -> Model:
        sizes = LARGE if gb >= LARGE_GB else SMALL
        vocab = 151936 if gb >= LARGE_GB else 16384
        layers = {"num_hidden_layers": count, "vocab_size": vocab}
        heads = {"num_key_value_heads": 8, "head_dim": 128}
        return read_model({"model_type": "qwen3", **sizes, **layers, **heads})

    def size(model: Model) -> int:
        return sum(spec.nbytes for spec in model.specs())

    one, two = size(with_layers(1)), size(with_layers(2))
    layers = 1 + (gb * 1e9 - one) / (two - one)
    return with_layers(max(1, round(layers / multiple)) * multiple)
