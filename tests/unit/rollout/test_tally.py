"""Counts of a rollout engine: sums, nothing that grows."""

import pytest

from relax_hpc.records import Completion, FinishReason, RewardResult
from relax_hpc.rollout.group import GroupResult, Verdict
from relax_hpc.rollout.tally import DropStreak, Tally, completion_metrics


def completion(length: int, reason: FinishReason = FinishReason.STOP) -> Completion:
    return Completion(
        token_ids=[1] * length,
        logprobs=[0.0] * length,
        token_versions=[0] * length,
        finish_reason=reason,
    )


def dropped(reason: str, accuracy: float = 0.0) -> GroupResult:
    return GroupResult(
        verdict=Verdict.DROP,
        reason=reason,
        completions=[completion(2), completion(6, FinishReason.LENGTH)],
        rewards=[RewardResult(0.0, accuracy), RewardResult(0.0, 0.0, valid=False)],
    )


PUT = GroupResult(verdict=Verdict.PUT, completions=[completion(1)])


def test_metrics_are_those_of_the_completions() -> None:
    tally = Tally()
    for result in (dropped("uninformative"), PUT, dropped("uninformative", 0.5)):
        tally.add(result)
    metrics = tally.take()
    assert metrics.pop("rollout/tokens_per_s") > 0
    assert metrics == {
        "rollout/groups_put_sum": 1,
        "rollout/groups_drop_uninformative_sum": 2,
        "rollout/response_tokens_mean": 17 / 5,
        "rollout/response_tokens_max": 6,
        "rollout/truncated_ratio": 2 / 5,
        "rollout/accuracy_mean": 0.25,
    }
    assert tally.take() == {}
    assert (tally.num_tokens, tally.num_groups) == (17, 1)
    assert tally.describe_drops() == "uninformative:2"
    assert completion_metrics("eval", []) == {}


def test_nothing_grows_with_the_number_of_groups() -> None:
    tally, result = Tally(), dropped("uninformative")
    for _ in range(1000):
        tally.add(result)
    held = [value for part in (tally, *vars(tally).values()) for value in vars_of(part)]
    assert all(len(value) < 10 for value in held if hasattr(value, "__len__"))


def vars_of(part: object) -> list[object]:
    return list(vars(part).values()) if hasattr(part, "__dict__") else []


@pytest.mark.parametrize("limit", [3])
def test_a_streak_is_told_at_the_limit_and_again(limit: int) -> None:
    streak = DropStreak(limit)
    told = [bool(streak.add(dropped("uninformative", 1.0))) for _ in range(7)]
    assert told == [False, False, True, False, False, True, False]
    streak.add(PUT)
    returned = GroupResult(verdict=Verdict.RETURN, reason="aborted")
    results = [dropped("invalid_reward"), returned, dropped("uninformative", 1.0), returned]
    assert not any(streak.add(result) for result in results)
    sentence = streak.add(dropped("uninformative", 1.0))
    assert "last 3 groups" in sentence
    assert "uninformative: 2, invalid_reward: 1; mean accuracy 0.667" in sentence
