"""Policy loss, KL and their aggregation, un-normalised: the caller divides once per train step.

Legend: T packed response tokens of a micro-batch, S samples of it.

Why un-normalised: a mean of per-micro-batch means weights a token by how the batch was cut. Sums
over micro-batches and data parallel ranks, divided by the step's true count, do not.
"""

import torch

from relax_hpc.algorithms.corrections import MAX_LOG_RATIO
from relax_hpc.config import LossAggregation


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
    weights: torch.Tensor | None = None,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate loss per token with separate clip ranges.

    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logprobs - old_logprobs):
    PPO eq. 7 (arXiv:1707.06347) with DAPO's clip-higher (arXiv:2503.14476 eq. 10).

    Args:
        logprobs: [T] of the policy that trains; carries the gradient.
        old_logprobs: [T] of the policy that the ratio refers to; detached here.
        advantages: [T] the sample's advantage at each of its tokens.
        mask: [T] bool or 0/1; elsewhere loss and gradient are exactly 0, whatever the inputs are.
        clip_low: epsilon_low, in (0, 1).
        clip_high: epsilon_high, > 0.
        weights: [T] importance weights (`corrections.tis_weights`), or None.
        dual_clip: c > 1 bounds the loss of negative advantages by c * |A| (arXiv:1912.09729
            eq. 5); None = off.

    Returns:
        loss [T] float32 and sums over the masked tokens, all detached scalars: `num_tokens`,
        `clipped` (tokens whose gradient the clip removed), `ratio`, `kl` (k3 estimate of
        KL(old || new), 0 on the first on-policy update).

    Raises:
        ValueError: dual_clip <= 1.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"policy_loss: dual_clip={dual_clip} must be > 1")
    keep = mask.bool()
    # Zeroed before exp: padding may hold anything, and 0 * inf is NaN in the backward pass.
    log_ratio = torch.where(keep, logprobs.float() - old_logprobs.detach().float(), 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantage = torch.where(keep, advantages.detach().float(), 0.0)
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    is_clipped = clipped > plain
    if dual_clip is not None:
        bound = torch.where(advantage < 0, -advantage * dual_clip, torch.inf)
        is_clipped = is_clipped | (bound < loss)
        loss = torch.minimum(loss, bound)
    if weights is not None:
        loss = loss * torch.where(keep, weights.detach().float(), 0.0)
    stats = {
        "num_tokens": keep.sum(),
        "clipped": (is_clipped & keep).sum(),
        "ratio": (ratio.detach() * keep).sum(),
        "kl": ((ratio - 1 - log_ratio).detach() * keep).sum(),
    }
    return torch.where(keep, loss, 0.0), stats


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference), >= 0: exp(d) - d - 1, d = ref - policy.

    The k3 estimator (Schulman 2020, "Approximating KL divergence"; GRPO arXiv:2402.03300 eq. 4).

    Args:
        logprobs: [T] of the policy; carries the gradient.
        ref_logprobs: [T] of the reference; detached here.

    Returns:
        [T] float32; not masked.
    """
    difference = (ref_logprobs.detach().float() - logprobs.float()).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )
    return difference.exp() - difference - 1


def aggregate_loss(
    loss: torch.Tensor,
    mask: torch.Tensor,
    sample_ids: torch.Tensor,
    tokens_per_sample: torch.Tensor,
    aggregation: LossAggregation,
) -> torch.Tensor:
    """Sum the per-token loss of a micro-batch, weighted so that dividing by `loss_count` is right.

    Args:
        loss: [T] per-token loss.
        mask: [T] bool or 0/1, the tokens that count.
        sample_ids: [T] int64, the sample (0 .. S-1) of each token.
        tokens_per_sample: [S] masked tokens of the whole sample (also where this rank holds only a
            part of it: context parallelism).
        aggregation: token (DAPO, arXiv:2503.14476 sec. 3.3) or sample (GRPO) mean.

    Returns:
        Scalar float32 sum; add it over micro-batches and ranks, divide by the step's count.
    """
    kept = torch.where(mask.bool(), loss, 0.0)
    if aggregation is LossAggregation.SAMPLE:
        kept = kept / tokens_per_sample.clamp(min=1).to(kept.dtype)[sample_ids]
    return kept.sum()


def loss_count(tokens_per_sample: torch.Tensor, aggregation: LossAggregation) -> torch.Tensor:
    """What the step's summed loss is divided by: masked tokens, or samples that have any.

    Padding rows and fully masked (truncated) samples count neither above nor below the line.

    Args:
        tokens_per_sample: [S] masked tokens of each sample.
        aggregation: as in `aggregate_loss`.

    Returns:
        Scalar int64; add it over micro-batches and data parallel ranks.
    """
    if aggregation is LossAggregation.SAMPLE:
        return (tokens_per_sample > 0).sum()
    return tokens_per_sample.sum()
