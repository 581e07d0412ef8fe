"""The embedded engine on a GPU against itself on the CPU, which is checked against transformers."""

import asyncio
import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from relax_hpc.records import Completion
from relax_hpc.rollout.decoder import canonical_shapes, read_decoder_config
from relax_hpc.rollout.embedded import EmbeddedEngine
from relax_hpc.rollout.engine import GenerateRequest

pytestmark = pytest.mark.gpu


@dataclasses.dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


def make_folder(folder: Path, hidden: int, layers: int, vocab: int) -> Path:
    config = {
        "model_type": "qwen3",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_tensors(folder: Path, seed: int) -> dict[str, Tensor]:
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, shape in canonical_shapes(read_decoder_config(folder)).items():
        # The head is the embedding: logits of standard deviation 2, far from greedy and uniform.
        scale = (2.0 if "embed" in name else 1.0) * shape[-1] ** -0.5
        array = generator.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        if "norm" in name:
            array = np.ones(shape, np.float32)
        tensors[name] = Tensor("float32", shape, array.view(np.uint8).reshape(-1))
    return tensors


async def generate(
    folder: Path, device: str, dtype: torch.dtype, num_prompts: int, max_new_tokens: int
) -> tuple[list[Completion], float]:
    engine = EmbeddedEngine(
        folder, max_tokens_in_cache=200_000, dtype=dtype, device=torch.device(device)
    )
    await engine.start()
    await engine.update_weights(0, make_tensors(folder, 0))
    started = time.monotonic()
    calls = [
        engine.generate(
            GenerateRequest(
                request_id=f"{index}/{sample}",
                token_ids=[(7 * index + i) % 100 for i in range(5 + 9 * index)],
                max_new_tokens=max_new_tokens,
                temperature=1.0,
                seed=100 * index + sample,
            )
        )
        for index in range(num_prompts)
        for sample in range(8)
    ]
    done = await asyncio.gather(*calls)
    seconds = time.monotonic() - started
    await engine.update_weights(1, make_tensors(folder, 1))
    await engine.close()
    return list(done), seconds


def test_cuda_equals_cpu(tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = make_folder(tmp_path, 256, 4, 1000)
    on_cpu, _ = asyncio.run(generate(folder, "cpu", torch.float32, 6, 24))
    on_gpu, _ = asyncio.run(generate(folder, "cuda:0", torch.float32, 6, 24))
    equal = [a.token_ids == b.token_ids for a, b in zip(on_cpu, on_gpu, strict=True)]
    # A tie within float rounding may break another way; everything after it differs then.
    assert sum(equal) >= len(equal) - 1
    assert min(min(c.logprobs) for c in on_gpu) < -3
    for a, b, is_equal in zip(on_cpu, on_gpu, equal, strict=True):
        if is_equal:
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-3)


def test_throughput_on_the_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints tokens per second; bfloat16, 0.6B-like shape."""
    folder = make_folder(tmp_path, 1024, 28, 151_936)
    done, seconds = asyncio.run(generate(folder, "cuda:0", torch.bfloat16, 32, 64))
    num_tokens = sum(len(c.token_ids) for c in done)
    assert num_tokens == 32 * 8 * 64
    with capsys.disabled():
        print(f"\nembedded engine, bfloat16, 28 layers: {num_tokens / seconds:.0f} tokens/s")
