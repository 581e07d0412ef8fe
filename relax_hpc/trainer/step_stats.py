"""Statistics of one train step: sums on each rank, summed over replicas once, then metrics.

Two sources, kept apart because they live on different ranks: loss sums of the last pipeline stage
(objective.STATS) and counts of rows on the data leaders. Each number is contributed by exactly one
rank of a replica, so a plain sum over all ranks is the total.
"""

import typing
from collections.abc import Sequence

import numpy as np

from relax_hpc.config import LossAggregation
from relax_hpc.records import FinishReason, Row
from relax_hpc.trainer.objective import STATS

_ROWS = (
    "count",
    "samples",
    "reward",
    "accuracy",
    "tokens",
    "response_tokens",
    "truncated",
    "staleness",
)
_MAXIMA = ("staleness", "response_tokens")


class StepStats:
    """Accumulates over the chunks of one step; `metrics` after `set_totals` and `set_maxima`."""

    def __init__(self, step: int) -> None:
        """Args: step: policy version before the update; staleness counts from it."""
        self._step = step
        self._sums = np.zeros(len(STATS))
        self._rows = dict.fromkeys(_ROWS, 0.0)
        self._maxima = dict.fromkeys(_MAXIMA, 0.0)
        self._totals: dict[str, float] = {}
        self.wait_s = 0.0
        """Seconds that this rank waited for rows."""

    def add_sums(self, sums: np.ndarray) -> None:
        """Add the loss sums of some micro-batches."""
        self._sums += sums

    def add_rows(self, rows: Sequence[Row], aggregation: LossAggregation) -> None:
        """Count the rows of a chunk; on data leaders only."""
        for row in rows:
            self._add_row(row, aggregation)

    def _add_row(self, row: Row, aggregation: LossAggregation) -> None:
        counted = int(np.count_nonzero(row.fields["loss_mask"]))
        # The length is that of the response, not of its mask: masking must not shorten it.
        response_tokens = row.num_tokens - row.num_prompt_tokens
        staleness = max(0, self._step - int(row.fields["token_versions"].min()))
        per_sample = aggregation is LossAggregation.SAMPLE
        added = {
            "count": float(counted > 0) if per_sample else counted,
            "samples": 1,
            "reward": float(row.fields["reward"]),
            "accuracy": float(row.fields["accuracy"]),
            "tokens": row.num_tokens,
            "response_tokens": response_tokens,
            "truncated": row.finish_reason is FinishReason.LENGTH,
            "staleness": staleness,
        }
        for name, value in added.items():
            self._rows[name] += value
        for name in _MAXIMA:
            self._maxima[name] = max(self._maxima[name], added[name])

    def sums(self) -> np.ndarray:
        """Return this rank's contribution, to be summed over all ranks."""
        return np.concatenate([self._sums, [self._rows[name] for name in _ROWS]])

    def set_totals(self, totals: np.ndarray) -> None:
        """Take the sums over all ranks."""
        names = [f"sum_{name}" for name in STATS] + list(_ROWS)
        self._totals = {name: float(v) for name, v in zip(names, totals, strict=True)}

    def maxima(self) -> np.ndarray:
        """Return this rank's maxima, to be reduced by MAX over all ranks."""
        return np.array([self._maxima[name] for name in _MAXIMA])

    def set_maxima(self, maxima: np.ndarray) -> None:
        """Take the maxima over all ranks."""
        self._maxima = {name: float(v) for name, v in zip(_MAXIMA, maxima, strict=True)}

    @property
    def count(self) -> float:
        """True number of tokens (or samples) that the step's loss is the mean over."""
        return self._totals["count"]

    @property
    def loss(self) -> float:
        """Mean loss of the step."""
        return self._totals["sum_loss"] / max(1.0, self.count)

    def metrics(self, step_s: float) -> dict[str, float]:
        """Return the metrics of the step. Args: step_s: its duration in seconds."""
        by_token = _mean_over(self._totals, self._totals["sum_num_tokens"])
        by_sample = _mean_over(self._totals, self._totals["samples"])
        return {
            "train/loss": self.loss,
            "train/reward_mean": by_sample("reward"),
            "train/accuracy_mean": by_sample("accuracy"),
            "train/clip_fraction": by_token("sum_clipped"),
            "train/ratio_mean": by_token("sum_ratio"),
            "train/ppo_kl": by_token("sum_kl"),
            "train/kl": by_token("sum_ref_kl"),
            "train/entropy": by_token("sum_entropy"),
            "train/tis_weight_mean": by_token("sum_tis_weight"),
            "train/logprob_diff_mean": by_token("sum_logprob_diff"),
            "train/staleness_mean": by_sample("staleness"),
            "train/staleness_max": self._maxima["staleness"],
            "train/response_tokens_mean": by_sample("response_tokens"),
            "train/response_tokens_max": self._maxima["response_tokens"],
            "train/truncated_fraction": by_sample("truncated"),
            "train/samples_sum": self._totals["samples"],
            "train/tokens_sum": self._totals["tokens"],
            "train/tokens_per_s": self._totals["tokens"] / max(step_s, 1e-9),
            "train/step_s": step_s,
            "train/wait_s": self.wait_s,
        }


def _mean_over(totals: dict[str, float], count: float) -> typing.Callable[[str], float]:
    return lambda name: totals[name] / max(1.0, count)
