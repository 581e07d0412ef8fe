"""The embedded engine: the conformance checks, three families, small caches, speed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_hpc.errors import EngineError
from relax_hpc.rollout.decoder import read_decoder_config
from relax_hpc.rollout.embedded import EmbeddedEngine
from tests.conformance import engines
from tests.conformance.engines import EngineBed

torch.set_num_threads(1)

ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3"},
    "qwen3-untied": {"family": "qwen3", "tie_word_embeddings": False, "attention_bias": True},
    "qwen2": {"family": "qwen2"},
    "llama": {"family": "llama", "num_key_value_heads": 1},
    "llama3-rope": {"family": "llama", "rope_parameters": ROPE_LLAMA3, "mlp_bias": True},
}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engines.make_model(tmp_path_factory.mktemp("model") / "qwen3")


def bed_of(folder: Path, **changes: Any) -> EngineBed:
    settings = {"max_tokens_in_cache": 4000} | changes
    return EngineBed(folder, lambda: EmbeddedEngine(folder, **settings))


@pytest.fixture(scope="module")
def bed(qwen3: Path) -> Iterator[EngineBed]:
    bed = bed_of(qwen3)
    yield bed
    bed.close()


@pytest.mark.parametrize("check", engines.CHECKS, ids=lambda check: check.__name__)
def test_conformance(bed: EngineBed, check: Callable[..., Any]) -> None:
    bed.run(check)


@pytest.mark.parametrize("check", engines.FRESH_CHECKS, ids=lambda check: check.__name__)
def test_conformance_fresh(qwen3: Path, check: Callable[..., Any]) -> None:
    bed = bed_of(qwen3)
    bed.run(check)
    bed.close()


@pytest.mark.parametrize("name", MODELS)
def test_families_equal_transformers(tmp_path: Path, name: str) -> None:
    bed = bed_of(engines.make_model(tmp_path, **MODELS[name]))
    bed.run(engines.check_greedy_equals_transformers)
    bed.run(engines.check_batch_equals_single)
    bed.close()


def test_a_full_cache_retracts_and_stays_exact(qwen3: Path) -> None:
    """64 slots for 24 sequences of up to 66 tokens in all: most are retracted again and again."""
    bed = bed_of(qwen3, max_tokens_in_cache=80, max_running=7)
    bed.run(engines.check_batch_equals_single)
    bed.run(engines.check_seeds)
    scheduler = bed.engine._scheduler  # type: ignore[attr-defined]
    assert (scheduler.num_sequences, scheduler.num_cached_tokens) == (0, 0)
    bed.close()


def test_nothing_stays_in_the_cache(bed: EngineBed) -> None:
    """Every slot comes back, whatever ended the sequences of the tests before."""
    bed.run(engines.check_abort_keeps_tokens)
    bed.run(engines.check_rollback_aborts)
    scheduler = bed.engine._scheduler  # type: ignore[attr-defined]
    assert (scheduler.num_sequences, scheduler.num_cached_tokens) == (0, 0)


def test_a_broken_compute_thread_fails_every_caller(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = bed_of(qwen3)

    async def check(bed: EngineBed) -> None:
        await bed.serve(0)
        scheduler = bed.engine._scheduler  # type: ignore[attr-defined]

        def broken() -> None:
            raise ValueError("out of memory, say")

        monkeypatch.setattr(scheduler, "step", broken)
        with pytest.raises(EngineError, match="out of memory, say"):
            await bed.generate(engines.prompt(4))
        with pytest.raises(EngineError, match="out of memory, say"):
            await bed.engine.update_weights(1, bed.tensors(1))
        assert not await bed.engine.healthy()

    bed.run(check)
    bed.close()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, "config.json"),
        ("{", "config.json"),
        ('{"model_type": "gemma"}', "model_type='gemma'"),
        ('{"model_type": "qwen2", "use_sliding_window": true}', "use_sliding_window"),
        ('{"model_type": "llama", "rope_scaling": {"rope_type": "yarn"}}', "yarn"),
    ],
)
def test_unsupported_models_are_refused(tmp_path: Path, text: str | None, match: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(EngineError, match=match):
        read_decoder_config(tmp_path)
