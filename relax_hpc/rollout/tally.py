"""What a rollout engine counted: sums only, however long no weights come that would read them."""

import collections
import time
from collections.abc import Iterable

from relax_hpc.records import Completion, FinishReason
from relax_hpc.rollout.group import GroupResult, Verdict


class _Mean:
    def __init__(self) -> None:
        self.count, self.total = 0, 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value

    def metrics(self, name: str) -> dict[str, float]:
        return {name: self.total / self.count} if self.count else {}


class _Lengths:
    """Lengths and truncation of completions."""

    def __init__(self) -> None:
        self._mean, self._max, self._truncated = _Mean(), 0, 0

    def add(self, completions: Iterable[Completion]) -> None:
        for completion in completions:
            length = len(completion.token_ids)
            self._mean.add(length)
            self._max = max(self._max, length)
            self._truncated += completion.finish_reason is FinishReason.LENGTH

    def metrics(self, prefix: str) -> dict[str, float]:
        if not self._mean.count:
            return {}
        return {
            **self._mean.metrics(f"{prefix}/response_tokens_mean"),
            f"{prefix}/response_tokens_max": self._max,
            f"{prefix}/truncated_ratio": self._truncated / self._mean.count,
        }


def completion_metrics(prefix: str, completions: Iterable[Completion]) -> dict[str, float]:
    """Lengths and truncation of completions; empty without any."""
    lengths = _Lengths()
    lengths.add(completions)
    return lengths.metrics(prefix)


class Tally:
    """Finished groups. `take` returns the metrics since its last call and starts anew."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Generated tokens since the loop started, whatever became of them."""
        self.num_groups = 0
        """Groups put since the loop started."""
        self.dropped: collections.Counter[str] = collections.Counter()
        """Groups dropped since the loop started, by reason."""
        self._start()

    def _start(self) -> None:
        self._started = time.monotonic()
        self._tokens_at_start = self.num_tokens
        self._verdicts: collections.Counter[str] = collections.Counter()
        self._lengths, self._accuracy, self._reward = _Lengths(), _Mean(), _Mean()

    def add(self, result: GroupResult) -> None:
        """Count a finished group."""
        self.num_tokens += sum(len(c.token_ids) for c in result.completions)
        if result.verdict is Verdict.PUT:
            self.num_groups += 1
        elif result.verdict is Verdict.DROP:
            self.dropped[result.reason] += 1
        key = result.verdict.value
        self._verdicts[key if result.verdict is Verdict.PUT else f"{key}_{result.reason}"] += 1
        self._lengths.add(result.completions)
        for reward in result.rewards:
            if reward.valid:
                self._accuracy.add(reward.accuracy)
        for sample in result.samples:
            self._reward.add(float(sample.fields["reward"]))

    def take(self) -> dict[str, float]:
        """Metrics since the last call; empty when no group finished."""
        metrics: dict[str, float] = {}
        if self._verdicts:
            elapsed_s = max(time.monotonic() - self._started, 1e-9)
            tokens = self.num_tokens - self._tokens_at_start
            metrics["rollout/tokens_per_s"] = tokens / elapsed_s
            metrics |= {f"rollout/groups_{k}_sum": n for k, n in self._verdicts.items()}
            metrics |= self._lengths.metrics("rollout")
        metrics |= self._accuracy.metrics("rollout/accuracy_mean")
        metrics |= self._reward.metrics("rollout/reward_mean")
        self._start()
        return metrics

    def describe_drops(self) -> str:
        """Return `uninformative:120 invalid_reward:3`; empty without any."""
        return " ".join(f"{reason}:{count}" for reason, count in self.dropped.most_common())


class DropStreak:
    """Groups dropped in a row: a run that trains nothing looks busy otherwise."""

    def __init__(self, limit: int) -> None:
        """`limit`: groups in a row after which, and after each further `limit`, it is told."""
        self._limit = limit
        self._reasons: collections.Counter[str] = collections.Counter()
        self._accuracy = _Mean()

    def add(self, result: GroupResult) -> str:
        """Count a finished group; a sentence when the limit is reached, else empty."""
        if result.verdict is Verdict.PUT:
            self._reasons.clear()
            self._accuracy = _Mean()
        if result.verdict is not Verdict.DROP:
            return ""
        self._reasons[result.reason] += 1
        for reward in result.rewards:
            if reward.valid:
                self._accuracy.add(reward.accuracy)
        count = self._reasons.total()
        return self._sentence(count) if count % self._limit == 0 else ""

    def _sentence(self, count: int) -> str:
        reasons = ", ".join(f"{reason}: {n}" for reason, n in self._reasons.most_common())
        mean = self._accuracy.metrics("mean accuracy")
        accuracy = "".join(f"; {name} {value:.3f}" for name, value in mean.items())
        return (
            f"the last {count} groups were all dropped ({reasons}{accuracy}), so nothing is "
            "trained. uninformative = all samples of a group are equally right: the prompts are "
            "too easy or too hard for the model, or the reward never finds an answer; "
            "invalid_reward = the reward failed, see its reason above"
        )
