"""Rows -> packed micro-batches: cut by a token budget, one place per predicted token.

Legend: T packed tokens of a micro-batch (padding included), S samples of it, R response tokens.

Every per-token array is aligned with the *logits*: place i belongs to the prediction of the token
after packed token i. A response of R tokens after P prompt tokens thus fills places P-1 .. P+R-2
of its sequence; the last place of a sequence predicts nothing and is masked, so no target ever
comes from the neighbouring sequence.
"""

import dataclasses
import typing

import numpy as np
import torch

from relax_hpc.errors import TransferError
from relax_hpc.records import Row
from relax_hpc.trainer.packed_attention import PackedBatch, pack


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenField:
    """A response field that the objective reads, and its dtype in the micro-batch."""

    name: str
    dtype: typing.Any = np.float32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ResponseSpan:
    """Where one row's response predictions lie in a micro-batch."""

    row: int
    """Index in the list of rows that was cut."""
    start: int
    """Place of the prediction of the first response token."""
    size: int
    """R."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One forward/backward pass. Tensors are on the training device."""

    tokens: torch.Tensor
    """[T] int64."""
    targets: torch.Tensor
    """[T] int64 the token that each place predicts; 0 where nothing is."""
    mask: torch.Tensor
    """[T] bool places that the loss counts."""
    sample_ids: torch.Tensor
    """[T] int64 sample (0 .. S-1) of each place; 0 on padding, which is masked."""
    tokens_per_sample: torch.Tensor
    """[S] int64 counted tokens of each sample; a dummy has one sample of none."""
    fields: dict[str, torch.Tensor]
    """[T] per-token fields by name; 0 outside of responses."""
    packed: PackedBatch
    spans: tuple[ResponseSpan, ...]

    @property
    def positions(self) -> torch.Tensor:
        """[T] int64 position of each token in its sequence."""
        assert self.packed.positions is not None  # set by pack()
        return self.packed.positions


def cut_rows(lengths: typing.Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Cut rows into micro-batches of at most `budget_tokens`; a longer row gets one of its own.

    Longest first, each into the first micro-batch that has room (first-fit decreasing): few
    micro-batches, since each adds its gradients to all of the model's, and the largest allocation
    of the step comes first. Deterministic; how the cut falls never changes the loss, since sums are
    divided once per step.

    Returns:
        Indices of the rows of each micro-batch.
    """
    by_length = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    rooms: list[int] = []
    for index in by_length:
        place = next((i for i, room in enumerate(rooms) if lengths[index] <= room), len(rooms))
        if place == len(rooms):
            batches.append([])
            rooms.append(budget_tokens)
        batches[place].append(index)
        rooms[place] -= lengths[index]
    return batches


def build_micro_batch(
    rows: typing.Sequence[Row],
    indices: typing.Sequence[int],
    per_row: typing.Mapping[str, np.ndarray],
    fields: typing.Sequence[TokenField],
    align: int,
    device: torch.device,
) -> MicroBatch:
    """Pack the rows of `indices`; no indices make a dummy that only keeps collectives aligned.

    Args:
        rows: all rows of the chunk.
        indices: which of them.
        per_row: [len(rows)] values that are spread over the row's response (advantages).
        fields: response fields to carry along; every row must have them.
        align: T is padded to a multiple of it (sequence parallelism: the tensor parallel size).
        device: where the model runs.

    Raises:
        TransferError: a row has no prompt or no response.
    """
    lengths = [rows[index].num_tokens for index in indices]
    total = sum(lengths)
    padding = -total % align if total else align
    size = total + padding
    host = {
        "tokens": np.zeros(size, np.int64),
        "targets": np.zeros(size, np.int64),
        "mask": np.zeros(size, bool),
        "sample_ids": np.zeros(size, np.int64),
    }
    by_name = {field.name: np.zeros(size, field.dtype) for field in fields}
    by_name |= {name: np.zeros(size, np.float32) for name in per_row}
    counts = np.zeros(max(1, len(indices)), np.int64)
    spans, start = [], 0
    for sample, index in enumerate(indices):
        span = _fill(rows[index], index, start, host)
        places = slice(span.start, span.start + span.size)
        host["sample_ids"][places] = sample
        for field in fields:
            by_name[field.name][places] = rows[index].fields[field.name]
        for name, values in per_row.items():
            by_name[name][places] = values[index]
        counts[sample] = int(host["mask"][places].sum())
        spans.append(span)
        start += rows[index].num_tokens
    tensors = {name: torch.from_numpy(array).to(device) for name, array in host.items()}
    return MicroBatch(
        **tensors,
        tokens_per_sample=torch.from_numpy(counts).to(device),
        fields={name: torch.from_numpy(array).to(device) for name, array in by_name.items()},
        packed=pack([*lengths, padding] if padding else lengths, device),
        spans=tuple(spans),
    )


def _fill(row: Row, index: int, start: int, host: dict[str, np.ndarray]) -> ResponseSpan:
    tokens = row.fields["tokens"]
    size = row.num_tokens - row.num_prompt_tokens
    if row.num_prompt_tokens < 1 or size < 1:
        raise TransferError(
            f"row {row.uid}/{row.sample_index}: {row.num_prompt_tokens} prompt and {size} response "
            "tokens, both must be at least 1: a rollout step must drop such a group, see its log"
        )
    host["tokens"][start : start + len(tokens)] = tokens
    host["targets"][start : start + len(tokens) - 1] = tokens[1:]
    first = start + row.num_prompt_tokens - 1
    loss_mask = row.fields.get("loss_mask")
    host["mask"][first : first + size] = True if loss_mask is None else loss_mask != 0
    return ResponseSpan(row=index, start=first, size=size)
