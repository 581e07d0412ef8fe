"""One group: n samples of a prompt, generated, scored, filtered, and made into rows."""

import asyncio
import dataclasses
import enum
import hashlib
import typing
from collections.abc import Coroutine, Sequence

import numpy as np

from relax_hpc.algorithms.advantages import is_informative
from relax_hpc.algorithms.shaping import overlong_punishment
from relax_hpc.config import AlgorithmConfig, RolloutConfig
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.errors import EngineError
from relax_hpc.records import Completion, FinishReason, Prompt, PromptSlot, RewardResult, Sample
from relax_hpc.rewards.reward import RewardFunction
from relax_hpc.rollout.engine import Engine, GenerateRequest

EMPTY = "empty_response"
"""Reason of a group in which an engine returned no token for a sample."""


class Prompts(typing.Protocol):
    """An indexable set of prompts: `data.PromptSet`, or a list."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Prompt: ...


class Verdict(enum.StrEnum):
    """What happens to a group."""

    PUT = "put"
    DROP = "drop"
    """The prompt is used up, another one takes the slot."""
    RETURN = "return"
    """The prompt is dispatched again under a new uid."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupResult:
    """A finished group."""

    verdict: Verdict
    reason: str = ""
    """Why it is not put; a name that the queue counts by."""
    detail: str = ""
    completions: list[Completion] = dataclasses.field(default_factory=list)
    rewards: list[RewardResult] = dataclasses.field(default_factory=list)
    samples: list[Sample] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How to sample; one for training, one for evaluation."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int


def train_sampling(config: RolloutConfig) -> Sampling:
    """Sampling of training groups."""
    return Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_new_tokens=config.max_response_tokens,
    )


def eval_sampling(config: RolloutConfig) -> Sampling:
    """Sampling of evaluations."""
    length = config.eval_max_response_tokens
    return Sampling(
        temperature=config.eval_temperature,
        top_p=config.eval_top_p,
        top_k=-1,
        max_new_tokens=config.max_response_tokens if length == 0 else length,
    )


def sample_seed(run_seed: int, uid: str, sample_index: int) -> int:
    """Seed of one sample: a pure function, so that a rerun repeats and no two samples share one.

    Not of the engine, its incarnation or the time: which engine generates does not matter.

    Returns: in [0, 2**63).
    """
    key = f"{run_seed}/{uid}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


class GroupMaker:
    """Generates and scores groups on one engine. All methods run on the loop's thread."""

    def __init__(
        self,
        *,
        engine: Engine,
        reward: RewardFunction,
        tokenizer: Tokenizer,
        stop_token_ids: tuple[int, ...],
        rollout: RolloutConfig,
        algorithm: AlgorithmConfig,
        seed: int,
        deadline_s: float,
    ) -> None:
        """Keep the parts.

        Args:
            engine: started engine.
            reward: scores one completion.
            tokenizer: of the model.
            stop_token_ids: tokens that end a completion.
            rollout: sampling.
            algorithm: filter and shaping.
            seed: of the run.
            deadline_s: for all samples of one prompt, waiting for the engine included.
        """
        self._deadline_s = deadline_s
        self._engine, self._reward, self._tokenizer = engine, reward, tokenizer
        self._stop_token_ids = stop_token_ids
        self._rollout, self._algorithm, self._seed = rollout, algorithm, seed
        self._train_sampling = train_sampling(rollout)

    async def make(self, slot: PromptSlot, prompt: Prompt) -> GroupResult:
        """Generate and score the group of a slot.

        Raises:
            EngineError: a request failed; the others of the group were aborted.
        """
        completions = await self.generate(
            prompt, slot.uid, self._rollout.group_size, self._train_sampling
        )
        if any(c.finish_reason is FinishReason.ABORT for c in completions):
            return GroupResult(verdict=Verdict.RETURN, reason="aborted", completions=completions)
        if not all(c.token_ids for c in completions):
            # Nothing to train on in such a sample, and a group without it has another baseline.
            return GroupResult(verdict=Verdict.DROP, reason=EMPTY, completions=completions)
        rewards = await self.score(prompt, completions)
        drop = self._reason_to_drop(rewards)
        return GroupResult(
            verdict=Verdict.DROP if drop else Verdict.PUT,
            reason=drop,
            detail=next((r.reason for r in rewards if not r.valid), ""),
            completions=completions,
            rewards=rewards,
            samples=[] if drop else self._samples(prompt, completions, rewards),
        )

    async def generate(
        self, prompt: Prompt, uid: str, num_samples: int, sampling: Sampling
    ) -> list[Completion]:
        """Generate samples at the same time; if one fails or hangs, all are aborted.

        Raises:
            EngineError: a request failed, or the deadline passed.
        """
        requests = [
            GenerateRequest(
                request_id=f"{uid}/{index}",
                token_ids=prompt.token_ids,
                max_new_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                stop_token_ids=self._stop_token_ids,
                seed=sample_seed(self._seed, uid, index),
            )
            for index in range(num_samples)
        ]
        try:
            async with asyncio.timeout(self._deadline_s):
                completions = await all_or_cancel([self._engine.generate(r) for r in requests])
        except TimeoutError as err:
            raise EngineError(
                f"{uid}: {num_samples} samples were not generated within {self._deadline_s:g} s "
                "(half of recovery.progress_timeout_s)"
            ) from err
        return [self._cut_at_stop_string(c) for c in completions]

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[RewardResult]:
        """Score completions at the same time. Failures come back as invalid results."""
        scores = [self._reward(prompt, self._text(c), c.finish_reason) for c in completions]
        return await all_or_cancel([_as_coroutine(score) for score in scores])

    def _reason_to_drop(self, rewards: Sequence[RewardResult]) -> str:
        if not all(r.valid for r in rewards):
            # Never a number: one unscored sample would shift the baseline of its whole group.
            return "invalid_reward"
        accuracies = [r.accuracy for r in rewards]
        if self._algorithm.dynamic_sampling and not is_informative(accuracies):
            return "uninformative"
        return ""

    def _samples(
        self, prompt: Prompt, completions: Sequence[Completion], rewards: Sequence[RewardResult]
    ) -> list[Sample]:
        return [
            self._sample(prompt, completion, result)
            for completion, result in zip(completions, rewards, strict=True)
        ]

    def _sample(self, prompt: Prompt, completion: Completion, result: RewardResult) -> Sample:
        num_tokens = len(completion.token_ids)
        punishment = overlong_punishment(
            num_tokens,
            self._rollout.max_response_tokens,
            self._algorithm.overlong_buffer_tokens,
            self._algorithm.overlong_penalty,
        )
        return Sample(
            num_prompt_tokens=len(prompt.token_ids),
            finish_reason=completion.finish_reason,
            fields={
                "tokens": np.array(prompt.token_ids + completion.token_ids, dtype=np.int32),
                "rollout_logprobs": np.array(completion.logprobs, dtype=np.float32),
                "token_versions": np.array(completion.token_versions, dtype=np.int32),
                "loss_mask": np.ones(num_tokens, dtype=np.uint8),
                "reward": np.array(result.score + punishment, dtype=np.float32),
                "accuracy": np.array(result.accuracy, dtype=np.float32),
            },
        )

    def _text(self, completion: Completion) -> str:
        return self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)

    def _cut_at_stop_string(self, completion: Completion) -> Completion:
        """End a completion with the token that completes a stop string.

        Done here and not in the engine, which knows no text. The kept tokens have the right
        distribution: whether to stop after a token depends on the tokens up to it only.
        """
        stop, tokens = self._rollout.stop, completion.token_ids
        if not stop or not self._has_stop_string(tokens):
            return completion
        low, high = 1, len(tokens)  # smallest number of tokens whose text has a stop string
        while low < high:
            middle = (low + high) // 2
            if self._has_stop_string(tokens[:middle]):
                high = middle
            else:
                low = middle + 1
        return Completion(
            token_ids=tokens[:low],
            logprobs=completion.logprobs[:low],
            token_versions=completion.token_versions[:low],
            finish_reason=FinishReason.STOP,
        )

    def _has_stop_string(self, tokens: list[int]) -> bool:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return any(stop in text for stop in self._rollout.stop)


_Result = typing.TypeVar("_Result")


async def all_or_cancel(
    coroutines: Sequence[Coroutine[typing.Any, typing.Any, _Result]],
) -> list[_Result]:
    """Run coroutines at the same time; the first failure cancels the others and is raised."""
    tasks = [asyncio.create_task(c) for c in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _as_coroutine(awaitable: typing.Awaitable[_Result]) -> _Result:
    return await awaitable
