"""Group advantages against numpy loops in float64; values from public bug reports (A1-A13, M3b)."""

import numpy as np
import pytest

from relax_hpc.algorithms.advantages import group_advantages, is_informative


def oracle(rewards, ids, by_std, eps=1e-6, valid=None):
    out = []
    for i, reward in enumerate(rewards):
        group = [
            float(r)
            for j, r in enumerate(rewards)
            if ids[j] == ids[i] and (valid is None or valid[j])
        ]
        counts = valid is None or valid[i]
        if not counts or len(group) < 2 or len(set(group)) == 1:
            out.append(0.0)
            continue
        mean = sum(group) / len(group)
        variance = sum((g - mean) ** 2 for g in group) / len(group)
        out.append((float(reward) - mean) / ((variance**0.5 + eps) if by_std else 1.0))
    return np.array(out, np.float64)


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_equals_the_oracle(seed, by_std):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 6, 40)
    rewards = rng.choice([-1.0, -0.37, 0.0, 0.5, 1.0], 40)
    valid = rng.random(40) > 0.2
    seen = group_advantages(rewards, ids, by_std, valid=valid)
    assert seen.dtype == np.float32
    np.testing.assert_allclose(seen, oracle(rewards, ids, by_std, valid=valid), atol=1e-5)


def test_a1_group_of_one_is_zero_not_nan():
    seen = group_advantages(np.array([3.0, 1.0]), ["a", "b"], True)
    assert seen.tolist() == [0.0, 0.0]


def test_a2_population_standard_deviation():
    seen = group_advantages(np.array([1.0, 1.0, 1.0, 0.0]), [0, 0, 0, 0], True)
    np.testing.assert_allclose(seen, [0.57735, 0.57735, 0.57735, -1.73205], atol=1e-4)


@pytest.mark.parametrize("value", [0.1, 0.5, 1 / 3, -1.0, 1e9])
def test_constant_groups_are_exactly_zero(value):
    # 0.1 * 7 / 7 != 0.1 in floats: a test on the standard deviation would let noise through.
    assert not group_advantages(np.full(7, value), [1] * 7, True).any()


def test_a13_order_of_rows_does_not_matter():
    rng = np.random.default_rng(0)
    ids = np.repeat(np.arange(8), 8)
    rewards = rng.normal(size=64)
    order = rng.permutation(64)
    straight = group_advantages(rewards, ids, True)
    shuffled = group_advantages(rewards[order], ids[order], True)
    np.testing.assert_allclose(shuffled, straight[order], atol=1e-6)


def test_a7_two_dispatches_of_one_prompt_are_two_groups():
    rewards = np.array([1.0, 0.0, 1.0, 1.0])
    seen = group_advantages(rewards, ["0.5.0", "0.5.0", "1.5.0", "1.5.0"], True)
    np.testing.assert_allclose(seen, [1, -1, 0, 0], atol=1e-4)


def test_l9_statistics_come_from_the_whole_group_then_both_are_filtered():
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    keep = np.array([True, False, True, True])  # the second sample was truncated
    seen = group_advantages(rewards, [0] * 4, True)[keep]
    np.testing.assert_allclose(seen, [1, -1, 1], atol=1e-4)


def test_m3b_invalid_member_does_not_vote():
    valid = np.array([True, True, True, False])
    seen = group_advantages(np.array([1.0, 3.0, 2.0, 0.0]), [0] * 4, False, valid=valid)
    assert seen.tolist() == [-1.0, 1.0, 0.0, 0.0]
    lonely = np.array([True, False, False, False])
    assert not group_advantages(np.array([1.0, 3.0, 2.0, 0.0]), [0] * 4, True, valid=lonely).any()


def test_an_invalid_reward_may_be_nan_a_valid_one_may_not():
    rewards = np.array([1.0, np.nan, 0.0])
    valid = np.array([True, False, True])
    seen = group_advantages(rewards, [0, 0, 0], True, valid=valid)
    np.testing.assert_allclose(seen, [1, 0, -1], atol=1e-4)
    with pytest.raises(ValueError, match="row 1 is nan"):
        group_advantages(rewards, [0, 0, 0], True)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="equal length"):
        group_advantages(np.zeros(3), [0, 0], True)


def test_empty_is_empty():
    assert group_advantages(np.zeros(0), np.zeros(0, int), True).shape == (0,)


@pytest.mark.parametrize(
    ("accuracies", "informative"),
    [
        ([0.5] * 8, False),  # A3: constant, though its mean is neither 0 nor 1
        ([0.0] * 8, False),
        ([1.0] * 8, False),
        ([0, 0, 0, 1], True),
        ([0.2, 0.4], True),
        ([1.0], False),
        ([], False),
    ],
)
def test_a3_dynamic_sampling_looks_at_the_spread(accuracies, informative):
    assert is_informative(accuracies) is informative


def test_a4_an_all_wrong_group_is_dropped_whatever_the_overlong_punishment_did():
    shaped, accuracy = np.array([-1, -1, -1, -1.5]), [0, 0, 0, 0]
    assert not is_informative(accuracy)
    # What would have been learned from it: to be short.
    phantom = group_advantages(shaped, [0] * 4, True)
    np.testing.assert_allclose(phantom, [0.57735, 0.57735, 0.57735, -1.73205], atol=1e-4)
