"""Corrections for the difference between the policy that sampled and the one that trains."""

import torch

# exp(20) is 4.9e8: far beyond any useful ratio, far below float32 overflow.
MAX_LOG_RATIO = 20.0


def tis_weights(
    train_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, clip: float
) -> torch.Tensor:
    """Truncated importance-sampling weight of each token: min(pi_train / pi_rollout, clip).

    Corrects for stale samples and for numeric differences between engine and trainer; multiply the
    policy loss by it. Carries no gradient. Source: Espeholt et al., arXiv:1802.01561 (truncated
    IS); "Your efficient RL framework secretly brings you off-policy RL training" (2025).

    Args:
        train_logprobs: [T] log-probs under the trainer's (old) policy.
        rollout_logprobs: [T] log-probs that the engine sampled with.
        clip: upper bound of the weight; 0 = off (all ones).

    Returns:
        [T] float32, detached.
    """
    if clip < 0:
        raise ValueError(f"tis_weights: clip={clip} must be >= 0 (0 = off)")
    log_ratio = (train_logprobs.detach().float() - rollout_logprobs.detach().float()).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )
    return torch.ones_like(log_ratio) if clip == 0 else log_ratio.exp().clamp(max=clip)
