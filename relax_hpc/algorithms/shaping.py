"""Reward shaping: what is added to a score before advantages are computed. Torch-free."""

from relax_hpc.records import FinishReason


def is_truncated(finish_reason: FinishReason) -> bool:
    """True exactly when generation hit the length limit.

    An end token at the very last position is not a truncation, so the length says nothing; a
    missing reason is an error, never "not truncated".
    """
    return FinishReason(finish_reason) is FinishReason.LENGTH


def overlong_punishment(
    num_response_tokens: int,
    max_response_tokens: int,
    buffer_tokens: int,
    penalty: float = 1.0,
) -> float:
    """Soft overlong punishment, a number <= 0 to add to the score (DAPO, arXiv:2503.14476 eq. 13).

    0 up to max_response_tokens - buffer_tokens, then linear to -penalty at max_response_tokens,
    and no lower beyond it (some implementations go on to -1.5 * penalty).

    Args:
        num_response_tokens: tokens of the whole response, counted before any loss masking.
        max_response_tokens: L_max.
        buffer_tokens: L_cache, length of the punished interval; 0 = off.
        penalty: size of the full punishment, in units of the score.
    """
    if not 0 <= buffer_tokens < max_response_tokens:
        raise ValueError(
            f"overlong: buffer_tokens={buffer_tokens} must be in [0, max_response_tokens="
            f"{max_response_tokens})"
        )
    if buffer_tokens == 0:
        return 0.0
    excess = num_response_tokens - (max_response_tokens - buffer_tokens)
    return -penalty * min(max(excess / buffer_tokens, 0.0), 1.0)
