"""Rows -> micro-batches: alignment of targets, masks and fields; cuts; rows across ranks."""

import numpy as np
import pytest
import torch

from relax_hpc.errors import TransferError
from relax_hpc.records import FinishReason, Row
from relax_hpc.trainer.megatron_compat import import_megatron
from relax_hpc.trainer.row_exchange import decode_rows, encode_rows

import_megatron()

from relax_hpc.trainer.micro_batch import (  # noqa: E402, needs the CPU stand-ins
    MicroBatch,
    TokenField,
    build_micro_batch,
    cut_rows,
)
from relax_hpc.trainer.packed_attention import pack  # noqa: E402

CPU = torch.device("cpu")


def row(tokens: list[int], num_prompt: int, mask: list[int], uid: str = "a") -> Row:
    size = len(tokens) - num_prompt
    fields = {
        "tokens": np.array(tokens, np.int32),
        "loss_mask": np.array(mask, np.uint8),
        "rollout_logprobs": -np.arange(1, size + 1, dtype=np.float32),
    }
    return Row(
        uid=uid,
        sample_index=0,
        group_size=1,
        num_prompt_tokens=num_prompt,
        finish_reason=FinishReason.STOP,
        fields=fields,
    )


def build(rows: list[Row], indices: list[int], align: int = 1) -> MicroBatch:
    advantages = np.arange(10.0, 10.0 + len(rows))
    fields = (TokenField(name="rollout_logprobs"),)
    return build_micro_batch(rows, indices, {"advantages": advantages}, fields, align, CPU)


@pytest.mark.parametrize("num_prompt", [0, 2])
def test_a_row_without_prompt_or_response_is_named(num_prompt: int) -> None:
    bad = row([10, 11], num_prompt, [1] * (2 - num_prompt), uid="0.7.1")
    with pytest.raises(TransferError, match=rf"row 0\.7\.1/0: {num_prompt} prompt and"):
        build([bad], [0])


def test_targets_never_come_from_the_neighbour() -> None:
    batch = build([row([10, 11, 12], 1, [1, 1]), row([20, 21], 1, [1])], [0, 1])
    assert batch.tokens.tolist() == [10, 11, 12, 20, 21]
    assert batch.targets.tolist() == [11, 12, 0, 21, 0]
    assert batch.mask.tolist() == [True, True, False, True, False]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.sample_ids.tolist() == [0, 0, 0, 1, 0]


def test_fields_lie_on_the_places_that_predict_the_response() -> None:
    batch = build([row([1, 2, 3, 4, 5], 3, [1, 0]), row([6, 7, 8], 1, [0, 1])], [1, 0], align=4)
    # row 1 first: places 0..2, then row 0: places 3..7; 8 is a multiple of 4
    assert batch.tokens.tolist() == [6, 7, 8, 1, 2, 3, 4, 5]
    assert batch.mask.tolist() == [False, True, False, False, False, True, False, False]
    assert batch.fields["rollout_logprobs"].tolist() == [-1, -2, 0, 0, 0, -1, -2, 0]
    assert batch.fields["advantages"].tolist() == [11, 11, 0, 0, 0, 10, 10, 0]
    assert batch.tokens_per_sample.tolist() == [1, 1]
    assert [(s.row, s.start, s.size) for s in batch.spans] == [(1, 0, 2), (0, 5, 2)]


@pytest.mark.parametrize("align", [1, 2, 8])
def test_dummy_counts_nothing(align: int) -> None:
    batch = build([row([1, 2], 1, [1])], [], align=align)
    assert len(batch.tokens) == align
    assert not batch.mask.any()
    assert batch.tokens_per_sample.tolist() == [0]
    assert batch.spans == ()


def test_padding_is_a_sequence_of_its_own() -> None:
    batch = build([row([1, 2, 3], 1, [1, 1])], [0], align=8)
    assert len(batch.tokens) == 8
    assert batch.packed.cu_seqlens_q.tolist() == [0, 3, 8]
    assert batch.tokens_per_sample.tolist() == [2]


@pytest.mark.parametrize(("prompt", "tokens"), [(0, [1, 2]), (2, [1, 2])])
def test_rows_without_prompt_or_response_are_refused(prompt: int, tokens: list[int]) -> None:
    wrong = row(tokens, prompt, [1] * (len(tokens) - prompt))
    with pytest.raises(TransferError, match="row a/0"):
        build([wrong], [0])


def test_cut_respects_the_budget_and_loses_nothing() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        lengths = generator.integers(1, 40, generator.integers(1, 30)).tolist()
        budget = int(generator.integers(1, 100))
        cut = cut_rows(lengths, budget)
        assert sorted(i for batch in cut for i in batch) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in b) <= budget or len(b) == 1 for b in cut)
    assert cut_rows([], 10) == []


def test_cut_fills_earlier_micro_batches_first() -> None:
    assert cut_rows([2, 3, 4, 5, 6], 10) == [[4, 2], [3, 1, 0]]
    assert cut_rows([30, 4, 6], 10) == [[0], [2, 1]]


def test_buckets_hold_every_token_once_and_waste_little() -> None:
    generator = np.random.default_rng(1)
    lengths = generator.integers(1, 500, 200).tolist()
    batch = pack(lengths, CPU)
    packed = torch.cat([bucket.packed for bucket in batch.buckets])
    assert sorted(packed.tolist()) == list(range(sum(lengths)))
    assert packed[batch.order].tolist() == list(range(sum(lengths)))
    padded = sum(bucket.shape[0] * bucket.shape[1] for bucket in batch.buckets)
    assert padded <= 1.5 * sum(lengths)


def test_rows_survive_the_trip() -> None:
    rows = [row([1, 2, 3], 1, [1, 0], "0.1.2"), row([4, 5], 1, [1], "umlaut-\u00e4")]
    rows[0].fields["reward"] = np.array(0.5, np.float32)
    rows[0].fields["empty"] = np.zeros((0, 3), np.int64)
    found = decode_rows(encode_rows(rows))
    for one, other in zip(rows, found, strict=True):
        assert (one.uid, one.num_prompt_tokens, one.finish_reason) == (
            other.uid,
            other.num_prompt_tokens,
            other.finish_reason,
        )
        assert one.fields.keys() == other.fields.keys()
        for name, array in one.fields.items():
            assert array.dtype == other.fields[name].dtype
            assert np.array_equal(array, other.fields[name])
    assert decode_rows(encode_rows([])) == []
