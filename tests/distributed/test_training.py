"""Optimizer steps: equal for every TP x PP x DP and cut, equal to transformers + AdamW."""

import dataclasses
import typing
from pathlib import Path

import numpy as np
import pytest
import torch

from relax_hpc.algorithms.advantages import group_advantages
from relax_hpc.records import Row
from tests.distributed.fakes import FakeKeeper, FakePublisher, FakeQueue, FakeReporter
from tests.distributed.launch import run_distributed
from tests.distributed.tiny_models import make_config, make_model, make_rows

pytestmark = pytest.mark.distributed
STEPS = 4
ALGORITHM = {"kl_coef": 0.0, "entropy_coef": 0.01, "tis_clip": 2.0}
TRAIN = {"lr": 3e-3, "weight_decay": 0.1, "clip_grad": 1.0, "lr_warmup_steps": 2}
# tp, pp, sequence_parallel, chunks_per_step, micro_batch_tokens; 4 ranks, so dp = 4, 2, 2, 1, 1
LAYOUTS = [
    (1, 1, False, 1, 64),
    (2, 1, False, 2, 30),
    (1, 2, False, 1, 1000),
    (2, 2, False, 4, 25),
    (2, 2, True, 1, 50),
]


def rows_of_step(step: int) -> list[Row]:
    return make_rows(100 + step, groups=4, max_tokens=14)


def train(folder: str, layout: list[typing.Any], world: int) -> list[dict[str, float]]:
    """Run the real loop on fakes; returns the metrics of each step (rank 0) and checks the rest."""
    from megatron.core import parallel_state

    from relax_hpc.trainer.build import build_backend
    from relax_hpc.trainer.loop import TrainLoop, TrainServices

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    tp, pp, sp, chunks, budget = layout
    config = make_config(
        Path(folder),
        run={"train_steps": STEPS},
        algorithm=ALGORITHM,
        train=TRAIN
        | {
            "tp": tp,
            "pp": pp,
            "sequence_parallel": sp,
            "chunks_per_step": chunks,
            "micro_batch_tokens": budget,
        },
        resources={"train": {"ranks": world}},
    )
    backend = build_backend(config, config.train, is_training=True)
    queue, publisher = FakeQueue(rows_of_step, chunks), FakePublisher()
    keeper, reporter = FakeKeeper(), FakeReporter()
    services = TrainServices(queue=queue, publisher=publisher, keeper=keeper, reporter=reporter)
    assert TrainLoop(config, backend, services).run()
    assert keeper.saved == [(STEPS, True)]
    assert publisher.version == STEPS
    assert publisher.num_shards == world, "every rank of every replica publishes"
    if backend.place.global_rank == 0:
        assert queue.calls == [("begin", 0), *(("complete", step) for step in range(STEPS))]
    return [reporter.metrics[step] for step in sorted(reporter.metrics)]


def train_layouts(folder: str) -> list[typing.Any]:
    from relax_hpc.trainer.megatron_compat import import_megatron

    import_megatron()
    world = torch.distributed.get_world_size()
    return [train(folder, list(layout), world) for layout in LAYOUTS]


@dataclasses.dataclass
class Oracle:
    """The same steps in plain transformers, float32, row by row, written apart."""

    model: typing.Any

    def run(self) -> list[dict[str, float]]:
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.98), eps=1e-8)
        return [self._step(optimizer, step) for step in range(STEPS)]

    def _step(self, optimizer: torch.optim.Optimizer, step: int) -> dict[str, float]:
        rows = rows_of_step(step)
        rewards = np.array([float(row.fields["reward"]) for row in rows])
        advantages = group_advantages(rewards, [row.uid for row in rows], True)
        total = torch.zeros(())
        count = sum(int(row.fields["loss_mask"].sum()) for row in rows)
        for row, advantage in zip(rows, advantages, strict=True):
            tokens = torch.tensor(row.fields["tokens"].astype(np.int64))
            first = row.num_prompt_tokens
            log_p = torch.log_softmax(self.model(tokens[None]).logits[0], -1)[first - 1 : -1]
            logprobs = log_p.gather(1, tokens[first:, None])[:, 0]
            entropy = -(log_p.exp() * log_p).sum(-1)
            rollout = torch.tensor(row.fields["rollout_logprobs"])
            weight = (logprobs.detach() - rollout).exp().clamp(max=2.0)
            ratio = (logprobs - logprobs.detach()).exp()
            loss = -float(advantage) * ratio * weight - 0.01 * entropy
            total = total + (loss * torch.tensor(row.fields["loss_mask"])).sum()
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 2)
        optimizer.step()
        return {"train/loss": loss.item(), "train/grad_norm": norm.item()}


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("training") / "model"
    model = make_model(folder, "qwen3", tied=True)
    by_rank = run_distributed(train_layouts, 4, str(folder))
    found = {str(layout): by_rank[0][i] for i, layout in enumerate(LAYOUTS)}
    return {"oracle": Oracle(model).run()} | found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_steps_equal_plain_transformers(
    losses: dict[str, list[dict[str, float]]], layout: object
) -> None:
    for wanted, seen in zip(losses["oracle"], losses[str(layout)], strict=True):
        for name, value in wanted.items():
            assert seen[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_on_policy_ratio_is_exactly_one(
    losses: dict[str, list[dict[str, float]]], layout: object
) -> None:
    for metrics in losses[str(layout)]:
        assert metrics["train/ratio_mean"] == 1.0
        assert metrics["train/clip_fraction"] == 0.0
        assert metrics["train/ppo_kl"] == 0.0


def test_statistics_do_not_depend_on_the_layout(
    losses: dict[str, list[dict[str, float]]],
) -> None:
    exact = ("reward_mean", "accuracy_mean", "samples_sum", "tokens_sum", "response_tokens_max")
    rounded = ("logprob_diff_mean", "entropy", "tis_weight_mean", "staleness_mean")
    first = losses[str(LAYOUTS[0])]
    for layout in LAYOUTS[1:]:
        for one, other in zip(first, losses[str(layout)], strict=True):
            for name in exact + rounded:
                assert other[f"train/{name}"] == pytest.approx(one[f"train/{name}"], rel=1e-4)
