"""The Backend on megatron-core: GPTModel over TP x PP x DP with the distributed optimizer.

`megatron_compat.import_megatron()` must have run before this module is imported; `build_backend`
in `build.py` does so. The CPU (gloo) and GPUs (NCCL) run the same code.

Streaming: gradients of every micro-batch are added un-normalised into megatron's gradient buffers
(`calculate_per_token_loss` keeps DDP from scaling them by 1/dp); `optimizer_step` reduces them over
the replicas once and divides by the step's true count. So nobody has to know in advance how many
micro-batches a step has, and the loss does not depend on how it was cut.
"""

import dataclasses
import functools
import typing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from relax_hpc.algorithms.numerics import VocabShard, logprobs_and_entropy
from relax_hpc.config import TrainConfig
from relax_hpc.dcs.layout import Box, TensorSpec
from relax_hpc.records import Row
from relax_hpc.trainer import hf_weights, megatron_compat
from relax_hpc.trainer.backend import ReplicaPlace
from relax_hpc.trainer.cpu_device import is_cpu
from relax_hpc.trainer.micro_batch import MicroBatch
from relax_hpc.trainer.model_config import ModelShape
from relax_hpc.trainer.objective import STATS, Objective
from relax_hpc.trainer.packed_attention import PackedAttention, PackedRMSNorm
from relax_hpc.trainer.row_exchange import broadcast_rows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ControlGroups:
    """gloo groups for host data (rows, counts, sums), beside megatron's own groups."""

    world: dist.ProcessGroup
    replica: dist.ProcessGroup


def initialize_parallel(train: TrainConfig, timeout_min: int, seed: int) -> None:
    """Make megatron's process groups and seed its RNG. torch.distributed must be initialised."""
    parallel_state.initialize_model_parallel(
        train.tp,
        train.pp,
        distributed_timeout_minutes=timeout_min,
        create_gloo_process_groups=True,
    )
    torch.manual_seed(seed)
    if is_cpu():
        # The CUDA tracker needs CUDA generators; this one forks nothing, and nothing here draws.
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    else:
        tensor_parallel.model_parallel_cuda_manual_seed(seed)


def make_control_groups() -> tuple[ControlGroups, ReplicaPlace]:
    """Find this rank's replica and make the gloo groups. Collective over all ranks."""
    world = dist.new_group(backend="gloo")
    mine = torch.tensor(
        [
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        ]
    )
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(table, mine, group=world)
    places = [tuple(entry.tolist()) for entry in table]
    last_stage = parallel_state.get_pipeline_model_parallel_world_size() - 1
    replica = None
    for dp_rank in range(parallel_state.get_data_parallel_world_size()):
        ranks = [rank for rank, place in enumerate(places) if place[0] == dp_rank]
        group = dist.new_group(ranks, backend="gloo")  # every rank takes part in every new_group
        replica = group if dist.get_rank() in ranks else replica
    assert replica is not None  # every rank belongs to one replica
    dp_rank = places[dist.get_rank()][0]
    in_replica = [rank for rank, place in enumerate(places) if place[0] == dp_rank]
    place = ReplicaPlace(
        global_rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        dp_rank=dp_rank,
        dp_size=parallel_state.get_data_parallel_world_size(),
        leader=places.index((dp_rank, 0, 0)),
        stats_rank=places.index((dp_rank, last_stage, 0)),
        shard_rank=in_replica.index(dist.get_rank()),
        shards_per_replica=len(in_replica),
    )
    return ControlGroups(world=world, replica=replica), place


def transformer_config(
    shape: ModelShape, train: TrainConfig, dtype: torch.dtype
) -> TransformerConfig:
    """Translate the model's shape and the parallel layout for megatron."""
    options: dict[str, typing.Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        "qk_layernorm": shape.has_qk_norm,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": shape.has_qkv_bias,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": train.tp,
        "pipeline_model_parallel_size": train.pp,
        "sequence_parallel": train.sequence_parallel,
        # Micro-batches differ in length; pipeline stages tell each other the shapes.
        "variable_seq_lengths": True,
        # Dense models have no dispatcher, but the default one is refused beside variable lengths.
        "moe_token_dispatcher_type": "alltoall",
        # Read when DDP is built: without it gradients are scaled by 1/dp, silently.
        "calculate_per_token_loss": True,
        "use_cpu_initialization": is_cpu(),
        # Weights come from files all the same, but only initialisation marks parameters as sharded
        # over TP; without the mark the gradient norm counts one rank's part only.
        "perform_initialization": True,
        # These need Apex, Transformer Engine or compiled extensions.
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        # These need torch.compile, which needs a compiler on CPUs.
        "bias_dropout_fusion": not is_cpu(),
        "bias_activation_fusion": not is_cpu(),
    }
    if train.recompute:
        options |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(**options)


def build_model(shape: ModelShape, config: TransformerConfig) -> GPTModel:
    """Build this rank's part of the model on its device; the weights are random."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = PackedRMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = PackedRMSNorm
    spec = TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=PackedRMSNorm
    )
    scaling: dict[str, typing.Any] = {}
    if shape.rope_scaling_factor > 0:
        scaling = {"rope_scaling": True, "rope_scaling_factor": shape.rope_scaling_factor}
    model = GPTModel(
        config,
        spec,
        vocab_size=hf_weights.padded_vocab_size(shape, config.tensor_model_parallel_size),
        max_sequence_length=shape.max_positions,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tied_embeddings,
        parallel_output=True,
        **scaling,
    )
    return model if is_cpu() else model.cuda()


def _all_reduce(values: np.ndarray, op: typing.Any, group: dist.ProcessGroup) -> np.ndarray:
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=op, group=group)
    return tensor.numpy()


class MegatronBackend:
    """See Backend. Build it with `build.build_backend`."""

    def __init__(
        self,
        shape: ModelShape,
        train: TrainConfig,
        dtype: torch.dtype,
        groups: ControlGroups,
        place: ReplicaPlace,
    ) -> None:
        self.place = place
        self.device = torch.device("cpu") if is_cpu() else torch.device("cuda")
        self.align = train.tp if train.sequence_parallel else 1
        self._shape, self._train, self._dtype, self._groups = shape, train, dtype, groups
        self._config = transformer_config(shape, train, dtype)
        self._model = build_model(shape, self._config)
        self._parameters = dict(self._model.named_parameters())
        self._ddp: typing.Any = None
        self._optimizer: typing.Any = None

    # -- host data between ranks -----------------------------------------------------------------

    def share_rows(self, rows: typing.Sequence[Row] | None) -> list[Row]:
        """See Backend."""
        return broadcast_rows(rows, self.place.leader, self._groups.replica)

    def share_numbers(self, values: np.ndarray) -> np.ndarray:
        """See Backend."""
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.broadcast(tensor, self.place.leader, group=self._groups.replica)
        return tensor.numpy()

    def sum_over_ranks(self, values: np.ndarray) -> np.ndarray:
        """See Backend."""
        return _all_reduce(values, dist.ReduceOp.SUM, self._groups.world)

    def sum_in_replica(self, values: np.ndarray) -> np.ndarray:
        """See Backend."""
        return _all_reduce(values, dist.ReduceOp.SUM, self._groups.replica)

    def max_over_ranks(self, values: np.ndarray) -> np.ndarray:
        """See Backend."""
        return _all_reduce(values, dist.ReduceOp.MAX, self._groups.world)

    # -- training --------------------------------------------------------------------------------

    def prepare_training(self) -> None:
        """Wrap the loaded model for data parallelism and build the optimizer. Call once."""
        train = self._train
        self._ddp = DistributedDataParallel(
            self._config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                grad_reduce_in_fp32=True,
                # Gradients stay un-reduced until the step's last micro-batch, which nobody knows
                # in advance; one reduction per step is also the least traffic.
                overlap_grad_reduce=False,
                overlap_param_gather=False,
            ),
            self._model,
        )
        options = OptimizerConfig(
            optimizer="adam",
            lr=train.lr,
            min_lr=train.lr,
            weight_decay=train.weight_decay,
            adam_beta1=train.adam_beta1,
            adam_beta2=train.adam_beta2,
            adam_eps=train.adam_eps,
            clip_grad=train.clip_grad,
            bf16=self._dtype is torch.bfloat16,
            params_dtype=self._dtype,
            use_distributed_optimizer=True,
        )
        self._optimizer = get_megatron_optimizer(options, [self._ddp])
        self._zero_gradients()

    def _zero_gradients(self) -> None:
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()

    def forward_backward(
        self, batches: typing.Sequence[MicroBatch], objective: Objective
    ) -> np.ndarray:
        """See Backend."""
        compute = functools.partial(self._loss, objective)
        sums = self._run_schedule(self._ddp, batches, compute, forward_only=False)
        if not (sums and self.place.has_stats):
            return np.zeros(len(STATS))
        return torch.stack(sums).sum(0).cpu().numpy()

    def _loss(
        self, objective: Objective, batch: MicroBatch, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        loss, sums = objective(logits[0], batch, self._vocab_shard(logits.shape[-1]))
        # The token count has to be there for megatron not to divide by the micro-batches' number.
        return loss, batch.tokens_per_sample.sum().to(torch.int), sums

    def _vocab_shard(self, columns: int) -> VocabShard:
        return VocabShard(
            start=parallel_state.get_tensor_model_parallel_rank() * columns,
            vocab_size=self._shape.vocab_size,
            group=parallel_state.get_tensor_model_parallel_group(),
        )

    def _run_schedule(
        self,
        model: typing.Any,
        batches: typing.Sequence[MicroBatch],
        compute: typing.Callable[[MicroBatch, torch.Tensor], typing.Any],
        forward_only: bool,
    ) -> list[typing.Any]:
        """Run megatron's pipeline schedule; returns what `compute` reported per micro-batch."""

        def forward_step(
            batches: Iterator[MicroBatch], model: typing.Any
        ) -> tuple[torch.Tensor, typing.Any]:
            batch = next(batches)
            output = model(
                batch.tokens[None], batch.positions[None], None, packed_seq_params=batch.packed
            )
            return output, functools.partial(compute, batch)

        if not batches:
            return []
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=len(batches),
            seq_length=len(batches[0].tokens),  # unused: lengths vary
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return list(reports)

    def optimizer_step(self, count: float, lr: float) -> float:
        """See Backend."""
        finalize_model_grads([self._ddp], None)
        self._ddp.scale_gradients(1.0 / count)
        megatron_compat.set_learning_rate(self._optimizer, lr, self._train.weight_decay)
        _, grad_norm, _ = self._optimizer.step()
        self._zero_gradients()
        return float(grad_norm)

    # -- forward only ----------------------------------------------------------------------------

    @torch.no_grad()
    def forward_logprobs(
        self, batches: typing.Sequence[MicroBatch], num_rows: int, temperature: float
    ) -> list[np.ndarray]:
        """See Backend."""

        def compute(batch: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, typing.Any]:
            shard = self._vocab_shard(logits.shape[-1])
            values, _ = logprobs_and_entropy(logits[0], batch.targets, shard, temperature)
            parts = [values[span.start : span.start + span.size] for span in batch.spans]
            return values.sum(), torch.cat(parts).cpu()

        parts = self._run_schedule(self._model, batches, compute, forward_only=True)
        flat = self._to_leader(parts, sum(s.size for batch in batches for s in batch.spans))
        if not self.place.is_leader:
            return []
        by_row: list[np.ndarray] = [np.empty(0, np.float32)] * num_rows
        offset = 0
        for span in (span for batch in batches for span in batch.spans):
            by_row[span.row] = flat[offset : offset + span.size].numpy()
            offset += span.size
        return by_row

    def _to_leader(self, parts: list[torch.Tensor], size: int) -> torch.Tensor:
        """Bring the last stage's values to the leader (the first stage)."""
        flat = torch.cat(parts) if parts else torch.empty(size, dtype=torch.float32)
        if self.place.stats_rank != self.place.leader:
            if self.place.has_stats:
                dist.send(flat, self.place.leader, group=self._groups.replica)
            elif self.place.is_leader:
                dist.recv(flat, self.place.stats_rank, group=self._groups.replica)
        return flat

    # -- weights ---------------------------------------------------------------------------------

    @property
    def held(self) -> list[hf_weights.Held]:
        """Boxes of canonical tensors that this rank's parameters hold."""
        return self._held_by(parallel_state.get_tensor_model_parallel_rank())

    def _held_by(self, tp_rank: int) -> list[hf_weights.Held]:
        """Boxes of a tensor parallel rank of this stage; the views are always of this rank."""
        first_layer = self._model.decoder.layers[0].layer_number - 1
        place = hf_weights.ShardPlace(
            tp_rank=tp_rank, tp_size=self._train.tp, first_layer=first_layer
        )
        return hf_weights.held_boxes(self._parameters, self._shape, place)

    def specs(self) -> list[TensorSpec]:
        """See Backend."""
        return hf_weights.canonical_specs(self._shape, hf_weights.dtype_name(self._dtype))

    def pieces(self) -> Iterator[tuple[Box, str, np.ndarray]]:
        """See Backend."""
        place = self.place
        return hf_weights.published_pieces(self.held, self._dtype, place.dp_rank, place.dp_size)

    def boxes(self) -> list[Box]:
        """See Backend."""
        return [item.box for item in self.held]

    def load_tensors(self, read: typing.Callable[[Box], torch.Tensor]) -> None:
        """See Backend."""
        hf_weights.load_held(self._parameters, self.held, read)

    # -- durable state ---------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """See Backend."""
        from relax_hpc.trainer import sharded_checkpoint

        sharded_checkpoint.save(folder, self._model, self._optimizer)

    def load(self, folder: Path) -> None:
        """See Backend."""
        from relax_hpc.trainer import sharded_checkpoint

        sharded_checkpoint.load(folder, self._model, self._optimizer)

    def export_hf(self, folder: Path, source: Path) -> None:
        """See Backend."""
        from relax_hpc.trainer import hf_export

        if self.place.exports:
            boxes = [self._held_by(rank) for rank in range(self._train.tp)]
            hf_export.write_stage(boxes, self._dtype, folder)
        dist.barrier(group=self._groups.world)
        if self.place.global_rank == 0:
            hf_export.write_index(folder, source, self._dtype)
        dist.barrier(group=self._groups.world)
