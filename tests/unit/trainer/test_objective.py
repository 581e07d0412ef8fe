"""The loss of micro-batches: independent of the cut, right old policy, values by hand."""

import dataclasses

import numpy as np
import pytest
import torch

from relax_hpc.algorithms.numerics import VocabShard
from relax_hpc.config import AlgorithmConfig, LossAggregation
from relax_hpc.records import FinishReason, Row
from relax_hpc.trainer.megatron_compat import import_megatron
from relax_hpc.trainer.step_stats import StepStats

import_megatron()

from relax_hpc.trainer.micro_batch import MicroBatch, build_micro_batch  # noqa: E402
from relax_hpc.trainer.objective import STATS, Objective, OldPolicy  # noqa: E402

V = 11
SHARD = VocabShard(vocab_size=V)
PLAIN = Objective(
    algorithm=AlgorithmConfig(),
    old_policy=OldPolicy.FIRST_USE,
    use_tis=False,
    use_ref=False,
    temperature=1.0,
)


def make_row(seed: int, size: int, advantage_uid: str = "a") -> Row:
    generator = np.random.default_rng(seed)
    fields = {
        "tokens": generator.integers(0, V, size + 1).astype(np.int32),
        "loss_mask": np.ones(size, np.uint8),
        "rollout_logprobs": np.full(size, -2.0, np.float32),
        "train_logprobs": np.full(size, -2.5, np.float32),
        "ref_logprobs": np.full(size, -2.2, np.float32),
        "token_versions": np.zeros(size, np.int32),
        "reward": np.float32(0),
        "accuracy": np.float32(0),
    }
    return Row(
        uid=advantage_uid,
        sample_index=seed,
        group_size=2,
        num_prompt_tokens=1,
        finish_reason=FinishReason.STOP,
        fields={name: np.asarray(value) for name, value in fields.items()},
    )


def batch_of(rows: list[Row], indices: list[int], advantages: list[float]) -> MicroBatch:
    per_row = {"advantages": np.array(advantages)}
    fields = dataclasses.replace(PLAIN, use_ref=True, old_policy=OldPolicy.LOGPROB_ROLE).fields
    return build_micro_batch(rows, indices, per_row, fields, 1, torch.device("cpu"))


def step_loss(
    objective: Objective, rows: list[Row], cut: list[list[int]], adv: list[float]
) -> float:
    """Loss of a step as the trainer forms it: sums over micro-batches, one division."""
    stats = StepStats(0)
    stats.add_rows(rows, objective.algorithm.loss_aggregation)
    for indices in cut:
        batch = batch_of(rows, indices, adv)
        logits = torch.zeros(len(batch.tokens), V)
        _, sums = objective(logits, batch, SHARD)
        stats.add_sums(sums.numpy())
    stats.set_totals(stats.sums())
    return stats.loss


def test_one_and_nine_tokens_give_a_tenth() -> None:
    """Per-token losses 1 and 0 on 1 and 9 tokens: 0.1, not the 0.5 of a mean of means."""
    rows, advantages = [make_row(0, 1), make_row(1, 9)], [-1.0, 0.0]  # loss = -A at ratio 1
    for cut in ([[0], [1]], [[0, 1]], [[1, 0]], [[0], [], [1]]):
        assert step_loss(PLAIN, rows, cut, advantages) == pytest.approx(0.1, abs=1e-7)


def test_sample_mean_weighs_samples_equally() -> None:
    algorithm = AlgorithmConfig(loss_aggregation=LossAggregation.SAMPLE)
    objective = dataclasses.replace(PLAIN, algorithm=algorithm)
    rows, advantages = [make_row(0, 1), make_row(1, 9)], [-1.0, 0.0]
    for cut in ([[0], [1]], [[0, 1]], [[0, 1], []]):
        assert step_loss(objective, rows, cut, advantages) == pytest.approx(0.5, abs=1e-7)


def test_masked_samples_count_neither_above_nor_below() -> None:
    rows = [make_row(0, 4), make_row(1, 6)]
    rows[1].fields["loss_mask"] = np.zeros(6, np.uint8)
    assert step_loss(PLAIN, rows, [[0, 1]], [-1.0, -9.0]) == pytest.approx(1.0, abs=1e-7)


@pytest.mark.parametrize("aggregation", list(LossAggregation))
@pytest.mark.parametrize("num_batches", [1, 2, 5, 10])
def test_gradient_does_not_depend_on_the_cut(
    num_batches: int, aggregation: LossAggregation
) -> None:
    algorithm = AlgorithmConfig(loss_aggregation=aggregation, entropy_coef=0.1, kl_coef=0.2)
    objective = dataclasses.replace(PLAIN, algorithm=algorithm, use_tis=True, use_ref=True)
    rows = [make_row(seed, 1 + seed) for seed in range(10)]
    advantages = np.random.default_rng(0).normal(size=10).tolist()
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(0))

    def gradient(cut: list[list[int]]) -> torch.Tensor:
        weights = table.clone().requires_grad_()
        for indices in cut:
            batch = batch_of(rows, indices, advantages)
            objective(weights[batch.tokens], batch, SHARD)[0].backward()
        assert weights.grad is not None
        return weights.grad

    whole = gradient([list(range(10))])
    parts = gradient([list(range(10))[i::num_batches] for i in range(num_batches)])
    assert torch.allclose(parts, whole, atol=1e-6)


def _stats(objective: Objective, logits: torch.Tensor, batch: MicroBatch) -> dict[str, float]:
    return dict(zip(STATS, objective(logits, batch, SHARD)[1].tolist(), strict=True))


def test_old_policy_is_the_one_that_the_roles_provide() -> None:
    batch = batch_of([make_row(0, 5)], [0], [1.0])
    logits = torch.zeros(len(batch.tokens), V)  # log-prob of every token: -log(11) = -2.398
    first = _stats(PLAIN, logits, batch)
    assert (first["ratio"], first["kl"], first["clipped"]) == (5.0, 0.0, 0.0)
    rollout = dataclasses.replace(PLAIN, old_policy=OldPolicy.ROLLOUT)
    assert _stats(rollout, logits, batch)["ratio"] == pytest.approx(5 * np.exp(2 - np.log(V)))
    role = dataclasses.replace(PLAIN, old_policy=OldPolicy.LOGPROB_ROLE, use_tis=True)
    seen = _stats(role, logits, batch)
    assert seen["ratio"] == pytest.approx(5 * np.exp(2.5 - np.log(V)), rel=1e-5)
    assert seen["tis_weight"] == pytest.approx(5 * np.exp(-0.5), rel=1e-5)
    assert seen["logprob_diff"] == pytest.approx(5 * (np.log(V) - 2), rel=1e-5)


def test_dummy_has_a_gradient_path_and_no_gradient() -> None:
    batch = batch_of([make_row(0, 5)], [], [1.0])
    logits = torch.randn(len(batch.tokens), V).requires_grad_()
    loss, sums = PLAIN(logits, batch, SHARD)
    loss.backward()
    assert not sums.any()
    assert logits.grad is not None and not logits.grad.any()
