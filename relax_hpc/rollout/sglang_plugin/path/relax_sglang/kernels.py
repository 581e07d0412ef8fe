"""Torch versions of compiled SGLang kernels that a CPU engine really calls.

Registered as `torch.ops.sgl_kernel.NAME` where no compiled sgl_kernel did so.
"""

from typing import Any

import torch

_MASK = 0xFFFFFFFF
_library: Any = None


def register() -> None:
    """Make the kernels known to torch; a compiled one stays in place."""
    global _library
    if _library is not None or hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
        return
    _library = torch.library.Library("sgl_kernel", "FRAGMENT")  # type: ignore[no-untyped-call]
    _library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    _library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bit, hash seed 0) of the 16 bytes (seed u64, position u32, column u32).

    What SGLang's sampler turns into Gumbel noise: the draw depends on the request's seed, the
    token's position and nothing else, so batch mates and interruptions do not change it.

    Args:
        seed: [N] uint64 or int64, one per request.
        positions: [N] int, position of the token in its sequence.
        columns: [V] int, token ids.

    Returns:
        [N, V] uint32. int64 arithmetic inside: products wrap, their low 32 bits are right.
    """
    seed = seed.view(torch.int64) if seed.dtype is torch.uint64 else seed.to(torch.int64)
    state = torch.zeros_like(seed)
    for block in (seed & _MASK, (seed >> 32) & _MASK, positions.to(torch.int64) & _MASK):
        state = _mix(state, block)
    state = _mix(state[:, None], columns.to(torch.int64)[None, :] & _MASK) ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return (state ^ (state >> 16)).to(torch.uint32)


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _rotate((block * 0xCC9E2D51) & _MASK, 15)
    block = (block * 0x1B873593) & _MASK
    return (_rotate(state ^ block, 13) * 5 + 0xE6546B64) & _MASK


def _rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _MASK
