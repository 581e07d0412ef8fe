"""Overlong punishment (A10, A11) and truncation (L10, L11)."""

import pytest

from relax_hpc.algorithms.shaping import is_truncated, overlong_punishment
from relax_hpc.records import FinishReason


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (0, 0.0),
        (16384, 0.0),
        (16385, -1 / 4096),
        (18432, -0.5),
        (20480, -1.0),
        (20481, -1.0),
        (22528, -1.0),  # not -1.5
    ],
)
def test_a10_boundaries(num_tokens, expected):
    assert overlong_punishment(num_tokens, 20480, 4096) == pytest.approx(expected, abs=1e-9)


def test_a10_printed_value():
    assert round(overlong_punishment(16385, 20480, 4096), 6) == -0.000244


def test_penalty_scales_and_zero_buffer_is_off():
    assert overlong_punishment(18432, 20480, 4096, penalty=0.5) == -0.25
    assert overlong_punishment(99999, 20480, 0) == 0.0


@pytest.mark.parametrize("buffer_tokens", [20480, 20481, -1])
def test_a11_impossible_buffer_is_an_error(buffer_tokens):
    with pytest.raises(ValueError, match="buffer_tokens"):
        overlong_punishment(1, 20480, buffer_tokens)


def test_l11_only_the_finish_reason_says_truncated():
    assert is_truncated(FinishReason.LENGTH)
    assert not is_truncated(FinishReason.STOP)  # also with the end token at the last position
    assert not is_truncated(FinishReason.ABORT)


@pytest.mark.parametrize("missing", [None, "", "truncated"])
def test_l10_a_missing_reason_is_an_error_not_false(missing):
    with pytest.raises(ValueError, match="FinishReason"):
        is_truncated(missing)
