"""Save, kill -9, resume: bit-equal losses; damaged checkpoints; other parallel sizes."""

import json
import os
import signal
import typing
from pathlib import Path

import pytest

from relax_hpc.records import Row
from tests.distributed.fakes import FakePublisher, FakeQueue, FakeReporter
from tests.distributed.launch import run_distributed, start_distributed
from tests.distributed.tiny_models import make_config, make_model, make_rows

pytestmark = pytest.mark.distributed
STEPS = 6


def rows_of_step(step: int) -> list[Row]:
    return make_rows(200 + step, groups=4, max_tokens=10)


class KillingReporter(FakeReporter):
    """Kills its process, as an out-of-memory killer would, in the middle of a step."""

    def progress(self, **values: typing.Any) -> None:
        if values == {"step": 5, "chunk": 1}:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    model: str,
    checkpoints: str,
    sizes: tuple[int, int] = (1, 1),
    must_die: bool = False,
    dtype: str = "float32",
) -> typing.Any:
    """Train (or resume) with real checkpoints; [hex loss, hex grad norm] by step on rank 0."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from relax_hpc.trainer.build import build_backend
    from relax_hpc.trainer.checkpointing import CheckpointKeeper
    from relax_hpc.trainer.loop import TrainLoop, TrainServices

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    config = make_config(
        Path(model),
        model={"dtype": dtype},
        run={"train_steps": STEPS},
        train={"save_interval": 2, "tp": sizes[0], "pp": sizes[1], "chunks_per_step": 2},
        resources={"train": {"ranks": dist.get_world_size()}},
    )
    backend = build_backend(config, config.train, is_training=True)
    reporter = KillingReporter() if must_die else FakeReporter()
    queue = FakeQueue(rows_of_step, 2)
    services = TrainServices(
        queue=queue,
        publisher=FakePublisher(),
        keeper=CheckpointKeeper(Path(checkpoints), 10, backend, Path(model)),
        reporter=reporter,
    )
    TrainLoop(config, backend, services).run()
    if reporter.metrics and min(reporter.metrics) > 0:  # rank 0, resumed
        assert queue.cuts == [f"ledger of {min(reporter.metrics)}".encode()]
    return {
        step: [metrics["train/loss"].hex(), metrics["train/grad_norm"].hex()]
        for step, metrics in reporter.metrics.items()
    }


def whole_then_killed(model: str, root: str) -> None:
    """An uninterrupted run, then one that dies in step 5, after the checkpoint of step 4."""
    from relax_hpc.trainer.megatron_compat import import_megatron

    import_megatron()
    losses = train(model, f"{root}/whole")
    if losses:
        (Path(root) / "whole.json").write_text(json.dumps(losses))
    train(model, f"{root}/killed", must_die=True)


def resumed(model: str, root: str, same_size: bool) -> typing.Any:
    """Resume the killed run: at the same sizes, or TP 2 from what DP 2 saved."""
    from relax_hpc.trainer.megatron_compat import import_megatron

    import_megatron()
    return train(model, f"{root}/killed", (1, 1) if same_size else (2, 1))


@pytest.fixture
def killed_run(tmp_path: Path) -> tuple[Path, Path]:
    model = tmp_path / "model"
    make_model(model, "qwen3", tied=True)
    ranks = start_distributed(whole_then_killed, 2, str(model), str(tmp_path))
    with pytest.raises(AssertionError, match=r"rank \d failed"):
        ranks.wait()
    assert ranks.processes[0].returncode == -signal.SIGKILL, ranks.log(0)
    return model, tmp_path


def test_resume_is_bit_equal(killed_run: tuple[Path, Path]) -> None:
    model, root = killed_run
    whole = json.loads((root / "whole.json").read_text())
    assert sorted(whole) == [str(step) for step in range(STEPS)]
    found = run_distributed(resumed, 2, str(model), str(root), True)[0]
    assert sorted(found) == ["4", "5"]
    assert found == {step: whole[step] for step in found}

    # The newest two are damaged: step 2 is resumed, at another layout, and trains on equally.
    for step in (6, 4):
        manifest = json.loads((root / "killed" / f"step_{step}" / "manifest.json").read_text())
        largest = max(manifest["files"], key=lambda name: manifest["files"][name]["nbytes"])
        path = root / "killed" / f"step_{step}" / largest
        os.truncate(path, path.stat().st_size - 1)
    found = run_distributed(resumed, 2, str(model), str(root), False)[0]
    assert sorted(found) == ["2", "3", "4", "5"]
    for step, values in found.items():
        for seen, wanted in zip(values, whole[step], strict=True):
            assert float.fromhex(seen) == pytest.approx(float.fromhex(wanted), rel=1e-3)
