"""The trainer on CUDA + NCCL: the same steps as plain transformers on the CPU; bf16; resume; speed.

Needs 2 GPUs. `pytest -m gpu tests/gpu/test_trainer_cuda.py -s` prints the numbers.
"""

import time
import typing
from pathlib import Path

import pytest
import torch

from tests.distributed import test_resume, test_training
from tests.distributed.fakes import FakeKeeper, FakePublisher, FakeQueue, FakeReporter
from tests.distributed.launch import run_distributed
from tests.distributed.tiny_models import make_config, make_model, make_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]

# tp, pp, sequence_parallel, chunks_per_step, micro_batch_tokens; 2 ranks
LAYOUTS = [(1, 1, False, 1, 64), (2, 1, False, 2, 30), (1, 2, False, 1, 1000), (2, 1, True, 1, 50)]


def float32_layouts(folder: str) -> list[typing.Any]:
    from relax_hpc.trainer.megatron_compat import import_megatron

    import_megatron()
    return [test_training.train(folder, list(layout), 2) for layout in LAYOUTS]


def test_float32_steps_equal_transformers(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3", tied=True)
    found = run_distributed(float32_layouts, 2, str(tmp_path / "model"), on_gpus=True)[0]
    for layout, steps in zip(LAYOUTS, found, strict=True):
        print(layout, [(s["train/loss"], s["train/grad_norm"]) for s in steps])
    wanted = test_training.Oracle(model).run()
    for steps in found:
        for seen, reference in zip(steps, wanted, strict=True):
            for name, value in reference.items():
                assert seen[name] == pytest.approx(value, rel=1e-3), name
            assert (seen["train/ratio_mean"], seen["train/clip_fraction"]) == (1.0, 0.0)


def bfloat16_and_resume(folder: str, root: str) -> typing.Any:
    """Log-probs in bfloat16 (varlen attention), then two runs: whole, and resumed in its middle."""
    import shutil

    from relax_hpc.trainer.megatron_compat import import_megatron

    import_megatron()
    whole = test_resume.train(folder, f"{root}/whole", dtype="bfloat16")
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(f"{root}/whole/step_6")
    torch.distributed.barrier()
    resumed = test_resume.train(folder, f"{root}/whole", dtype="bfloat16")
    return [whole, resumed]


def test_bfloat16_resume_is_bit_equal(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen3", tied=True)
    args = (str(tmp_path / "model"), str(tmp_path))
    whole, resumed = run_distributed(bfloat16_and_resume, 2, *args, on_gpus=True)[0]
    print({step: [float.fromhex(v) for v in values] for step, values in whole.items()})
    assert sorted(resumed) == ["4", "5"]
    assert resumed == {step: whole[step] for step in resumed}


def speed(folder: str, sizes: list[int]) -> typing.Any:
    """Steps of a 0.6B-shaped model on long rows; tokens per second and peak memory."""
    from relax_hpc.trainer.build import build_backend
    from relax_hpc.trainer.loop import TrainLoop, TrainServices

    config = make_config(
        Path(folder),
        run={"train_steps": 3},
        model={"dtype": "bfloat16"},
        train={"tp": sizes[0], "pp": sizes[1], "micro_batch_tokens": 16384, "lr": 1e-6},
        resources={"train": {"ranks": 2}},
    )
    started = time.monotonic()
    backend = build_backend(config, config.train, is_training=True)
    build_s = time.monotonic() - started
    rows = make_rows(0, groups=4, group_size=16, max_tokens=1024)
    reporter = FakeReporter()
    publisher = FakePublisher()
    TrainLoop(
        config,
        backend,
        TrainServices(
            queue=FakeQueue(lambda step: rows),
            publisher=publisher,
            keeper=FakeKeeper(),
            reporter=reporter,
        ),
    ).run()
    names = ("train/tokens_per_s", "train/step_s", "train/grad_norm", "train/loss")
    steps = [[metrics[name] for name in names] for metrics in reporter.metrics.values()]
    return [build_s, torch.cuda.max_memory_allocated() / 1e9, steps]


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)], ids=str)
def test_speed(tmp_path: Path, sizes: tuple[int, int]) -> None:
    import transformers

    shape = transformers.Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    del model
    torch.cuda.empty_cache()
    found = run_distributed(speed, 2, str(tmp_path / "model"), list(sizes), on_gpus=True)
    print(f"tp, pp = {sizes}: build_s, peak_gb, [tokens_per_s, step_s, ...] = {found[0]}")
