"""Policy loss, KL and aggregation against numpy loops in float64, and published wrong values."""

import math

import numpy as np
import pytest
import torch

from relax_hpc.algorithms.corrections import tis_weights
from relax_hpc.algorithms.losses import aggregate_loss, kl_k3, loss_count, policy_loss
from relax_hpc.config import LossAggregation

TOKEN, SAMPLE = LossAggregation.TOKEN, LossAggregation.SAMPLE


def oracle(new, old, advantage, mask, low, high, weight=None, dual=None):
    out = np.zeros(len(new), np.float64)
    for t in range(len(new)):
        if not mask[t]:
            continue
        ratio = math.exp(float(new[t]) - float(old[t]))
        bounded = min(max(ratio, 1 - low), 1 + high)
        value = -min(ratio * advantage[t], bounded * advantage[t])
        if dual is not None and advantage[t] < 0:
            value = min(value, -dual * advantage[t])
        out[t] = value * (1.0 if weight is None else weight[t])
    return out


def single(ratio, advantage, **options):
    """Loss and gradient with respect to the log-prob of one token."""
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    loss, stats = policy_loss(
        logprob, torch.zeros(1), torch.tensor([advantage]), torch.ones(1), 0.2, 0.28, **options
    )
    loss.sum().backward()
    return loss.item(), logprob.grad.item(), stats


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_oracle(seed, weighted, dual):
    rng = np.random.default_rng(seed)
    new, old = rng.normal(-1, 1.5, 200), rng.normal(-1, 1.5, 200)
    advantage, mask = rng.normal(size=200), rng.random(200) > 0.3
    weight = rng.random(200) * 2 if weighted else None
    loss, stats = policy_loss(
        torch.tensor(new),
        torch.tensor(old),
        torch.tensor(advantage),
        torch.tensor(mask),
        0.2,
        0.28,
        weights=None if weight is None else torch.tensor(weight),
        dual_clip=dual,
    )
    want = oracle(new, old, advantage, mask, 0.2, 0.28, weight, dual)
    np.testing.assert_allclose(loss.numpy(), want, rtol=2e-5, atol=1e-6)
    ratios = np.exp(new - old)[mask]
    np.testing.assert_allclose(stats["ratio"], ratios.sum(), rtol=1e-5)
    np.testing.assert_allclose(stats["kl"], (ratios - 1 - np.log(ratios)).sum(), rtol=1e-4)
    assert stats["num_tokens"] == mask.sum()


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected", "has_gradient"),
    [
        (1.0, 1.3, -1.28, False),
        (1.0, 0.5, -0.5, True),
        (-1.0, 0.7, 0.8, False),
        (-1.0, 1.3, 1.3, True),
    ],
)
def test_a12_clip_higher(advantage, ratio, expected, has_gradient):
    loss, gradient, stats = single(ratio, advantage)
    assert loss == pytest.approx(expected, abs=1e-5)
    assert (gradient != 0) is has_gradient
    assert stats["clipped"].item() == (not has_gradient)


def test_a12_dual_clip_bounds_negative_advantages_only():
    loss, gradient, stats = single(5.0, -1.0, dual_clip=3.0)
    assert (loss, gradient, stats["clipped"].item()) == (pytest.approx(3.0), 0.0, 1)
    assert single(5.0, 1.0, dual_clip=3.0)[0] == pytest.approx(-1.28)
    assert single(0.5, 1.0, dual_clip=3.0)[0] == pytest.approx(-0.5)


@pytest.mark.parametrize("dual", [1.0, 0.5])
def test_a12_dual_clip_must_exceed_one(dual):
    with pytest.raises(ValueError, match="must be > 1"):
        single(1.0, 1.0, dual_clip=dual)


def test_p9_first_on_policy_step_has_ratio_one():
    logprobs = torch.randn(50)
    loss, stats = policy_loss(logprobs, logprobs.clone(), torch.ones(50), torch.ones(50), 0.2, 0.28)
    assert stats["kl"] == 0
    assert stats["clipped"] == 0
    assert stats["ratio"] == 50
    assert torch.equal(loss, -torch.ones(50))


def test_masked_tokens_are_exactly_zero_whatever_they_hold():
    logprobs = torch.tensor([-1.0, float("-inf"), float("nan"), -2.0], requires_grad=True)
    old = torch.tensor([-1.5, float("-inf"), 0.0, -2.0])
    loss, stats = policy_loss(
        logprobs,
        old,
        torch.tensor([1.0, float("nan"), 1.0, -1.0]),
        torch.tensor([1, 0, 0, 1]),
        0.2,
        0.28,
        weights=torch.tensor([1.0, float("inf"), float("nan"), 1.0]),
    )
    loss.sum().backward()
    assert loss[1] == loss[2] == 0
    assert logprobs.grad[1] == logprobs.grad[2] == 0
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logprobs.grad).all()
    assert all(torch.isfinite(value) for value in stats.values())


def test_a_wild_ratio_stays_finite():
    assert math.isfinite(single(1.0, -1.0)[0])
    logprob = torch.tensor([0.0], requires_grad=True)
    loss, _ = policy_loss(
        logprob, torch.tensor([-500.0]), torch.tensor([-1.0]), torch.ones(1), 0.2, 0.28
    )
    assert torch.isfinite(loss).all()


def test_kl_k3_value_sign_and_gradient():
    policy = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    reference = torch.tensor([-1.0, -1.0, -3.0])
    kl = kl_k3(policy, reference)
    d = np.array([0.0, 1.0, -2.5])
    np.testing.assert_allclose(kl.detach(), np.exp(d) - d - 1, rtol=1e-6)
    kl.sum().backward()
    np.testing.assert_allclose(policy.grad, 1 - np.exp(d), rtol=1e-5, atol=1e-7)


# -- aggregation ------------------------------------------------------------------------------


def step_mean(losses, aggregation, cuts):
    """Mean over a step of samples (lists of token losses), cut into micro-batches by sample."""
    total, count = torch.zeros(()), torch.zeros((), dtype=torch.int64)
    for samples in np.array_split(np.arange(len(losses)), cuts):
        lengths = torch.tensor([len(losses[s]) for s in samples], dtype=torch.int64)
        flat = torch.cat([torch.as_tensor(losses[s]) for s in samples] or [torch.zeros(0)])
        ids = torch.repeat_interleave(torch.arange(len(samples)), lengths)
        mask = torch.ones(len(flat), dtype=torch.bool)
        total = total + aggregate_loss(flat, mask, ids, lengths, aggregation)
        count = count + loss_count(lengths, aggregation)
    return total / count


def test_l1_global_token_mean():
    losses = [[1.0], [0.0] * 9]
    assert step_mean(losses, TOKEN, 2).item() == pytest.approx(0.1)  # mean of means: 0.5
    assert step_mean(losses, SAMPLE, 2).item() == pytest.approx(0.5)


@pytest.mark.parametrize("aggregation", [TOKEN, SAMPLE])
def test_l1_gradient_does_not_depend_on_the_cut(aggregation):
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 12, 10)
    values = torch.tensor(rng.normal(size=lengths.sum()), dtype=torch.float64)
    gradients = []
    for cuts in (1, 2, 5, 10):
        leaf = values.clone().requires_grad_()
        pieces = list(torch.split(leaf**2, lengths.tolist()))
        step_mean(pieces, aggregation, cuts).backward()
        gradients.append(leaf.grad.numpy())
    want = 2 * values.numpy() / (lengths.sum() if aggregation is TOKEN else 1)
    if aggregation is SAMPLE:
        want = want / np.repeat(lengths, lengths) / len(lengths)
    for gradient in gradients:
        np.testing.assert_allclose(gradient, want, rtol=1e-6)


@pytest.mark.parametrize("aggregation", [TOKEN, SAMPLE])
def test_l2_l3_masked_samples_and_padding_count_nowhere(aggregation):
    loss = torch.tensor([1.0, 2.0, 3.0])
    ids = torch.tensor([0, 0, 1])
    plain = aggregate_loss(loss, torch.ones(3), ids, torch.tensor([2, 1]), aggregation)
    plain = plain / loss_count(torch.tensor([2, 1]), aggregation)
    # A truncated sample (2) and a padding row (3), whose losses may be anything.
    padded_loss = torch.cat([loss, torch.tensor([float("nan"), 7.0, float("inf")])])
    mask = torch.tensor([1, 1, 1, 0, 0, 0])
    counts = torch.tensor([2, 1, 0, 0])
    padded = aggregate_loss(
        padded_loss, mask, torch.tensor([0, 0, 1, 2, 2, 3]), counts, aggregation
    ) / loss_count(counts, aggregation)
    assert padded.item() == pytest.approx(plain.item(), abs=1e-7)


def test_l5_sample_mean_with_a_sample_split_over_ranks():
    # Context parallelism: each rank holds a part of the sample but knows its whole length.
    whole = aggregate_loss(
        torch.tensor([1.0, 2.0, 3.0]),
        torch.ones(3),
        torch.zeros(3).long(),
        torch.tensor([3]),
        SAMPLE,
    )
    parts = [
        aggregate_loss(
            torch.tensor(part), torch.ones(len(part)), torch.zeros(len(part)).long(),
            torch.tensor([3]), SAMPLE,
        )
        for part in ([1.0], [2.0, 3.0])
    ]  # fmt: skip
    assert sum(parts).item() == pytest.approx(whole.item())


# -- truncated importance sampling ------------------------------------------------------------


def test_tis_weights_truncate_above_only_and_carry_no_gradient():
    train = torch.tensor([0.0, -1.0, -1.0, -1.0], requires_grad=True)
    rollout = torch.tensor([-3.0, -1.0, -0.5, -1.5])
    weights = tis_weights(train, rollout, 2.0)
    np.testing.assert_allclose(weights, [2.0, 1.0, math.exp(-0.5), math.exp(0.5)], rtol=1e-6)
    assert not weights.requires_grad


def test_tis_zero_is_off_and_negative_is_refused():
    logprobs = torch.tensor([-1.0, -5.0])
    assert tis_weights(logprobs, torch.zeros(2), 0.0).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="clip"):
        tis_weights(logprobs, logprobs, -1.0)


def test_w2_tis_has_an_effect_on_the_gradient():
    gradients = []
    for weights in (None, torch.tensor([0.5])):
        logprob = torch.tensor([-1.0], requires_grad=True)
        loss, _ = policy_loss(
            logprob, torch.tensor([-1.0]), torch.ones(1), torch.ones(1), 0.2, 0.28, weights=weights
        )
        loss.sum().backward()
        gradients.append(logprob.grad.item())
    assert gradients[1] == pytest.approx(gradients[0] / 2)


def test_extreme_differences_give_finite_weights():
    weights = tis_weights(torch.tensor([0.0, -1e4]), torch.tensor([-1e4, 0.0]), 2.0)
    assert weights[0] == 2.0
    assert 0 <= weights[1] < 1e-8
