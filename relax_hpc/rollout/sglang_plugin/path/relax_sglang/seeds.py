"""Per-request sampling seeds: equal seed, prompt and weights give the equal completion.

SGLang's sampler draws by Gumbel noise from a hash of (seed, position, column) if the batch carries
seeds, but two things stand between that and a promise:
1. Seeds are filled in under --enable-deterministic-inference only. That option also wants Triton
   kernels that add in batch-independent order: not there on a CPU, slow on a GPU.
2. As soon as one request of the batch has top-k or top-p (greedy is top-k 1), all rows are sorted
   first and "column" becomes the rank instead of the token id: a batch mate changes the draw
   (seen: the server's greedy warm-up request changed the samples of the first request).
Both are repaired here. Interfaces used: SGLang 0.5.23.
"""

from collections.abc import Callable
from typing import Any

import torch


def install() -> None:
    """Patch SGLang's batch builder and sampler in this process."""
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    build = SamplingBatchInfo.from_schedule_batch.__func__
    SamplingBatchInfo.from_schedule_batch = classmethod(_with_seeds(build))
    name = "top_k_top_p_min_p_sampling_from_probs_torch"
    setattr(sampler, name, _by_token_id(getattr(sampler, name), sampler.multinomial_with_seed))


def _with_seeds(build: Callable[..., Any]) -> Callable[..., Any]:
    def from_schedule_batch(cls: type, batch: Any, vocab_size: int) -> Any:
        info = build(cls, batch, vocab_size)
        if info.sampling_seed is None:
            seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
            numbers = [0 if seed is None else seed for seed in seeds]
            info.sampling_seed = torch.tensor(numbers, dtype=torch.int64, device=batch.device)
        return info

    return from_schedule_batch


def _by_token_id(original: Callable[..., Any], draw: Callable[..., Any]) -> Callable[..., Any]:
    def sample(  # SGLang's signature
        probs: torch.Tensor,
        top_ks: torch.Tensor,
        top_ps: torch.Tensor,
        min_ps: torch.Tensor,
        need_min_p_sampling: bool,
        sampling_seed: torch.Tensor | None,
        positions: torch.Tensor,
        **options: Any,
    ) -> Any:
        if sampling_seed is None or need_min_p_sampling or options.get("return_filtered_probs"):
            return original(
                probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions,
                **options,
            )  # fmt: skip
        kept = keep_top(probs, top_ks, top_ps)
        return draw(torch.log(kept), sampling_seed, positions).view(-1).to(torch.int32)

    return sample


def keep_top(probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Zero what top-k and top-p exclude, in token order; rows with neither stay as they are.

    Args:
        probs: [N, V] float32. top_ks: [N] int, V or more = all. top_ps: [N] float32, 1 = all.

    Returns:
        [N, V], not renormalised (the draw does not need it).
    """
    ordered, index = probs.sort(dim=-1, descending=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)[None, :]
    before = torch.cumsum(ordered, dim=-1) - ordered
    # a rounded cumulative sum may exceed 1: top_p = 1 must not cut the tail
    out = (rank >= top_ks[:, None]) | ((before > top_ps[:, None]) & (top_ps[:, None] < 1))
    return probs.masked_fill(torch.zeros_like(out).scatter(-1, index, out), 0.0)
