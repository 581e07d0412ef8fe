"""What every inference engine must do, checked against transformers. Used by tests of each engine.

    bed = EngineBed(folder, make)   # folder of `make_model`, make() -> a new, not started engine
    bed.run(check)                  # for check in CHECKS; one engine and one event loop for all
    bed.close()

`FRESH_CHECKS` want an engine that was started and never got weights (one bed each).
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from relax_hpc.errors import EngineError
from relax_hpc.records import Completion, FinishReason
from relax_hpc.rollout.engine import NO_VERSION, Engine, GenerateRequest

VOCAB = 64
LONG = 400
TOLERANCE = 2e-4


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A weight tensor as the weight service hands it out."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


def make_model(folder: Path, family: str = "qwen3", **changes: Any) -> Path:
    """Write a tiny random model folder; its weights are version 0."""
    classes = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.4,  # far from uniform, so that a mistake shows
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    if family == "qwen3":
        sizes["head_dim"] = 16
    config_class, model_class = classes[family]
    torch.manual_seed(0)
    model = model_class(config_class(**(sizes | changes)))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero by default: would hide a forgotten one
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return folder


class EngineBed:
    """An engine with its own event loop, and the reference models of every version."""

    def __init__(self, folder: Path, make: Callable[[], Engine], settings: Any = None) -> None:
        self.folder, self.make, self.settings = folder, make, settings
        self._loop = asyncio.new_event_loop()
        self._models: dict[int, Any] = {}
        self._ids = iter(range(1_000_000))
        self.engine = self._loop.run_until_complete(self._start())

    async def _start(self) -> Engine:
        engine = self.make()
        await engine.start()
        return engine

    def run(self, check: Callable[["EngineBed"], Coroutine[Any, Any, None]]) -> None:
        self._loop.run_until_complete(asyncio.wait_for(check(self), 240))

    def close(self) -> None:
        self._loop.run_until_complete(self.engine.close())
        self._loop.close()

    def model(self, version: int) -> Any:
        """Reference: version 0 is the folder, the others are it with noise."""
        if version not in self._models:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                self.folder, dtype=torch.float32
            )
            generator = torch.Generator().manual_seed(version)
            for parameter in model.parameters() if version else ():
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
            self._models[version] = model.eval()
        return self._models[version]

    def tensors(self, version: int) -> dict[str, Tensor]:
        model = self.model(version)
        return {
            name: Tensor(
                "float32",
                tuple(p.shape),
                p.detach().contiguous().numpy().view(np.uint8).reshape(-1),
            )
            for name, p in model.named_parameters()
        }

    async def serve(self, version: int) -> None:
        await self.engine.update_weights(version, self.tensors(version))
        assert self.engine.version == version

    def request(self, prompt: list[int], **changes: Any) -> GenerateRequest:
        settings = {"max_new_tokens": 12, "temperature": 0.0, "seed": 5} | changes
        return GenerateRequest(request_id=f"r{next(self._ids)}", token_ids=prompt, **settings)

    async def generate(self, prompt: list[int], **changes: Any) -> Completion:
        completion = await self.engine.generate(self.request(prompt, **changes))
        count = len(completion.token_ids)
        assert len(completion.logprobs) == len(completion.token_versions) == count
        return completion

    def logprobs(
        self, version: int, prompt: list[int], tokens: list[int], temperature: float = 1.0
    ) -> np.ndarray:
        """Log-probs of `tokens` after `prompt`: float64 [len(tokens)]."""
        with torch.no_grad():
            logits = self.model(version)(torch.tensor([prompt + tokens])).logits[0].double()
        table = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, -1)
        return table[torch.arange(len(tokens)), torch.tensor(tokens)].numpy()

    def greedy(self, version: int, prompt: list[int], count: int) -> list[int]:
        with torch.no_grad():
            out = self.model(version).generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                eos_token_id=None,
            )
        return [int(t) for t in out[0, len(prompt) :]]


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng([length, seed]).integers(2, VOCAB, length)]


async def check_greedy_equals_transformers(bed: EngineBed) -> None:
    await bed.serve(0)
    for length in (1, 7, 50):
        got = await bed.generate(prompt(length), max_new_tokens=20)
        assert got.token_ids == bed.greedy(0, prompt(length), 20)
        expected = bed.logprobs(0, prompt(length), got.token_ids)
        np.testing.assert_allclose(got.logprobs, expected, atol=TOLERANCE)
        assert got.token_versions == [0] * 20


async def check_logprobs_are_of_the_sampled_distribution(bed: EngineBed) -> None:
    await bed.serve(0)
    for temperature in (0.7, 1.0, 1.8):
        got = await bed.generate(prompt(9), max_new_tokens=30, temperature=temperature, seed=11)
        expected = bed.logprobs(0, prompt(9), got.token_ids, temperature)
        np.testing.assert_allclose(got.logprobs, expected, atol=TOLERANCE)


async def check_sampled_frequencies(bed: EngineBed) -> None:
    """First tokens of many seeds follow the model's distribution (chi-square, 99.99 %)."""
    await bed.serve(0)
    count, temperature = 1500, 1.5
    requests = [
        bed.generate(prompt(6), max_new_tokens=1, temperature=temperature, seed=seed * 7919)
        for seed in range(count)
    ]
    seen = np.bincount([c.token_ids[0] for c in await asyncio.gather(*requests)], minlength=VOCAB)
    with torch.no_grad():
        logits = bed.model(0)(torch.tensor([prompt(6)])).logits[0, -1].double()
    expected = torch.softmax(logits / temperature, -1).numpy() * count
    common = expected >= 5
    observed = np.append(seen[common], seen[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    chi_square = float(((observed - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum())
    degrees = len(wanted) - 1
    # Wilson-Hilferty: (chi2 / k)^(1/3) is about normal; beyond 3.7 sigma lies 1 in 10,000.
    z = ((chi_square / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5
    assert z < 3.7, (chi_square, degrees)


async def check_seeds(bed: EngineBed) -> None:
    """Reruns repeat, the samples of a group differ, and the company does not matter."""
    await bed.serve(0)

    async def group() -> list[list[int]]:
        calls = [
            bed.generate(prompt(8), max_new_tokens=16, temperature=1.0, seed=seed)
            for seed in range(8)
        ]
        return [c.token_ids for c in await asyncio.gather(*calls)]

    first, second = await group(), await group()
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 8
    alone = await bed.generate(prompt(8), max_new_tokens=16, temperature=1.0, seed=3)
    assert alone.token_ids == first[3]


async def check_batch_equals_single(bed: EngineBed) -> None:
    await bed.serve(0)
    prompts = [prompt(length, seed) for length in (1, 3, 17, 40) for seed in (0, 1)]
    calls = [
        bed.generate(p, max_new_tokens=5 + 3 * i) for i, p in enumerate(prompts) for _ in range(3)
    ]
    for index, got in enumerate(await asyncio.gather(*calls)):
        p, count = prompts[index // 3], 5 + 3 * (index // 3)
        assert got.token_ids == bed.greedy(0, p, count)
        np.testing.assert_allclose(got.logprobs, bed.logprobs(0, p, got.token_ids), atol=TOLERANCE)


async def check_finish_reasons(bed: EngineBed) -> None:
    """Length only when truncated; the stop token is kept, also as the very last allowed one."""
    await bed.serve(0)
    tokens = bed.greedy(0, prompt(12), 10)
    place = max(i for i, t in enumerate(tokens) if t not in tokens[:i])  # first seen there
    stop = tokens[place]
    cut = await bed.generate(prompt(12), max_new_tokens=10)
    assert (cut.finish_reason, cut.token_ids) == (FinishReason.LENGTH, tokens)
    for limit in (place + 1, 10):
        got = await bed.generate(prompt(12), max_new_tokens=limit, stop_token_ids=(stop, 63))
        assert (got.finish_reason, got.token_ids) == (FinishReason.STOP, tokens[: place + 1])


async def check_top_p_and_top_k(bed: EngineBed) -> None:
    await bed.serve(0)
    calls = [
        bed.generate(prompt(5), max_new_tokens=1, temperature=1.5, top_k=2, seed=seed)
        for seed in range(60)
    ]
    with torch.no_grad():
        logits = bed.model(0)(torch.tensor([prompt(5)])).logits[0, -1]
    best = set(logits.topk(2).indices.tolist())
    assert {c.token_ids[0] for c in await asyncio.gather(*calls)} <= best
    tiny = await bed.generate(prompt(5), max_new_tokens=8, temperature=1.0, top_p=1e-6)
    assert tiny.token_ids == bed.greedy(0, prompt(5), 8)


async def check_abort_keeps_tokens(bed: EngineBed) -> None:
    await bed.serve(0)
    request = bed.request(prompt(10), max_new_tokens=900)
    other = asyncio.create_task(bed.generate(prompt(11), max_new_tokens=60))
    running = asyncio.create_task(bed.engine.generate(request))
    await asyncio.sleep(0.1)
    await bed.engine.abort(request.request_id)
    got = await running
    assert got.finish_reason is FinishReason.ABORT
    count = len(got.token_ids)
    assert count < 900
    if count:
        assert got.token_ids == bed.greedy(0, prompt(10), count)
    assert (await other).token_ids == bed.greedy(0, prompt(11), 60)
    await bed.engine.abort("never seen")


async def check_cancelled_call_aborts(bed: EngineBed) -> None:
    await bed.serve(0)
    running = asyncio.create_task(bed.generate(prompt(10), max_new_tokens=900))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await bed.generate(prompt(4))).token_ids == bed.greedy(0, prompt(4), 12)


async def _meet_update(
    bed: EngineBed, old: int, new: int, during: Callable[[], Awaitable[None]] | None = None
) -> list[Completion]:
    """Run long requests across an update; try again until the update fell into them."""
    delay = 0.2
    for _ in range(8):
        await bed.serve(old)
        calls = [
            asyncio.create_task(
                bed.generate(prompt(20, i), max_new_tokens=LONG, temperature=1.0, seed=i)
            )
            for i in range(3)
        ]
        await asyncio.sleep(delay)
        await bed.serve(new)
        if during is not None:
            await during()
        done = await asyncio.gather(*calls)
        if all({old, new} == set(c.token_versions) for c in done):
            return list(done)
        delay = delay / 2 if all(new not in c.token_versions for c in done) else delay * 2
    raise AssertionError("no update ever fell into the running requests")


async def check_update_while_running(bed: EngineBed) -> None:
    """Versions never decrease, and every token's log-prob is that of the version it names.

    So nothing of the old weights, cached keys and values included, took part in later tokens.
    """
    for index, got in enumerate(await _meet_update(bed, 0, 1)):
        assert got.token_versions == sorted(got.token_versions)
        assert (len(got.token_ids), got.finish_reason) == (LONG, FinishReason.LENGTH)
        by_version = [bed.logprobs(v, prompt(20, index), got.token_ids) for v in (0, 1)]
        expected = np.where(np.array(got.token_versions) == 0, *by_version)
        np.testing.assert_allclose(got.logprobs, expected, atol=TOLERANCE)


async def check_new_request_sees_no_old_cache(bed: EngineBed) -> None:
    """A prompt that runs across the update is asked again right after it."""

    async def ask() -> None:
        got = await bed.generate(prompt(20, 1), max_new_tokens=10)
        assert got.token_versions == [1] * 10
        assert got.token_ids == bed.greedy(1, prompt(20, 1), 10)
        expected = bed.logprobs(1, prompt(20, 1), got.token_ids)
        np.testing.assert_allclose(got.logprobs, expected, atol=TOLERANCE)

    await _meet_update(bed, 0, 1, during=ask)


async def check_failed_update_keeps_the_old_version(bed: EngineBed) -> None:
    await bed.serve(0)
    name = "model.layers.0.mlp.down_proj.weight"
    good = bed.tensors(1)
    tensor = good[name]
    bad = {
        "missing": {k: v for k, v in good.items() if k != name},
        "unknown": good | {"model.layers.9.mlp.down_proj.weight": tensor},
        "shape": good | {name: dataclasses.replace(tensor, shape=tensor.shape[::-1])},
        "dtype": good | {name: dataclasses.replace(tensor, dtype="int7")},
        "torn": good | {name: dataclasses.replace(tensor, data=tensor.data[:-4])},
    }
    running = asyncio.create_task(bed.generate(prompt(15), max_new_tokens=100))
    for tensors in bad.values():
        with pytest.raises(EngineError):
            await bed.engine.update_weights(1, tensors)
        assert bed.engine.version == 0
    assert (await running).token_versions == [0] * 100
    got = await bed.generate(prompt(15), max_new_tokens=10)
    assert (got.token_ids, got.token_versions) == (bed.greedy(0, prompt(15), 10), [0] * 10)
    await bed.serve(1)
    assert (await bed.generate(prompt(15))).token_ids == bed.greedy(1, prompt(15), 12)


async def check_rollback_aborts(bed: EngineBed) -> None:
    """An older version (the trainer was rolled back) never continues tokens of a newer one."""
    await bed.serve(5)
    running = asyncio.create_task(bed.generate(prompt(20), max_new_tokens=900))
    await asyncio.sleep(0.05)
    await bed.serve(2)
    got = await running
    assert got.finish_reason is FinishReason.ABORT
    assert set(got.token_versions) <= {5}
    assert (await bed.generate(prompt(20))).token_versions == [2] * 12


async def check_impossible_requests(bed: EngineBed) -> None:
    await bed.serve(0)
    bad: list[dict[str, Any]] = [
        {"prompt": []},
        {"prompt": [VOCAB]},
        {"prompt": [-1]},
        {"prompt": prompt(5), "max_new_tokens": 0},
        {"prompt": prompt(5), "max_new_tokens": 100_000},
        {"prompt": prompt(1500), "max_new_tokens": 1},
    ]
    for changes in bad:
        with pytest.raises(EngineError):
            await bed.generate(**changes)
    assert await bed.engine.healthy()
    assert (await bed.generate(prompt(5))).token_ids == bed.greedy(0, prompt(5), 12)


async def check_no_generation_before_weights(bed: EngineBed) -> None:
    assert bed.engine.version == NO_VERSION
    with pytest.raises(EngineError):
        await bed.generate(prompt(5))
    await bed.serve(3)
    assert (await bed.generate(prompt(5))).token_versions == [3] * 12


async def check_close_fails_running_requests(bed: EngineBed) -> None:
    await bed.serve(0)
    running = asyncio.create_task(bed.generate(prompt(10), max_new_tokens=900))
    await asyncio.sleep(0.05)
    await bed.engine.close()
    with pytest.raises(EngineError):
        await running
    assert not await bed.engine.healthy()
    with pytest.raises(EngineError):
        await bed.generate(prompt(10))


CHECKS = [
    check_greedy_equals_transformers,
    check_logprobs_are_of_the_sampled_distribution,
    check_sampled_frequencies,
    check_seeds,
    check_batch_equals_single,
    check_finish_reasons,
    check_top_p_and_top_k,
    check_abort_keeps_tokens,
    check_cancelled_call_aborts,
    check_update_while_running,
    check_new_request_sees_no_old_cache,
    check_failed_update_keeps_the_old_version,
    check_rollback_aborts,
    check_impossible_requests,
]
FRESH_CHECKS = [check_no_generation_before_weights, check_close_fails_running_requests]
