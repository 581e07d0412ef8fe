"""Log-probabilities and entropy from vocabulary-parallel logits, chunked over tokens.

Legend: T tokens, V vocabulary columns of this rank (padding included), VT all columns of all ranks.

One autograd function gives both values in one pass. It keeps the logits as they came (bfloat16
stays bfloat16) and recomputes the softmax chunk by chunk in the backward pass: at a vocabulary of
150,000 the float32 copies of a whole micro-batch would be the largest tensors of the step. On GPUs
the functions that touch every logit are compiled into one kernel each, which reads the logits and
writes what it returns, nothing in between.
"""

import dataclasses
import typing

import torch
import torch.distributed as dist

from relax_hpc.algorithms.fused import fused

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
        num_real = ctx.shard.num_real(logits.shape[1])
        grad_logits = torch.zeros_like(logits)  # padding columns stay 0
        if num_real == 0:
            return grad_logits, None, None, None, None, None
        for start in range(0, logits.shape[0], ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            local, is_local = _local_targets(targets[rows], ctx.shard, num_real)
            grad_logits[rows, :num_real] = _gradient(
                logits[rows, :num_real],
                log_sum[rows],
                local,
                grads[0][rows],
                grads[0][rows] * is_local,
                (entropy[rows], grads[1][rows]) if ctx.with_entropy else None,
                ctx.temperature,
            )
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
    if num_real > 0:
        peak = _peak(logits[:, :num_real], temperature)
    else:
        lowest = torch.finfo(torch.float32).min
        peak = logits.new_full((logits.shape[0],), lowest, dtype=torch.float32)
    peak = shard.reduce(peak, dist.ReduceOp.MAX)
    if num_real > 0:
        local, is_local = _local_targets(targets, shard, num_real)
        sums = _sums(logits[:, :num_real], peak, local, is_local, temperature, with_entropy)
    else:
        sums = peak.new_zeros((3 if with_entropy else 2, len(peak)))
    sums = shard.reduce(sums)
    log_sum = peak + sums[0].log()
    # H = log(sum(exp(z))) - E[z]
    entropy = log_sum - sums[2] / sums[0] if with_entropy else torch.zeros_like(log_sum)
    return sums[1] - log_sum, entropy, log_sum


@fused
def _peak(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the largest z of each token, [t] float32."""
    return (logits.float() / temperature).amax(-1)


@fused
def _sums(
    logits: torch.Tensor,
    peak: torch.Tensor,
    local: torch.Tensor,
    is_local: torch.Tensor,
    temperature: float,
    with_entropy: bool,
) -> torch.Tensor:
    """Return sum(exp(z - peak)), z of the target and, for the entropy, sum(exp(z - peak) z)."""
    z = logits.float() / temperature
    exp_z = (z - peak[:, None]).exp()
    z_target = z.gather(1, local[:, None])[:, 0]
    parts = [exp_z.sum(-1), torch.where(is_local, z_target, 0.0)]
    if with_entropy:
        parts.append((exp_z * z).sum(-1))
    return torch.stack(parts)


@fused
def _gradient(
    logits: torch.Tensor,
    log_sum: torch.Tensor,
    local: torch.Tensor,
    grad: torch.Tensor,
    grad_target: torch.Tensor,
    entropy: tuple[torch.Tensor, torch.Tensor] | None,
    temperature: float,
) -> torch.Tensor:
    """Return d loss / d logits [t, V] in the logits' dtype.

    Args:
        logits: [t, V].
        log_sum: [t] log(sum(exp(z))).
        local: [t] column of the target.
        grad: [t] of the log-probability.
        grad_target: [t] the same where the target is one of these columns, else 0.
        entropy: entropy and its gradient, each [t].
        temperature: divides the logits.
    """
    log_p = logits.float() / temperature - log_sum[:, None]
    p = log_p.exp()
    columns = torch.arange(logits.shape[1], device=logits.device)
    is_target = columns[None] == local[:, None]
    result = torch.where(is_target, grad_target[:, None], 0.0) - p * grad[:, None]
    if entropy is not None:
        result = result - p * (log_p + entropy[0][:, None]) * entropy[1][:, None]
    return (result / temperature).to(logits.dtype)
