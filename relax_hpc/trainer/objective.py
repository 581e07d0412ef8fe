"""The loss of one micro-batch, un-normalised, and the sums that the step's metrics come from.

Legend: T places of a micro-batch, V local vocabulary columns.

Which policy the probability ratio refers to (`old_logprobs`):
- the `logprob` role runs: its `train_logprobs`;
- max_staleness = 0: `rollout_logprobs`; sampler and trainer hold the same weights;
- else: the trainer's own log-probs at first use, detached. Each sample is used in one optimizer
  step, so the ratio is exactly 1 and no clipping happens; being off-policy is corrected by
  truncated importance sampling against `rollout_logprobs` (decoupled objective, arXiv:2505.24298).
"""

import dataclasses
import enum
import typing

import torch

from relax_hpc.algorithms.corrections import tis_weights
from relax_hpc.algorithms.losses import aggregate_loss, kl_k3, policy_loss
from relax_hpc.algorithms.numerics import VocabShard, logprobs_and_entropy
from relax_hpc.config import AlgorithmConfig, Config
from relax_hpc.trainer.micro_batch import MicroBatch, TokenField

STATS = (
    "loss",
    "num_tokens",
    "clipped",
    "ratio",
    "kl",
    "logprob_diff",
    "entropy",
    "ref_kl",
    "tis_weight",
)
"""Names of the sums of one micro-batch, in the order of the tensor that `__call__` returns.
`loss` has the loss's own normaliser, the others are sums over counted tokens."""


class OldPolicy(enum.StrEnum):
    """Where `old_logprobs` come from; see the top of the file."""

    LOGPROB_ROLE = "train_logprobs"
    ROLLOUT = "rollout_logprobs"
    FIRST_USE = "first_use"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """Policy loss + KL - entropy bonus of one micro-batch."""

    algorithm: AlgorithmConfig
    old_policy: OldPolicy
    use_tis: bool
    use_ref: bool
    temperature: float

    @classmethod
    def from_config(cls, config: Config) -> "Objective":
        """Choose by the roles that run and the staleness that samples may have."""
        is_stale = config.rollout.max_staleness > 0
        if config.resources.logprob is not None:
            old_policy = OldPolicy.LOGPROB_ROLE
        else:
            old_policy = OldPolicy.FIRST_USE if is_stale else OldPolicy.ROLLOUT
        return cls(
            algorithm=config.algorithm,
            old_policy=old_policy,
            use_tis=is_stale and config.algorithm.tis_clip > 0,
            use_ref=config.resources.ref is not None,
            temperature=config.rollout.temperature,
        )

    @property
    def fields(self) -> tuple[TokenField, ...]:
        """Response fields that every row must bring."""
        names = ["rollout_logprobs"]
        names += ["train_logprobs"] if self.old_policy is OldPolicy.LOGPROB_ROLE else []
        names += ["ref_logprobs"] if self.use_ref else []
        return tuple(TokenField(name=name) for name in names)

    def __call__(
        self, logits: torch.Tensor, batch: MicroBatch, shard: VocabShard
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the loss.

        Args:
            logits: [T, V] of the last pipeline stage.
            batch: the micro-batch; `fields` holds `advantages` and those of `self.fields`.
            shard: which vocabulary columns the logits are.

        Returns:
            Un-normalised loss (scalar, with gradient) and the sums of STATS (float64, detached).
        """
        with_entropy = self.algorithm.entropy_coef > 0
        logprobs, entropy = logprobs_and_entropy(
            logits, batch.targets, shard, self.temperature, with_entropy
        )
        old = self._old_logprobs(logprobs, batch)
        rollout = batch.fields["rollout_logprobs"]
        weights = tis_weights(old, rollout, self.algorithm.tis_clip) if self.use_tis else None
        loss, sums = policy_loss(
            logprobs,
            old,
            batch.fields["advantages"],
            batch.mask,
            self.algorithm.clip_low,
            self.algorithm.clip_high,
            weights,
        )
        ref_kl = torch.zeros_like(logprobs)
        if self.use_ref:
            ref_kl = kl_k3(logprobs, batch.fields["ref_logprobs"])
            loss = loss + self.algorithm.kl_coef * ref_kl
        if with_entropy:
            loss = loss - self.algorithm.entropy_coef * entropy
        total = aggregate_loss(
            loss,
            batch.mask,
            batch.sample_ids,
            batch.tokens_per_sample,
            self.algorithm.loss_aggregation,
        )
        keep = batch.mask
        more = {
            "loss": total,
            "logprob_diff": _kept_sum((logprobs - rollout).abs(), keep),
            "entropy": _kept_sum(entropy, keep),
            "ref_kl": _kept_sum(ref_kl, keep),
            "tis_weight": _kept_sum(torch.ones_like(old) if weights is None else weights, keep),
        }
        return total, _as_vector(sums | more)

    def _old_logprobs(self, logprobs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        if self.old_policy is OldPolicy.FIRST_USE:
            return logprobs.detach()
        return batch.fields[self.old_policy.value]


def _kept_sum(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return torch.where(keep, x.detach(), 0.0).sum()


def _as_vector(sums: typing.Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([sums[name].detach().to(torch.float64) for name in STATS])
