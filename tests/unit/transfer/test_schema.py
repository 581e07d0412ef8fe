"""Checks of required columns, version spans, and which groups share a block."""

import numpy as np
import pytest

from relax_hpc.errors import TransferError
from relax_hpc.records import FinishReason, Row, Sample
from relax_hpc.transfer import wire
from relax_hpc.transfer.block import Rows
from relax_hpc.transfer.column import BlockHeader
from relax_hpc.transfer.schema import (
    RL_ROWS,
    Length,
    RowSchema,
    check_responses,
    column,
    version_span,
    version_spans,
)
from relax_hpc.transfer.transfer_queue import _to_rows

from .queue_process import make_sample


def _group(
    uid: str, size: int, num_response: int = 3, version: int = 0
) -> tuple[str, list[Sample]]:
    return uid, [make_sample(version, num_response + i) for i in range(size)]


def test_a_description_has_one_entry_for_each_group() -> None:
    groups = [_group("0.1.0", 2, version=4), _group("0.2.0", 1, 0), _group("0.3.0", 3)]
    groups[0][1][1].fields["token_versions"][2] = 7
    found = RL_ROWS.describe(groups)
    assert [rows.num_tokens for rows in found.rows] == [[5, 6], [2], [5, 6, 7]]
    assert [rows.num_prompt_tokens for rows in found.rows] == [[2, 2], [2], [2, 2, 2]]
    assert [rows.finish_reasons for rows in found.rows] == [["stop"] * n for n in (2, 1, 3)]
    assert found.spans == [(4, 7), (-1, -1), (0, 0)]
    assert found.block_of == [0, 0, 0]
    (block,) = found.blocks
    keys = [(uid, i) for uid, samples in groups for i in range(len(samples))]
    assert [block.rows[row] for row in range(len(block.rows))] == keys
    assert set(block.values) == set(RL_ROWS.columns)
    wanted = [sample.fields["tokens"] for _, samples in groups for sample in samples]
    assert all(a is b for a, b in zip(block.values["tokens"], wanted, strict=True))


def test_large_groups_and_those_of_unknown_size_have_blocks_of_their_own() -> None:
    groups = [_group(f"0.{i}.0", 2, 500_000) for i in range(4)]  # 13 MB each
    found = RL_ROWS.describe(groups)
    assert found.block_of == [0, 1, 2, 3]
    assert [len(block.rows) for block in found.blocks] == [2, 2, 2, 2]
    small = [_group(f"0.{i}.0", 1) for i in range(3)]
    small[1][1][0].fields["pixels"] = np.zeros((2, 2))
    found = RL_ROWS.describe(small)
    assert found.block_of == [0, 1, 2], "nobody knows how large the other field is"
    assert [block.values["pixels"][0] is None for block in found.blocks] == [True, False, True]
    tensors = RowSchema(columns={"pixels": column("float64", Length.ANY)})
    assert tensors.describe(small[1:2]).rows[0].num_tokens == [1]


def test_the_refusal_names_group_and_sample_behind_other_groups() -> None:
    groups = [_group("0.1.0", 2), _group("0.2.0", 2)]
    groups[1][1][1].fields["loss_mask"] = np.ones(3, np.uint8)
    with pytest.raises(TransferError, match=r"0\.2\.0 sample 1: loss_mask has shape \(3,\), must"):
        RL_ROWS.describe(groups)
    groups[1][1][1].fields["loss_mask"] = [1, 1, 1, 1]  # type: ignore[assignment]
    with pytest.raises(TransferError, match=r"sample 1: field loss_mask is list, must be uint8"):
        RL_ROWS.describe(groups)
    with pytest.raises(TransferError, match=r"group 0\.3\.0: has no samples"):
        RL_ROWS.describe([_group("0.1.0", 2), ("0.3.0", [])])


@pytest.mark.parametrize("prompt", [0, -1, 6])
def test_a_prompt_must_lie_in_its_tokens(prompt: int) -> None:
    sample = make_sample()
    bad = Sample(
        num_prompt_tokens=prompt, finish_reason=FinishReason.STOP, fields=dict(sample.fields)
    )
    with pytest.raises(TransferError, match=f"sample 1: tokens .*num_prompt_tokens is {prompt}"):
        RL_ROWS.describe([("0.0.0", [sample, bad])])


def test_an_equal_dtype_is_accepted_whoever_made_it() -> None:
    samples = _group("0.1.0", 2)[1]
    other = np.dtype(np.dtype("int32").newbyteorder("<").str)
    samples[0].fields["tokens"] = samples[0].fields["tokens"].astype(other)
    assert RL_ROWS.describe([("0.1.0", samples)]).rows[0].num_tokens == [5, 6]
    samples[0].fields["tokens"] = samples[0].fields["tokens"].astype(">i4")
    with pytest.raises(TransferError, match="field tokens is >i4, must be int32"):
        RL_ROWS.describe([("0.1.0", samples)])


def _row(size: int) -> Row:
    return Row(
        uid="0.1.0",
        sample_index=size,
        group_size=4,
        num_prompt_tokens=2,
        finish_reason=FinishReason.STOP,
        fields={"tokens": np.zeros(2 + size, np.int32)},
    )


def test_one_more_field_has_a_value_for_each_response_token() -> None:
    rows = [_row(2), _row(3)]
    check_responses(rows, "ref_logprobs", [np.zeros(2, np.float32), np.zeros(3, np.float32)])
    with pytest.raises(TransferError, match=r"0\.1\.0 sample 3: ref_logprobs has shape \(4,\)"):
        check_responses(rows, "ref_logprobs", [np.zeros(2, np.float32), np.zeros(4, np.float32)])
    with pytest.raises(TransferError, match="sample 2: field ref_logprobs is float64"):
        check_responses(rows, "ref_logprobs", [np.zeros(2), np.zeros(3, np.float32)])


def test_payload_that_is_not_what_the_controller_was_told_is_refused() -> None:
    told = wire.Rows([2, 2], [5, 6], ["stop", "length"])
    group = wire.GroupRows("0.1.0", 2, [0, 1], told, [0, 1])
    header = BlockHeader(["0.1.0"], [], [0, 1], [])
    held = Rows(header, [{"tokens": np.zeros(5 + i, np.int32)} for i in range(2)])
    reward = Rows(header, [{"reward": np.zeros(())} for _ in range(2)])
    rows = _to_rows([group], [held, reward], RL_ROWS)
    assert [(row.num_tokens, set(row.fields)) for row in rows] == [
        (5, {"tokens", "reward"}),
        (6, {"tokens", "reward"}),
    ]
    assert rows[1].finish_reason is FinishReason.LENGTH
    longer = wire.Rows([2, 2], [5, 7], ["stop", "stop"])
    with pytest.raises(TransferError, match=r"tokens of its rows .*\[5, 6\].* was told \[5, 7\]"):
        _to_rows([wire.GroupRows("0.1.0", 2, [0, 1], longer, [0])], [held], RL_ROWS)
    with pytest.raises(TransferError, match="are missing"):
        _to_rows([wire.GroupRows("0.1.0", 3, [0, 2], told, [0])], [held], RL_ROWS)
    with pytest.raises(TransferError, match="it was lost"):
        _to_rows([group], [held, TransferError("it was lost")], RL_ROWS)


@pytest.mark.parametrize("counts", [[2, 1, 3], [6], [1, 5]])
@pytest.mark.parametrize("lengths", [[3, 1, 4, 1, 5, 9], [0, 0, 2, 0, 1, 0], [2, 0, 0, 0, 0, 7]])
def test_spans_of_groups_are_those_of_each(counts: list[int], lengths: list[int]) -> None:
    random = np.random.default_rng(3)
    values = [random.integers(0, 9, length, np.int32) for length in lengths]
    begins = [sum(counts[:i]) for i in range(len(counts))]
    expected = [version_span(values[b : b + n]) for b, n in zip(begins, counts, strict=True)]
    assert version_spans(values, counts) == expected
