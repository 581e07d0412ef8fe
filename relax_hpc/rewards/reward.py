"""Reward functions by name. A failure is `valid=False` with its reason, never a number.

A reward function is called by the rollout loop, once per finished sample:
`result = await reward(prompt, completion_text, finish_reason)`. A function of one's own (dotted
path in `reward.kind`) has the same arguments, may be plain or async, and returns a RewardResult or
a number (then score = accuracy = that number).
"""

import asyncio
import importlib
import importlib.util
import inspect
import logging
import math
import typing
from typing import Any

from relax_hpc.config import DataConfig, RewardConfig
from relax_hpc.errors import ConfigError, require_extra
from relax_hpc.records import FinishReason, Prompt, RewardResult
from relax_hpc.rewards.math_answer import quick_verdict
from relax_hpc.rewards.score_pool import ScorePool, invalid

RewardFunction = typing.Callable[[Prompt, str, FinishReason], typing.Awaitable[RewardResult]]
"""`async (prompt, completion_text, finish_reason) -> RewardResult`. The text is the response only,
decoded without special tokens."""

KINDS = ("math", "dapo", "exact", "reasoning_gym")

_logger = logging.getLogger(__name__)


def make_reward(config: RewardConfig, data: DataConfig) -> RewardFunction:
    """Build the reward function of a run. Cheap: worker processes start at the first score.

    Args:
        config: kind and time limit.
        data: checked against the kind (`reasoning_gym` needs such a source).

    Raises:
        ConfigError: unknown kind, or a function that cannot be imported.
    """
    if config.kind == "exact":
        return _exact
    if config.kind in ("math", "dapo"):
        _require_package("math_verify")
        return _MathReward(config, wrong_score=0.0 if config.kind == "math" else -1.0)
    if config.kind == "reasoning_gym":
        if not data.train.startswith("reasoning_gym:"):
            raise ConfigError(
                f"reward.kind='reasoning_gym': data.train={data.train!r} must be "
                "reasoning_gym:TASK; use math or exact for files"
            )
        _require_package("reasoning_gym")
        return _GymReward(config)
    return _UserReward(config)


async def close_reward(function: RewardFunction) -> None:
    """End the worker processes of a reward function, if it has any."""
    if isinstance(function, (_MathReward, _GymReward)):
        await function.close()


def _require_package(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        cause = ImportError(f"no module named {module}")
        raise require_extra(module, "rollout", cause) from cause


async def _exact(prompt: Prompt, completion_text: str, finish_reason: FinishReason) -> RewardResult:
    """1 if the response, without surrounding blanks, equals the label."""
    equal = float(completion_text.strip() == prompt.label.strip())
    return RewardResult(score=equal, accuracy=equal)


class _MathReward:
    """Final answer against the label; what needs a symbolic check is done in a worker process."""

    def __init__(self, config: RewardConfig, wrong_score: float) -> None:
        self._pool = ScorePool(config.timeout_s)
        self._wrong_score = wrong_score

    async def __call__(
        self, prompt: Prompt, completion_text: str, finish_reason: FinishReason
    ) -> RewardResult:
        verdict = quick_verdict(completion_text, prompt.label)
        if verdict is not None:
            return RewardResult(1.0 if verdict else self._wrong_score, float(verdict))
        request = {"kind": "math", "text": completion_text, "label": prompt.label}
        answer = await self._pool.score(request)
        if not answer.valid or answer.accuracy == 1.0:
            return answer
        return answer._replace(score=self._wrong_score)

    async def close(self) -> None:
        await self._pool.close()


class _GymReward:
    """The task's own score, computed in a worker process (some tasks evaluate expressions)."""

    def __init__(self, config: RewardConfig) -> None:
        self._pool = ScorePool(config.timeout_s)

    async def __call__(
        self, prompt: Prompt, completion_text: str, finish_reason: FinishReason
    ) -> RewardResult:
        entry = prompt.metadata.get("reasoning_gym")
        if entry is None:
            return invalid("prompt has no reasoning_gym entry")
        return await self._pool.score({"kind": "gym", "text": completion_text, **entry})

    async def close(self) -> None:
        await self._pool.close()


class _UserReward:
    """A function named by its dotted path; plain functions run in a thread."""

    def __init__(self, config: RewardConfig) -> None:
        self._function = _import_function(config.kind)
        self._kind = config.kind
        self._timeout_s = config.timeout_s

    async def __call__(
        self, prompt: Prompt, completion_text: str, finish_reason: FinishReason
    ) -> RewardResult:
        arguments = (prompt, completion_text, finish_reason)
        try:
            async with asyncio.timeout(self._timeout_s):
                if inspect.iscoroutinefunction(self._function):
                    result = await self._function(*arguments)
                else:
                    result = await asyncio.to_thread(self._function, *arguments)
                if inspect.isawaitable(result):  # an object with an async __call__
                    result = await result
            return _checked(result)
        except TimeoutError:
            return invalid(f"{self._kind}: no score within {self._timeout_s:g} s")
        except Exception as err:
            _logger.exception("reward function %s failed", self._kind)
            return invalid(f"{self._kind}: {type(err).__name__}: {err}")


def _checked(result: Any) -> RewardResult:
    checked = (
        result if isinstance(result, RewardResult) else RewardResult(float(result), float(result))
    )
    if checked.valid and not (math.isfinite(checked.score) and math.isfinite(checked.accuracy)):
        return invalid(f"score {checked.score}, accuracy {checked.accuracy}: not finite")
    return checked


def _import_function(path: str) -> typing.Callable[..., Any]:
    module_name, dot, name = path.replace(":", ".").rpartition(".")
    if not dot:
        raise ConfigError(
            f"reward.kind={path!r}: valid are {', '.join(KINDS)}, or package.module.function"
        )
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as err:
        raise ConfigError(f"reward.kind={path!r}: cannot be imported ({err})") from err
    if not callable(function):
        raise ConfigError(f"reward.kind={path!r}: is not callable")
    return typing.cast("typing.Callable[..., Any]", function)
