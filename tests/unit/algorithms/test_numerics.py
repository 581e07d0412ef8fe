"""Vocabulary-parallel log-probs and entropy against float64, one process and several shards."""

import math
import threading
import typing

import pytest
import torch

from relax_hpc.algorithms.numerics import VocabShard, logprobs_and_entropy

T, V = 37, 101


def oracle(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def inputs(padded: int = V) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(T, padded, generator=generator) * 4
    return logits, torch.randint(0, V, (T,), generator=generator)


def test_temperature_divides_logits() -> None:
    logits, target = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
    value, _ = logprobs_and_entropy(logits, target, VocabShard(vocab_size=3), 0.6)
    assert value.item() == pytest.approx(-0.2026, abs=1e-4)
    raw, _ = logprobs_and_entropy(logits, target, VocabShard(vocab_size=3))
    assert raw.item() == pytest.approx(-0.4076, abs=1e-4)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 37, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients(chunk_tokens: int, temperature: float) -> None:
    logits, targets = inputs()
    weights = torch.randn(2, T, generator=torch.Generator().manual_seed(2))
    seen, wanted = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    shard = VocabShard(vocab_size=V)
    values = logprobs_and_entropy(seen, targets, shard, temperature, True, chunk_tokens)
    (torch.stack(values) * weights).sum().backward()
    references = oracle(wanted, targets, temperature)
    (torch.stack(references) * weights).sum().backward()
    for value, reference in zip(values, references, strict=True):
        assert torch.allclose(value.double(), reference, atol=1e-5)
    assert seen.grad is not None and wanted.grad is not None
    assert torch.allclose(seen.grad, wanted.grad, atol=1e-5)


def test_padding_columns_have_no_probability_and_no_gradient() -> None:
    logits, targets = inputs(padded=128)
    logits[:, V:] = 50.0  # would win every softmax
    logits.requires_grad_()
    values, entropy = logprobs_and_entropy(
        logits, targets, VocabShard(vocab_size=V), with_entropy=True
    )
    wanted = oracle(logits.detach()[:, :V], targets, 1.0)
    assert torch.allclose(values.double(), wanted[0], atol=1e-5)
    assert torch.allclose(entropy.double(), wanted[1], atol=1e-5)
    (values.sum() + entropy.sum()).backward()
    assert logits.grad is not None and not logits.grad[:, V:].any()


def test_bfloat16_logits_keep_their_dtype_in_the_gradient() -> None:
    logits, targets = inputs()
    half = logits.bfloat16().requires_grad_()
    values, _ = logprobs_and_entropy(half, targets, VocabShard(vocab_size=V))
    assert values.dtype is torch.float32
    wanted, _ = oracle(half.detach().float(), targets, 1.0)
    assert torch.allclose(values.double(), wanted, atol=1e-5)
    values.sum().backward()
    assert half.grad is not None and half.grad.dtype is torch.bfloat16


class _Ring:
    """A process group of threads, so that shards can be tested in one process."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.parts: dict[int, torch.Tensor] = {}
        self.count = size

    def reduce(self, rank: int, x: torch.Tensor, largest: bool) -> torch.Tensor:
        self.parts[rank] = x
        self.barrier.wait()
        stacked = torch.stack([self.parts[r] for r in range(self.count)])
        self.barrier.wait()
        return stacked.amax(0) if largest else stacked.sum(0)


class _ThreadShard(VocabShard):
    __slots__ = ("rank", "ring")

    def reduce(
        self, x: torch.Tensor, op: typing.Any = torch.distributed.ReduceOp.SUM
    ) -> typing.Any:
        return self.ring.reduce(self.rank, x, op == torch.distributed.ReduceOp.MAX)


@pytest.mark.parametrize("size", [2, 4])
def test_shards_equal_the_whole_vocabulary(size: int) -> None:
    """101 columns over 2 and 4 shards: uneven, with padding; the last shard holds it."""
    width = -(-V // size)
    logits, targets = inputs(padded=width * size)
    ring, results = _Ring(size), {}

    def work(rank: int) -> None:
        shard = _ThreadShard(start=rank * width, vocab_size=V)
        object.__setattr__(shard, "rank", rank)
        object.__setattr__(shard, "ring", ring)
        part = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
        values = logprobs_and_entropy(part, targets, shard, 0.8, True, 10)
        (values[0].sum() + 0.3 * values[1].sum()).backward()
        results[rank] = (values[0].detach(), values[1].detach(), part.grad)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == size
    whole = logits[:, :V].clone().requires_grad_()
    wanted = oracle(whole, targets, 0.8)
    (wanted[0].sum() + 0.3 * wanted[1].sum()).backward()
    for rank in range(size):
        assert torch.allclose(results[rank][0].double(), wanted[0], atol=1e-5)
        assert torch.allclose(results[rank][1].double(), wanted[1], atol=1e-5)
    gradient = torch.cat([results[rank][2] for rank in range(size)], 1)
    assert whole.grad is not None
    assert torch.allclose(gradient[:, :V], whole.grad, atol=1e-5)
    assert not gradient[:, V:].any()


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]])
    values, entropy = logprobs_and_entropy(
        logits, torch.tensor([0, 1]), VocabShard(vocab_size=3), with_entropy=True
    )
    assert values.tolist() == [0.0, pytest.approx(-math.log(3), abs=1e-3)]
    assert torch.isfinite(entropy).all()


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"chunk_tokens": 0}])
def test_wrong_arguments(wrong: dict[str, typing.Any]) -> None:
    logits, targets = inputs()
    with pytest.raises(ValueError, match="numerics"):
        logprobs_and_entropy(logits, targets, VocabShard(vocab_size=V), **wrong)
    with pytest.raises(ValueError, match="numerics"):
        logprobs_and_entropy(logits, targets[:-1], VocabShard(vocab_size=V))
