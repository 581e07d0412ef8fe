"""Sampling of tokens: exact, reproducible per request, independent of the batch around it.

Shapes: B sequences, V vocabulary.
"""

import dataclasses

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParameters:
    """Per-sequence parameters of one sampling call."""

    temperature: torch.Tensor
    """float32 [B]; 0 = greedy."""
    top_p: torch.Tensor
    """float32 [B]; 1 = off."""
    top_k: torch.Tensor
    """int64 [B]; -1 = off."""

    @property
    def is_truncated(self) -> bool:
        """Whether any sequence cuts its support (evaluation only)."""
        return bool((self.top_p < 1).any() or (self.top_k > 0).any())


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Draw one number per sequence as a pure function of its seed and its token's position.

    No generator state: a request that is paused, moved or computed again draws the same numbers.
    SplitMix64 (Steele et al., OOPSLA 2014) with the mixed seed as start and the position as count.

    Args:
        seeds: uint64 [B].
        positions: [B], index of the token in the completion.

    Returns: float64 [B] in [0, 1).
    """
    with np.errstate(over="ignore"):
        start = _mix(np.asarray(seeds, dtype=np.uint64) + _GOLDEN)
        state = _mix(start + (np.asarray(positions).astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


def sample(
    logits: torch.Tensor, parameters: SamplingParameters, draws: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample by inverting the cumulative distribution.

    The reported log-prob is the log-softmax of logits / temperature over the whole vocabulary
    (greedy: temperature 1): exactly what was sampled from, unless top-p or top-k cut the support.

    Args:
        logits: float32 [B, V].
        parameters: of the B sequences.
        draws: float64 [B], see `uniforms`.

    Returns: tokens int64 [B], log-probs float32 [B].
    """
    is_greedy = parameters.temperature == 0
    scale = torch.where(is_greedy, 1.0, parameters.temperature)
    logprobs = torch.log_softmax(logits / scale[:, None], dim=-1)
    probabilities = logprobs.exp().double()
    if parameters.is_truncated:
        probabilities = _truncate(probabilities, parameters)
    # float64: a float32 running sum over 150,000 tokens would move the borders by 1e-3 of a token.
    cumulative = probabilities.cumsum(-1)
    targets = draws[:, None] * cumulative[:, -1:]
    # right=True: the first token whose running sum exceeds the draw, never one of probability 0.
    sampled = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    sampled = torch.minimum(sampled, torch.tensor(logits.shape[1] - 1, device=sampled.device))
    tokens = torch.where(is_greedy, logits.argmax(-1), sampled)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _truncate(probabilities: torch.Tensor, parameters: SamplingParameters) -> torch.Tensor:
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    ranks = torch.arange(probabilities.shape[1], device=probabilities.device)[None]
    limit = torch.where(parameters.top_k > 0, parameters.top_k, probabilities.shape[1])
    # top-p 1 means off; a running sum that rounds to 1 must not cut the tail then.
    nucleus = (before < parameters.top_p[:, None]) | (parameters.top_p[:, None] >= 1)
    kept = ordered.masked_fill(~(nucleus & (ranks < limit[:, None])), 0.0)
    return torch.zeros_like(probabilities).scatter(1, order, kept)
