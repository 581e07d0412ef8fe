"""What a rollout engine counted while it served one policy version, as metrics."""

import collections
import time

from relax_hpc.records import Completion, FinishReason
from relax_hpc.rollout.group import GroupResult, Verdict


def completion_metrics(prefix: str, completions: list[Completion]) -> dict[str, float]:
    """Lengths and truncation of completions; empty without any."""
    if not completions:
        return {}
    lengths = [len(c.token_ids) for c in completions]
    truncated = sum(c.finish_reason is FinishReason.LENGTH for c in completions)
    return {
        f"{prefix}/response_tokens_mean": sum(lengths) / len(lengths),
        f"{prefix}/response_tokens_max": max(lengths),
        f"{prefix}/truncated_ratio": truncated / len(completions),
    }


class Tally:
    """Groups finished under one version. `take` returns the metrics and starts anew."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Generated tokens since the loop started, whatever became of them."""
        self.num_groups = 0
        """Groups put since the loop started."""
        self._start()

    def _start(self) -> None:
        self._started = time.monotonic()
        self._tokens_at_start = self.num_tokens
        self._verdicts: collections.Counter[str] = collections.Counter()
        self._completions: list[Completion] = []
        self._accuracies: list[float] = []
        self._rewards: list[float] = []

    def add(self, result: GroupResult) -> None:
        """Count a finished group."""
        self.num_tokens += sum(len(c.token_ids) for c in result.completions)
        if result.verdict is Verdict.PUT:
            self.num_groups += 1
        key = result.verdict.value
        self._verdicts[key if result.verdict is Verdict.PUT else f"{key}_{result.reason}"] += 1
        self._completions += result.completions
        self._accuracies += [r.accuracy for r in result.rewards if r.valid]
        self._rewards += [float(s.fields["reward"]) for s in result.samples]

    def take(self) -> dict[str, float]:
        """Metrics since the last call; empty when no group finished."""
        metrics: dict[str, float] = {}
        if self._verdicts:
            elapsed_s = max(time.monotonic() - self._started, 1e-9)
            tokens = self.num_tokens - self._tokens_at_start
            metrics["rollout/tokens_per_s"] = tokens / elapsed_s
            metrics |= {f"rollout/groups_{k}_sum": n for k, n in self._verdicts.items()}
            metrics |= completion_metrics("rollout", self._completions)
        if self._accuracies:
            metrics["rollout/accuracy_mean"] = sum(self._accuracies) / len(self._accuracies)
        if self._rewards:
            metrics["rollout/reward_mean"] = sum(self._rewards) / len(self._rewards)
        self._start()
        return metrics
