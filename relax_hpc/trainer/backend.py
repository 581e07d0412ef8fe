"""What the train loop and the forward-only loop need from a training framework.

One implementation (megatron.py); the tests hold it against transformers. The protocol is what the
loops are tested with, without megatron.
"""

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from relax_hpc.dcs.layout import Box, TensorSpec
from relax_hpc.records import Row
from relax_hpc.trainer.micro_batch import MicroBatch
from relax_hpc.trainer.objective import Objective


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPlace:
    """This rank's place among the replicas of the model."""

    global_rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    leader: int
    """Global rank of this replica's data leader (tp 0, pp 0, cp 0), which talks to the queue."""
    stats_rank: int
    """Global rank of this replica's first rank of the last pipeline stage, which has the loss."""
    shard_rank: int
    """Number of this rank inside its replica, 0 .. shards_per_replica - 1."""
    shards_per_replica: int

    @property
    def is_leader(self) -> bool:
        """True on the rank that takes this replica's rows."""
        return self.global_rank == self.leader

    @property
    def has_stats(self) -> bool:
        """True on the rank whose loss sums count for this replica."""
        return self.global_rank == self.stats_rank

    @property
    def exports(self) -> bool:
        """True on the ranks of the first replica: theirs are the weights of exported folders."""
        return self.dp_rank == 0

    @property
    def num_weight_shards(self) -> int:
        """Of a published version: every rank of every replica publishes its share."""
        return self.dp_size * self.shards_per_replica

    @property
    def weight_shard(self) -> int:
        """Number of this rank's shard, 0 .. num_weight_shards - 1."""
        return self.dp_rank * self.shards_per_replica + self.shard_rank


class Backend(typing.Protocol):
    """A sharded model with its optimizer. Every method is called by all ranks of the role."""

    @property
    def place(self) -> ReplicaPlace:
        """This rank's place."""
        ...

    @property
    def device(self) -> torch.device:
        """Where micro-batches must be."""
        ...

    @property
    def align(self) -> int:
        """Micro-batches are padded to a multiple of this many tokens."""
        ...

    def share_rows(self, rows: typing.Sequence[Row] | None) -> list[Row]:
        """Give all ranks of the replica the leader's rows (None on the others)."""
        ...

    def share_numbers(self, values: np.ndarray) -> np.ndarray:
        """Give all ranks of the replica the leader's int64 vector (same length everywhere)."""
        ...

    def sum_in_replica(self, values: np.ndarray) -> np.ndarray:
        """Sum a float64 vector over the ranks of this replica."""
        ...

    def sum_over_ranks(self, values: np.ndarray) -> np.ndarray:
        """Sum a float64 vector over all ranks of the role."""
        ...

    def max_over_ranks(self, values: np.ndarray) -> np.ndarray:
        """Largest value of each place of a float64 vector over all ranks of the role."""
        ...

    def forward_backward(
        self, batches: typing.Sequence[MicroBatch], objective: Objective
    ) -> np.ndarray:
        """Add the gradients of un-normalised losses to what is accumulated.

        All replicas must bring equally many micro-batches (fill up with dummies).

        Returns:
            Sums by objective.STATS over the micro-batches; zeros unless `place.has_stats`.
        """
        ...

    def optimizer_step(self, count: float, lr: float) -> float:
        """Reduce gradients over replicas, divide them by `count`, update, zero them.

        Args:
            count: true number of tokens (or samples) of the step, over all replicas.
            lr: learning rate of this step.

        Returns:
            Norm of the whole gradient before clipping.
        """
        ...

    def forward_logprobs(
        self, batches: typing.Sequence[MicroBatch], num_rows: int, temperature: float
    ) -> list[np.ndarray]:
        """Log-probs (float32 [R]) of each row's response; on the leader, empty list elsewhere."""
        ...

    def specs(self) -> list[TensorSpec]:
        """All canonical tensors of the model."""
        ...

    def pieces(self) -> Iterator[tuple[Box, str, np.ndarray]]:
        """What this rank publishes of them: its replica's share of its boxes."""
        ...

    def boxes(self) -> list[Box]:
        """List the boxes that `load_tensors` reads on this rank."""
        ...

    def load_tensors(self, read: typing.Callable[[Box], torch.Tensor]) -> None:
        """Load weights box by box (forward-only roles; the optimizer's copy is not touched)."""
        ...

    def save(self, folder: Path) -> None:
        """Write sharded model and optimizer into an existing folder (no manifest, no rename)."""
        ...

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, also of other parallel sizes."""
        ...

    def export_hf(self, folder: Path, source: Path) -> None:
        """Write a Hugging Face folder: weights here, configuration and tokenizer from `source`."""
        ...
