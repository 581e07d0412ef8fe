"""A reward for tests: right when the letters of the answer have an even sum."""

from relax_hpc.records import FinishReason, Prompt, RewardResult


def even(prompt: Prompt, completion_text: str, finish_reason: FinishReason) -> RewardResult:
    accuracy = float(sum(map(ord, completion_text)) % 2 == 0)
    return RewardResult(score=2 * accuracy - 1, accuracy=accuracy)
