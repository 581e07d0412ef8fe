"""Groups: stop strings, overlong shaping, evaluation metrics."""

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest

from relax_hpc.config import AlgorithmConfig, RolloutConfig
from relax_hpc.errors import EngineError
from relax_hpc.records import Completion, FinishReason, Prompt, PromptSlot, RewardResult
from relax_hpc.rollout.engine import GenerateRequest
from relax_hpc.rollout.evaluation import evaluate
from relax_hpc.rollout.group import GroupMaker, Verdict

PROMPT = Prompt(token_ids=[7, 8], label="1", text="", metadata={})
SLOT = PromptSlot(uid="0.0.1", prompt_index=0, epoch=0, deadline_version=1)


class Letters:
    """Token 0 is a, 1 is b ...; token 25 is a special one."""

    eos_token_id = 25
    chat_template = None

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 97 for c in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        kept = [t for t in token_ids if t != 25 or not skip_special_tokens]
        return "".join(chr(97 + t) for t in kept)

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


class Scripted:
    """An engine that answers with given texts in turn."""

    version = 4

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.requests: list[GenerateRequest] = []
        self.cancelled = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        text = self.texts[len(self.requests) % len(self.texts)]
        self.requests.append(request)
        if text == "fail":
            raise EngineError("no")
        if text == "hang":
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        tokens = [ord(c) - 97 for c in text]
        return Completion(
            token_ids=tokens,
            logprobs=[-float(i) for i in range(len(tokens))],
            token_versions=[4] * len(tokens),
            finish_reason=FinishReason.LENGTH if tokens[-1:] != [25] else FinishReason.STOP,
        )


def make_maker(
    engine: Any,
    reward: Any,
    algorithm: AlgorithmConfig | None = None,
    rollout_deadline_s: float = 60.0,
    **rollout: Any,
) -> GroupMaker:
    settings = {"groups_per_step": 1, "group_size": 2, "max_response_tokens": 10} | rollout
    return GroupMaker(
        engine=engine,
        reward=reward,
        tokenizer=Letters(),
        stop_token_ids=(25,),
        rollout=RolloutConfig(**settings),
        algorithm=AlgorithmConfig() if algorithm is None else algorithm,
        seed=0,
        deadline_s=rollout_deadline_s,
    )


async def has_a(prompt: Prompt, text: str, reason: FinishReason) -> RewardResult:
    assert "z" not in text  # special tokens are no part of the text
    return RewardResult(float("a" in text), float("a" in text))


@pytest.mark.parametrize(
    ("text", "kept", "reason"),
    [
        ("bcdefgh", "bcde", FinishReason.STOP),
        ("dede", "de", FinishReason.STOP),
        ("bcxybb", "bcxy", FinishReason.STOP),
        ("bcdz", "bcdz", FinishReason.STOP),
        ("bcd", "bcd", FinishReason.LENGTH),
    ],
)
def test_stop_strings_cut_where_they_complete(text: str, kept: str, reason: FinishReason) -> None:
    maker = make_maker(Scripted(text), has_a, stop=("de", "xy"))
    completions = asyncio.run(maker.generate(PROMPT, "u", 2, maker._train_sampling))
    for completion in completions:
        assert Letters().decode(completion.token_ids) == kept
        assert completion.finish_reason is reason
        assert len(completion.logprobs) == len(completion.token_versions) == len(kept)


def test_a_group_with_an_empty_response_is_dropped() -> None:
    async def unasked(prompt: Prompt, text: str, reason: FinishReason) -> RewardResult:
        raise AssertionError("not scored")

    result = asyncio.run(make_maker(Scripted("abc", ""), unasked).make(SLOT, PROMPT))
    assert (result.verdict, result.reason) == (Verdict.DROP, "empty_response")
    assert not result.samples


def test_overlong_punishment_is_in_the_reward_and_not_in_the_accuracy() -> None:
    algorithm = AlgorithmConfig(overlong_buffer_tokens=4, overlong_penalty=2.0)
    maker = make_maker(Scripted("abbbbbbb", "bbbbbbbbbb"), has_a, algorithm)
    result = asyncio.run(maker.make(SLOT, PROMPT))
    # 8 tokens: half of the interval 6..10; 10 tokens: all of it.
    assert [float(s.fields["reward"]) for s in result.samples] == [1.0 - 1.0, 0.0 - 2.0]
    assert [float(s.fields["accuracy"]) for s in result.samples] == [1.0, 0.0]


def test_a_group_that_differs_in_punishment_only_is_uninformative() -> None:
    algorithm = AlgorithmConfig(overlong_buffer_tokens=4)
    maker = make_maker(Scripted("b", "bbbbbbbbbb"), has_a, algorithm)
    result = asyncio.run(maker.make(SLOT, PROMPT))
    assert (result.verdict, result.reason, result.samples) == (Verdict.DROP, "uninformative", [])
    off = dataclasses.replace(algorithm, dynamic_sampling=False)
    maker = make_maker(Scripted("b", "bbbbbbbbbb"), has_a, off)
    assert asyncio.run(maker.make(SLOT, PROMPT)).verdict is Verdict.PUT


def test_samples_keep_tokens_logprobs_and_reasons() -> None:
    maker = make_maker(Scripted("az", "bcd"), has_a)
    first, second = asyncio.run(maker.make(SLOT, PROMPT)).samples
    assert first.fields["tokens"].tolist() == [7, 8, 0, 25]
    np.testing.assert_array_equal(second.fields["rollout_logprobs"], [0.0, -1.0, -2.0])
    assert (first.finish_reason, second.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)
    assert first.num_prompt_tokens == 2


def test_one_failed_request_aborts_the_rest_of_its_group() -> None:
    engine = Scripted("hang", "fail")
    with pytest.raises(EngineError):
        asyncio.run(make_maker(engine, has_a).make(SLOT, PROMPT))
    assert engine.cancelled == 1


def test_a_straggler_ends_at_the_deadline() -> None:
    engine = Scripted("ab", "hang")
    maker = make_maker(engine, has_a, rollout_deadline_s=0.1)
    with pytest.raises(EngineError, match=r"0\.0\.1: 2 samples were not generated"):
        asyncio.run(maker.make(SLOT, PROMPT))
    assert engine.cancelled == 1


def test_evaluation_counts_and_pass_at_k() -> None:
    async def reward(prompt: Prompt, text: str, reason: FinishReason) -> RewardResult:
        if text == "c":
            return RewardResult(0.0, 0.0, valid=False, reason="down")
        return await has_a(prompt, text, reason)

    engine = Scripted("az", "b", "b", "b", "c", "c")
    maker = make_maker(engine, reward, eval_samples=2, eval_temperature=0.5, eval_top_p=0.7)
    config = maker._rollout
    metrics = asyncio.run(evaluate(maker, [PROMPT, PROMPT, PROMPT], config))
    assert metrics["eval/accuracy"] == pytest.approx(1 / 4)
    assert (metrics["eval/samples"], metrics["eval/invalid_sum"]) == (4, 2)
    assert metrics["eval/pass@2"] == pytest.approx(1 / 2)
    assert {(r.temperature, r.top_p) for r in engine.requests} == {(0.5, 0.7)}
    assert len({r.seed for r in engine.requests}) == 6
    assert asyncio.run(evaluate(maker, [], config))["eval/samples"] == 0
