"""Log-probabilities and entropy from vocabulary-parallel logits, chunked over tokens.

Legend: T tokens, V vocabulary columns of this rank (padding included), VT all columns of all ranks.

One autograd function gives both values in one pass. It keeps the logits as they came (bfloat16
stays bfloat16) and recomputes the softmax chunk by chunk in the backward pass: at a vocabulary of
150,000 the float32 copies of a whole micro-batch would be the largest tensors of the step.
"""

import dataclasses
import typing

import torch
import torch.distributed as dist

DEFAULT_CHUNK_TOKENS = 2048


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VocabShard:
    """Which columns of the vocabulary this rank's logits hold, and who holds the others."""

    start: int = 0
    """Vocabulary index of the first local column."""
    vocab_size: int
    """Real vocabulary; columns at or beyond it are padding and have probability 0."""
    group: dist.ProcessGroup | None = None
    """The tensor parallel group; None: this rank holds all columns."""

    def num_real(self, num_columns: int) -> int:
        """Return how many of the local columns are real tokens (the padding is at the end)."""
        return max(0, min(num_columns, self.vocab_size - self.start))

    def reduce(self, x: torch.Tensor, op: typing.Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """All-reduce over the vocabulary's ranks, in place."""
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(x, op=op, group=self.group)
        return x


def logprobs_and_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    shard: VocabShard,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of each distribution, at logits / temperature.

    Temperature divides the *logits* (z = [2, 1, 0] at 0.6 gives -0.2026 for the first; dividing
    log-probabilities gives -0.6793, which is no log-probability). Every rank of the group gets
    the same values; gradients flow into each rank's own columns.

    Args:
        logits: [T, V] of this rank, any float dtype; not modified.
        targets: [T] int64 vocabulary indices; logits[i] predicts targets[i] (the caller shifts).
        shard: which columns these are.
        temperature: > 0, the one that the tokens were sampled with.
        with_entropy: False saves one reduction; the entropy returned is then all zeros.
        chunk_tokens: tokens whose float32 softmax exists at a time.

    Returns:
        Log-probabilities [T] float32 and entropies [T] float32 in nats.

    Raises:
        ValueError: temperature or chunk size not positive, shapes do not match.
    """
    if temperature <= 0 or chunk_tokens <= 0:
        raise ValueError(f"numerics: temperature={temperature}, chunk_tokens={chunk_tokens}: > 0")
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(f"numerics: logits {tuple(logits.shape)}, targets {tuple(targets.shape)}")
    apply: typing.Any = _LogprobsAndEntropy.apply
    logprobs, entropy = apply(logits, targets, shard, temperature, with_entropy, chunk_tokens)
    return logprobs, entropy


class _LogprobsAndEntropy(torch.autograd.Function):
    """d logprob / dz = (onehot - p) / T, d entropy / dz = -p (log p + H) / T; T = temperature."""

    @staticmethod
    def forward(
        ctx: typing.Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        shard: VocabShard,
        temperature: float,
        with_entropy: bool,
        chunk_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Walk over chunks of tokens; [T, V] float32 never exists as a whole."""
        chunks = [slice(i, i + chunk_tokens) for i in range(0, len(logits), chunk_tokens)]
        results = [
            _chunk_forward(logits[rows], targets[rows], shard, temperature, with_entropy)
            for rows in chunks
        ]
        logprobs, entropy, log_sum = (torch.cat(parts) for parts in zip(*results, strict=True))
        ctx.save_for_backward(logits, targets, log_sum, entropy)
        ctx.shard, ctx.temperature = shard, temperature
        ctx.with_entropy, ctx.chunk_tokens = with_entropy, chunk_tokens
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: typing.Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None, None]:
        """Recompute p chunk by chunk and write the gradient in the logits' own dtype."""
        logits, targets, log_sum, entropy = ctx.saved_tensors
        grad_logits = torch.zeros_like(logits)  # padding columns stay 0
        for start in range(0, logits.shape[0], ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            num_real = ctx.shard.num_real(logits.shape[1])
            log_p = logits[rows, :num_real].float() / ctx.temperature - log_sum[rows, None]
            p = log_p.exp()
            grad = p * -grads[0][rows, None]
            local, is_local = _local_targets(targets[rows], ctx.shard, num_real)
            if num_real > 0:
                grad.scatter_add_(1, local[:, None], (grads[0][rows] * is_local)[:, None])
            if ctx.with_entropy:
                grad -= p * (log_p + entropy[rows, None]) * grads[1][rows, None]
            grad_logits[rows, :num_real] = (grad / ctx.temperature).to(logits.dtype)
        return grad_logits, None, None, None, None, None


def _local_targets(
    targets: torch.Tensor, shard: VocabShard, num_real: int
) -> tuple[torch.Tensor, torch.Tensor]:
    local = targets - shard.start
    is_local = (local >= 0) & (local < num_real)
    return local.clamp(0, max(0, num_real - 1)), is_local


def _chunk_forward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    shard: VocabShard,
    temperature: float,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probs, entropy and log(sum(exp(z))), each [t] float32, of one chunk."""
    num_real = shard.num_real(logits.shape[1])
    z = logits[:, :num_real].float() / temperature
    lowest = torch.finfo(torch.float32).min
    peak = z.amax(-1) if num_real > 0 else z.new_full((z.shape[0],), lowest)
    peak = shard.reduce(peak, dist.ReduceOp.MAX)
    exp_z = (z - peak[:, None]).exp()
    local, is_local = _local_targets(targets, shard, num_real)
    z_target = z.gather(1, local[:, None])[:, 0] if num_real > 0 else torch.zeros_like(peak)
    parts = [exp_z.sum(-1), torch.where(is_local, z_target, 0.0)]
    if with_entropy:
        parts.append((exp_z * z).sum(-1))
    sums = shard.reduce(torch.stack(parts))
    log_sum = peak + sums[0].log()
    # H = log(sum(exp(z))) - E[z]
    entropy = log_sum - sums[2] / sums[0] if with_entropy else torch.zeros_like(log_sum)
    return sums[1] - log_sum, entropy, log_sum
