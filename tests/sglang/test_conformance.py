"""A real SGLang server passes the conformance checks of every engine, with one and two TP ranks."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_hpc.errors import EngineError
from tests.conformance import engines
from tests.conformance.engines import EngineBed
from tests.sglang.beds import bed_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

TP_CHECKS = [
    engines.check_greedy_equals_transformers,
    engines.check_logprobs_are_of_the_sampled_distribution,
    engines.check_seeds,
    engines.check_update_while_running,
    engines.check_failed_update_keeps_the_old_version,
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engines.make_model(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[EngineBed]:
    # a cache so small that requests queue and are retracted
    bed = bed_of(tmp_path_factory.mktemp("runs"), model, max_tokens_in_cache=4000)
    yield bed
    bed.close()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineBed]:
    """Untied head, one key/value head (whole in both ranks), a vocabulary that is padded."""
    folder = tmp_path_factory.mktemp("tp2")
    model = engines.make_model(
        folder / "model", tie_word_embeddings=False, num_key_value_heads=1, vocab_size=71
    )
    bed = bed_of(folder, model, tp=2)
    yield bed
    bed.close()


@pytest.mark.parametrize("check", engines.CHECKS, ids=lambda check: check.__name__)
def test_conformance(bed: EngineBed, check: Callable[..., Any]) -> None:
    bed.run(check)


def test_fresh_engine_then_close(tmp_path: Path, model: Path) -> None:
    bed = bed_of(tmp_path, model)
    bed.run(engines.check_no_generation_before_weights)
    bed.run(engines.check_close_fails_running_requests)
    bed.close()


@pytest.mark.parametrize("check", TP_CHECKS, ids=lambda check: check.__name__)
def test_two_tp_ranks(two_ranks: EngineBed, check: Callable[..., Any]) -> None:
    two_ranks.run(check)


def test_eos_of_the_model_is_not_a_stop_token(bed: EngineBed) -> None:
    """Only the request's stop tokens end it: with an eos of the model's own this would stop."""

    async def check(bed: EngineBed) -> None:
        await bed.serve(0)
        got = await bed.generate(engines.prompt(5), max_new_tokens=600, temperature=3.0)
        assert 1 in got.token_ids[:-1], "the eos token 1 must be sampled for this test"
        assert len(got.token_ids) == 600

    bed.run(check)


def test_a_greedy_neighbour_changes_no_sample(bed: EngineBed) -> None:
    async def check(bed: EngineBed) -> None:
        await bed.serve(0)
        alone = await bed.generate(engines.prompt(8), max_new_tokens=40, temperature=1.0, seed=3)
        greedy = asyncio.create_task(bed.generate(engines.prompt(9), max_new_tokens=60))
        nucleus = asyncio.create_task(
            bed.generate(engines.prompt(7), max_new_tokens=60, temperature=1.0, top_p=0.5)
        )
        company = await bed.generate(engines.prompt(8), max_new_tokens=40, temperature=1.0, seed=3)
        await asyncio.gather(greedy, nucleus)
        assert company.token_ids == alone.token_ids

    bed.run(check)


def test_sampling_continues_across_an_update_with_equal_weights(bed: EngineBed) -> None:
    """Abort, reload of the same bytes, resubmission: the tokens are those of an undisturbed run."""

    async def check(bed: EngineBed) -> None:
        await bed.serve(0)
        options: dict[str, Any] = {"max_new_tokens": 400, "temperature": 1.0, "seed": 9}
        undisturbed = await bed.generate(engines.prompt(8), **options)
        running = asyncio.create_task(bed.generate(engines.prompt(8), **options))
        await asyncio.sleep(0.3)
        await bed.engine.update_weights(7, bed.tensors(0))
        got = await running
        assert got.token_ids == undisturbed.token_ids
        np.testing.assert_allclose(got.logprobs, undisturbed.logprobs, atol=engines.TOLERANCE)

    bed.run(check)


def test_update_with_a_queue(bed: EngineBed) -> None:
    """More requests than the cache holds: waiting and retracted ones survive an update too."""

    async def check(bed: EngineBed) -> None:
        await bed.serve(0)
        calls = [
            asyncio.create_task(
                bed.generate(engines.prompt(9, i), max_new_tokens=250, temperature=1.0, seed=i)
            )
            for i in range(30)
        ]
        await asyncio.sleep(1.0)
        await bed.serve(1)
        done = await asyncio.gather(*calls)
        assert all(len(c.token_ids) == 250 for c in done)
        assert {v for c in done for v in c.token_versions} == {0, 1}
        for index, got in enumerate(done):
            assert got.token_versions == sorted(got.token_versions)
            prompt = engines.prompt(9, index)
            by_version = [bed.logprobs(v, prompt, got.token_ids) for v in (0, 1)]
            expected = np.where(np.array(got.token_versions) == 0, *by_version)
            np.testing.assert_allclose(got.logprobs, expected, atol=engines.TOLERANCE)

    bed.run(check)


def test_prompt_and_response_that_exceed_the_cache(bed: EngineBed) -> None:
    """SGLang would cut max_new_tokens silently; the engine says what to change."""

    async def check(bed: EngineBed) -> None:
        await bed.serve(0)
        tokens = engines.prompt(700)
        assert len((await bed.generate(tokens, max_new_tokens=300)).token_ids) == 300
        with pytest.raises(EngineError):
            await bed.generate(tokens, max_new_tokens=4000)
        assert await bed.engine.healthy()

    bed.run(check)
