"""Group advantages and the dynamic-sampling filter. numpy only: rollout and train both use it.

Legend: N samples (rows), any order; a group is the samples of one dispatched prompt.
"""

import typing

import numpy as np


def group_advantages(
    rewards: np.ndarray,
    group_ids: typing.Sequence[object] | np.ndarray,
    normalise_by_std: bool,
    eps: float = 1e-6,
    valid: np.ndarray | None = None,
) -> np.ndarray:
    """Centre rewards inside each group and, if asked, divide by the group's standard deviation.

    The standard deviation is the *population* one (divisor n), pinned by a test: [1, 1, 1, 0] gives
    (.577, .577, .577, -1.732). Groups are found by id, so the order of rows does not matter.

    Args:
        rewards: [N] shaped rewards.
        group_ids: [N] group uid of each row (ints or strings), unique per dispatch: two copies of
            one prompt are two groups.
        normalise_by_std: GRPO (arXiv:2402.03300 sec. 4.1.2); False: Dr.GRPO (arXiv:2503.20783).
        eps: added to the standard deviation, in units of the reward.
        valid: [N] bool; False = the reward could not be computed. Such a row neither votes in the
            baseline nor gets an advantage. None: all valid.

    Returns:
        [N] float32. 0 for groups with fewer than two valid rows or with equal rewards.

    Raises:
        ValueError: shapes differ, or a valid reward is not finite (never trained on silently).
    """
    values = np.asarray(rewards, dtype=np.float64)
    is_valid = np.ones(values.shape, bool) if valid is None else np.asarray(valid, bool)
    ids = np.asarray(group_ids)
    if values.ndim != 1 or ids.shape != values.shape or is_valid.shape != values.shape:
        raise ValueError(
            f"advantages: rewards {values.shape}, group_ids {ids.shape} and valid {is_valid.shape} "
            "must be one-dimensional and of equal length"
        )
    bad = is_valid & ~np.isfinite(values)
    if bad.any():
        raise ValueError(f"advantages: reward of row {int(bad.argmax())} is {values[bad][0]}")
    _, group_of_row = np.unique(ids, return_inverse=True)
    advantages = np.zeros(values.shape, np.float64)
    for group in range(int(group_of_row.max(initial=-1)) + 1):
        rows = np.flatnonzero((group_of_row == group) & is_valid)
        advantages[rows] = _centred(values[rows], normalise_by_std, eps)
    return advantages.astype(np.float32)


def _centred(values: np.ndarray, normalise_by_std: bool, eps: float) -> np.ndarray:
    # Tested on equality, not on std == 0: the mean of n times 0.1 is off by one rounding error.
    if values.size < 2 or values.min() == values.max():
        return np.zeros_like(values)
    scale = float(values.std()) + eps if normalise_by_std else 1.0
    return np.asarray((values - values.mean()) / scale)


def is_informative(accuracies: typing.Sequence[float] | np.ndarray) -> bool:
    """True if a group's raw accuracies vary: DAPO's dynamic sampling (arXiv:2503.14476 eq. 11).

    Looks at the spread, not at mean in {0, 1} (a constant 0.5 teaches nothing), and at the raw
    accuracy, not the shaped reward: the overlong punishment alone must not make an all-wrong group
    look informative, it would reward short wrong answers.

    Args:
        accuracies: raw correctness in [0, 1] of the group's valid samples.
    """
    values = np.asarray(accuracies, dtype=np.float64)
    return bool(values.size >= 2 and values.max() > values.min())
