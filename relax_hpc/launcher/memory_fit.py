"""Do model, optimizer and KV cache fit the GPUs? An estimate from `config.json` and the recipe.

Bytes per parameter as Megatron-core keeps them with its distributed optimizer: the weight, an fp32
gradient, and per data-parallel rank a share of fp32 master weight and two Adam moments.
Activations: 34 bytes per token and hidden unit and layer (Korthikanti et al., arXiv:2205.05198,
eq. 2 without the attention matrix, which flash attention does not keep), divided by TP; with
recomputation the 2 bytes of each layer's input and one layer in full. Logits: once in the model's
type and once in fp32. Fragments, NCCL and CUDA are the reserve.
"""

import dataclasses
import math

from relax_hpc.config import Config, EngineKind
from relax_hpc.trainer.model_config import ModelShape

RESERVE_GB = 4.0
"""CUDA context, NCCL buffers, allocator."""
_SGLANG_FRACTION = 0.85
"""Of the GPU's memory for weights and KV cache where the recipe says nothing."""
_GB = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainMemory:
    """GB (10^9 bytes) on the fullest GPU of the train step."""

    state_gb: float
    """Weights, gradients, optimizer."""
    activations_gb: float

    @property
    def total_gb(self) -> float:
        """With the reserve."""
        return self.state_gb + self.activations_gb + RESERVE_GB


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """GB (10^9 bytes) on each GPU of an engine."""

    weights_gb: float
    cache_gb: float
    """Left for the KV cache; may be negative."""
    sample_gb: float
    """KV cache of one sample of full length."""

    @property
    def samples(self) -> int:
        """Samples of full length that fit at a time."""
        return max(0, int(self.cache_gb / self.sample_gb))


def num_parameters(shape: ModelShape) -> int:
    """Count the weights of a dense decoder (biases and norms of heads are left out: < 0.1 %)."""
    attention = 2 * shape.hidden_size * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
    layer = attention + 3 * shape.hidden_size * shape.ffn_hidden_size + 2 * shape.hidden_size
    tables = 1 if shape.tied_embeddings else 2
    return shape.num_layers * layer + tables * shape.vocab_size * shape.hidden_size


def type_bytes(config: Config) -> int:
    """Bytes of one weight."""
    return 4 if config.model.dtype == "float32" else 2


def train_memory(config: Config, shape: ModelShape) -> TrainMemory:
    """Estimate the train step."""
    train, size = config.train, type_bytes(config)
    dp = max(1, config.resources.train.ranks // (train.tp * train.pp))
    parameters = num_parameters(shape) / (train.tp * train.pp)
    master = 12 if size == 2 else 8  # fp32 weights need no second copy
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    tokens = max(train.micro_batch_tokens, longest)  # a longer sample is a micro-batch of its own
    layers = math.ceil(shape.num_layers / train.pp)
    one_layer = 17 * size * tokens * shape.hidden_size / train.tp
    inputs = size * tokens * shape.hidden_size / (train.tp if train.sequence_parallel else 1)
    kept = layers * inputs + one_layer if train.recompute else layers * one_layer
    # With PP the first stage holds pp micro-batches in flight.
    kept *= train.pp
    logits = (size + 4) * tokens * shape.vocab_size / train.tp
    return TrainMemory(
        state_gb=parameters * (size + 4 + master / dp) / _GB,
        activations_gb=(kept + logits) / _GB,
    )


def engine_memory(config: Config, shape: ModelShape, gpu_gb: float) -> EngineMemory:
    """Estimate one GPU of an engine; `gpu_gb` of its memory."""
    rollout, size = config.rollout, type_bytes(config)
    tp = rollout.engine_tp
    fraction = _SGLANG_FRACTION
    if rollout.engine is EngineKind.SGLANG:
        fraction = float(rollout.sglang_args.get("mem-fraction-static", fraction))
    weights = num_parameters(shape) * size / tp / _GB
    heads = math.ceil(shape.num_kv_heads / tp)
    token = 2 * shape.num_layers * heads * shape.head_dim * size
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    return EngineMemory(
        weights_gb=weights,
        cache_gb=gpu_gb * fraction - weights,
        sample_gb=token * longest / _GB,
    )
