"""One evaluation: every held-out prompt on one policy version."""

import asyncio
import itertools
from collections.abc import Sequence

from relax_hpc.config import RolloutConfig
from relax_hpc.records import Completion, Prompt, RewardResult
from relax_hpc.rollout.group import GroupMaker, Prompts, all_or_cancel, eval_sampling
from relax_hpc.rollout.tally import completion_metrics

_MAX_CONCURRENT_PROMPTS = 128


async def evaluate(maker: GroupMaker, prompts: Prompts, config: RolloutConfig) -> dict[str, float]:
    """Generate and score; the caller keeps the engine on its version meanwhile.

    The seeds depend on the prompt only, so that two versions differ by their weights alone.

    Returns: eval/accuracy (mean over scored samples), eval/pass@K for K > 1 samples (share of
    prompts with a right sample), eval/samples, eval/invalid_sum, lengths. Samples whose score
    failed are counted and left out; without any scored sample there is no eval/accuracy.

    Raises:
        EngineError: a request failed.
    """
    sampling, limit = eval_sampling(config), asyncio.Semaphore(_MAX_CONCURRENT_PROMPTS)

    async def one(index: int, prompt: Prompt) -> tuple[list[Completion], list[RewardResult]]:
        async with limit:
            uid = f"eval.{index}"
            completions = await maker.generate(prompt, uid, config.eval_samples, sampling)
            return completions, await maker.score(prompt, completions)

    results = await all_or_cancel([one(i, prompts[i]) for i in range(len(prompts))])
    completions = list(itertools.chain.from_iterable(c for c, _ in results))
    rewards = list(itertools.chain.from_iterable(r for _, r in results))
    valid = [r.accuracy for r in rewards if r.valid]
    metrics: dict[str, float] = {
        "eval/samples": len(valid),
        "eval/invalid_sum": len(rewards) - len(valid),
    }
    metrics |= completion_metrics("eval", completions)
    if valid:
        metrics["eval/accuracy"] = sum(valid) / len(valid)
    if config.eval_samples > 1:
        best = [max(r.accuracy for r in group if r.valid) for _, group in results if _scored(group)]
        if best:
            metrics[f"eval/pass@{config.eval_samples}"] = sum(best) / len(best)
    return metrics


def _scored(group: Sequence[RewardResult]) -> bool:
    return any(r.valid for r in group)
