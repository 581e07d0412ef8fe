"""Scores of reasoning-gym tasks, by the task's own function. Runs in a scoring process."""

import functools
import json
import re
from typing import Any

from relax_hpc.rewards.math_answer import extract_answer

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def gym_score(text: str, task: str, options: dict[str, Any], index: int) -> float:
    """Score a response to entry `index` of a task, in [0, 1]; some tasks give partial credit.

    The answer is the last `<answer>...</answer>`, else the last box or `Answer:` line, else the
    whole text.
    """
    dataset = _dataset(task, json.dumps(options, sort_keys=True))
    score = float(dataset.score_answer(gym_answer(text), dataset[index]))
    return min(max(score, 0.0), 1.0)


def gym_answer(text: str) -> str:
    """Return the part of a response that the task scores."""
    tagged = _TAG.findall(text)
    if tagged:
        return str(tagged[-1]).strip()
    marked = extract_answer(text)
    return text.strip() if marked is None else marked


@functools.lru_cache(maxsize=8)
def _dataset(task: str, options: str) -> Any:
    import reasoning_gym

    # Made again here instead of sent: entries hold values that JSON does not keep (tuples).
    return reasoning_gym.create_dataset(task, **json.loads(options))
