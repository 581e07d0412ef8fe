"""Compiled kernels on a GPU against the same functions in float64 on the CPU."""

import pytest
import torch

from relax_hpc.algorithms.numerics import VocabShard, logprobs_and_entropy

pytestmark = pytest.mark.gpu
VOCAB, PADDED = 1000, 1024


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs_entropy_and_gradient(dtype: torch.dtype, with_entropy: bool) -> None:
    torch.manual_seed(0)
    shard = VocabShard(vocab_size=VOCAB)
    for tokens in (1, 7, 300):  # one compiled kernel for all lengths
        logits = torch.randn(tokens, PADDED, dtype=dtype) * 4
        targets = torch.randint(0, VOCAB, (tokens,))
        weight = torch.rand(2, tokens)
        found = []
        for device, kind in (("cuda", dtype), ("cpu", torch.float64)):
            x = logits.to(device, kind).requires_grad_()
            values = logprobs_and_entropy(x, targets.to(device), shard, 0.7, with_entropy, 64)
            loss = sum((v * w.to(device)).sum() for v, w in zip(values, weight, strict=True))
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            assert x.grad is not None
            found.append([t.detach().double().cpu() for t in (*values, x.grad)])
        tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-4
        for seen, wanted in zip(*found, strict=True):
            torch.testing.assert_close(seen, wanted, rtol=tolerance, atol=tolerance)
        assert not found[0][2][:, VOCAB:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotary_embedding(dtype: torch.dtype) -> None:
    from relax_hpc.trainer.megatron_compat import import_megatron

    import_megatron()
    from relax_hpc.trainer.packed_attention import _rotate

    torch.manual_seed(0)
    for lengths in ((5, 3), (64, 1, 100)):
        positions = torch.cat([torch.arange(length) for length in lengths])
        t = torch.randn(len(positions), 4, 32, dtype=dtype)
        inverse = 1e4 ** (-torch.arange(0, 32, 2) / 32)
        angles = torch.outer(torch.arange(128.0), inverse)
        freqs = torch.cat([angles, angles], -1)[:, None, None]
        x = t.cuda().requires_grad_()
        seen = _rotate(x, freqs.cuda(), positions.cuda())
        seen.float().square().sum().backward()
        # A rotation of complex numbers, and one keeps lengths: the gradient of |x|^2 is 2 x.
        halves = t.double()
        z = torch.complex(halves[..., :16], halves[..., 16:])
        turned = z * torch.polar(torch.ones(()).double(), angles[positions].double())[:, None]
        wanted = torch.cat([turned.real, turned.imag], -1)
        tolerance = 5e-2 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(
            seen.double().cpu().detach(), wanted, rtol=tolerance, atol=tolerance
        )
        assert x.grad is not None
        torch.testing.assert_close(
            x.grad.double().cpu(), 2 * halves, rtol=tolerance, atol=4 * tolerance
        )
