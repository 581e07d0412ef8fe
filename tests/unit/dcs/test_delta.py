"""The codec of weight deltas: lossless for any bits; any bytes are an error or an array."""

import contextlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.dcs import delta
from relax_hpc.dcs.delta import HEAD_BYTES, base_is_needed, decode, encode, read_head
from relax_hpc.errors import WeightSyncError

WIDTHS = st.sampled_from([1, 2, 4, 8])


def packed(base, new, width, **options):
    return b"".join(encode(base, new, width, **options))


def unpacked(data, base, nbytes, width):
    """What a receiver does, with guards on both sides of the array."""
    room = np.full(nbytes + 128, 0xA5, np.uint8)
    out = room[64 : 64 + nbytes]
    out[:] = 0 if base is None else base
    try:
        head = read_head(memoryview(data), nbytes, width)
        decode(head, memoryview(data)[HEAD_BYTES:], out, width)
    finally:
        assert (room[:64] == 0xA5).all() and (room[64 + nbytes :] == 0xA5).all()
    return out


@st.composite
def pairs(draw, max_elements=3000):
    width = draw(WIDTHS)
    count = draw(st.integers(0, max_elements))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = rng.integers(0, 256, count * width, dtype=np.uint8)
    new = base.copy()
    density = draw(st.sampled_from([0.0, 0.0003, 0.01, 0.03, 0.2, 0.5, 1.0]))
    mask = rng.random(count) < density
    bits = draw(st.sampled_from([1, 3, 8 * width]))
    words = new.view(f"<u{width}")
    words[mask] ^= rng.integers(1, 2**bits, int(mask.sum()), dtype=np.uint64).astype(words.dtype)
    return width, base, new


@given(pairs(), st.booleans())
def test_any_change_of_any_width_comes_back_bit_equal(pair, deflate):
    width, base, new = pair
    data = packed(base, new, width, deflate=deflate)
    assert len(data) <= HEAD_BYTES + new.nbytes
    assert unpacked(data, base, new.nbytes, width).tobytes() == new.tobytes()
    assert packed(base, new, width, deflate=deflate) == data  # a resumed transfer relies on it
    dense = packed(None, new, width)
    assert unpacked(dense, None, new.nbytes, width).tobytes() == new.tobytes()


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 510, 511, 65534, 65535, 65536, 200_000])
@pytest.mark.parametrize("width", [1, 2, 8])
def test_gaps_around_the_escape_codes(gap, width):
    base = np.zeros(width * (gap + 300), np.uint8)
    new = base.copy()
    words = new.view(f"<u{width}")
    words[gap] = 1
    words[gap + 1] = 2
    data = packed(base, new, width)
    assert unpacked(data, base, new.nbytes, width).tobytes() == new.tobytes()
    assert len(data) < HEAD_BYTES + 24 + 2 * width + gap // 255


def test_bits_that_compare_equal_as_floats_are_changes():
    base = np.array([0.0, np.nan, 1.0, np.inf] * 8, np.float32)
    new = base.copy()
    new[0] = -0.0
    new.view(np.uint32)[1] = 0x7FC12345  # a NaN of another payload
    data = packed(base.view(np.uint8), new.view(np.uint8), 4)
    found = unpacked(data, base.view(np.uint8), new.nbytes, 4)
    assert found.tobytes() == new.tobytes() and len(data) < HEAD_BYTES + new.nbytes


def test_nothing_changed_costs_a_head_and_an_empty_array_too():
    array = np.arange(4096, dtype=np.uint8)
    assert len(packed(array, array.copy(), 2)) == HEAD_BYTES
    empty = array[:0]
    assert len(packed(empty, empty, 8)) == len(packed(None, empty, 8)) == HEAD_BYTES
    assert unpacked(packed(None, empty, 8), None, 0, 8).nbytes == 0


@pytest.mark.parametrize("deflate", [True, False])
def test_3_percent_of_bf16_at_random_costs_less_than_5_percent(deflate):
    rng = np.random.default_rng(0)
    base = rng.integers(0, 256, 4 << 20, dtype=np.uint8)
    new = base.copy()
    words = new.view(np.uint16)
    mask = rng.random(len(words)) < 0.03
    words[mask] ^= rng.integers(1, 2**16, int(mask.sum()), dtype=np.uint16)  # no bit is likely
    assert len(packed(base, new, 2, deflate=deflate)) < 0.047 * new.nbytes


def test_deflate_pays_on_the_changes_of_an_optimizer():
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(1 << 20).astype(np.float32) * np.float32(0.02)
    step = np.float32(1e-6) * np.sign(rng.standard_normal(1 << 20)).astype(np.float32)
    old, new = ((w.view(np.uint32) >> 16).astype(np.uint16) for w in (weights, weights + step))
    old, new = old.view(np.uint8), new.view(np.uint8)
    assert 2 * len(packed(old, new, 2)) < len(packed(old, new, 2, deflate=False))


@given(pairs(400), st.data())
@settings(max_examples=300)
def test_damaged_bytes_are_an_error_or_an_array_and_nothing_else_is_touched(pair, data):
    width, base, new = pair
    good = bytearray(packed(base, new, width, deflate=data.draw(st.booleans())))
    kind = data.draw(st.sampled_from(["flip", "cut", "longer", "garbage"]))
    if kind == "flip":
        for _ in range(data.draw(st.integers(1, 4))):
            good[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del good[data.draw(st.integers(0, len(good) - 1)) :]
    elif kind == "longer":
        good += data.draw(st.binary(min_size=1, max_size=40))
    else:
        head = good[:HEAD_BYTES] if data.draw(st.booleans()) else b""
        good = bytearray(head) + data.draw(st.binary(max_size=200))
    with contextlib.suppress(WeightSyncError):
        unpacked(bytes(good), base, new.nbytes, width)
    if kind in ("cut", "longer"):
        with pytest.raises(WeightSyncError):
            unpacked(bytes(good), base, new.nbytes, width)


def test_a_body_that_would_inflate_to_gigabytes_costs_no_memory():
    nbytes, width = 1 << 20, 2
    bomb = delta.zlib.compress(bytes(256 << 20), 9)
    assert len(bomb) < nbytes
    head = delta._HEAD.pack(delta._SPARSE, 1, 1, 1000, len(bomb))
    tracemalloc.start()
    try:
        with pytest.raises(WeightSyncError, match="deflated body"):
            unpacked(head + bomb, None, nbytes, width)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_the_head_tells_whether_the_base_matters():
    base, new = np.zeros(64, np.uint8), np.ones(64, np.uint8)
    assert not base_is_needed(read_head(memoryview(packed(None, new, 2)), 64, 2))
    assert base_is_needed(read_head(memoryview(packed(base, base, 2)), 64, 2))
    with pytest.raises(WeightSyncError, match="elements of 3 bytes"):
        delta.check_width(3)
