"""Blocks: bit-equal round trips, equal payload stored once, and every kind of damage is seen."""

import copy
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from relax_hpc.errors import StaleEpochError, TransferError
from relax_hpc.transfer import block
from relax_hpc.transfer.block import (
    Columns,
    Entry,
    Rows,
    column_spans,
    first_not_finite,
    mark_free,
    open_block,
    plan_block,
    write_block,
)
from relax_hpc.transfer.column import BlockHeader, WholeGroups
from relax_hpc.transfer.wire import BlockRef

EPOCH = 7


def _write(source, **options) -> tuple[memoryview, BlockRef]:
    plan = plan_block(source)
    raw = np.empty(plan.nbytes + 64, np.uint8)
    raw[:] = 0xAB  # nothing may depend on clean memory
    shift = -raw.ctypes.data % 64
    view = memoryview(raw)[shift : shift + plan.nbytes]
    digest = write_block(plan, view, EPOCH, **options)
    return view, BlockRef("n1", "extent", 4096, plan.nbytes, EPOCH, digest)


def _read(source, **options):
    view, ref = _write(source, **options)
    return open_block(view, ref, verify=True, where="test")


def _assert_equal(seen, expected) -> None:
    if isinstance(expected, dict):
        assert list(seen) == list(expected) or set(seen) == set(expected)
        for key in expected:
            _assert_equal(seen[key], expected[key])
    elif isinstance(expected, bytes | str):
        assert type(seen) is type(expected) and seen == expected
    else:
        expected = np.asarray(expected)
        assert seen.dtype == expected.dtype and seen.shape == expected.shape
        assert seen.tobytes() == expected.tobytes(), "NaN payloads and signed zeros count"
        assert not seen.flags.writeable


ARRAYS = st.one_of(
    st.sampled_from(["?", "i1", "u2", "<i4", ">i4", "u8", "f2", "f4", ">f4", "f8", "c8", "c16"])
).flatmap(
    lambda dtype: hnp.arrays(
        dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
    )
)
VALUES = st.recursive(
    st.one_of(ARRAYS, st.binary(max_size=40), st.text(max_size=10)),
    lambda inner: st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ROWS = st.dictionaries(
    st.tuples(st.sampled_from(["0.1.0", "0.2.0", "u"]), st.integers(0, 3)),
    st.dictionaries(st.sampled_from(["tokens", "image", "x.y", ""]), VALUES, max_size=3),
    max_size=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ROWS)
def test_any_rows_round_trip_bit_equal(rows) -> None:
    entries = [Entry(*key, name, value) for key, row in rows.items() for name, value in row.items()]
    seen = _read(entries)
    expected = {key: row for key, row in rows.items() if row}
    assert list(seen) == list(expected)
    for key, row in expected.items():
        _assert_equal(seen[key], row)


def test_columns_are_the_same_as_entries() -> None:
    rng = np.random.default_rng(0)
    rows = [("0.3.0", index) for index in range(4)]
    tokens = [rng.integers(0, 9, 5 + index).astype(np.int32) for index in range(4)]
    reward = [np.float32(index) for index in range(4)]
    image = [b"a", None, b"c", None]
    entries = [
        Entry(*key, name, values[index])
        for index, key in enumerate(rows)
        for name, values in (("tokens", tokens), ("reward", reward), ("image", image))
        if values[index] is not None
    ]
    one = _read(Columns(rows, {"tokens": tokens, "reward": reward, "image": image}))
    other = _read(entries)
    assert list(one) == list(other) == rows
    for key in rows:
        _assert_equal(one[key], other[key])
    assert "image" not in one["0.3.0", 1]


def test_whole_groups_of_known_lengths_make_the_same_block() -> None:
    """What a schema has looked at already is written without another look, byte for byte alike."""
    rng = np.random.default_rng(5)
    groups = WholeGroups(["0.1.0", "0.2.0", "0.3.0"], [60, 0, 41])
    rows = [("0.1.0", i) for i in range(60)] + [("0.3.0", i) for i in range(41)]
    lengths = [int(n) for n in rng.integers(0, 16_000, len(rows))]  # 3 MB: several pieces
    values = {"tokens": [rng.integers(0, 9, n).astype(np.int32) for n in lengths]}
    told, ref = _write(Columns(groups, values, {"tokens": lengths}))
    other, _ = _write(Columns(groups, values))
    assert bytes(told[: ref.nbytes]) == bytes(other[: ref.nbytes])
    seen = open_block(told, ref, verify=True, where="test")
    plain = _read(Columns(rows, values))
    assert list(seen) == list(plain) == [groups[row] for row in range(len(groups))] == rows
    for key, value in zip(rows, values["tokens"], strict=True):
        _assert_equal(seen[key], {"tokens": value})
        _assert_equal(plain[key], {"tokens": value})


def test_rows_of_whole_groups_are_named_and_each_is_there_once() -> None:
    groups = WholeGroups(["0.1.0", "0.2.0"], [2, 3])
    values = [np.zeros(4, np.float32) for _ in range(5)]
    values[3][1] = np.nan
    plan = plan_block(Columns(groups, {"p": values}, {"p": [4] * 5}))
    with pytest.raises(TransferError, match=r"group 0\.2\.0 sample 1: p is not finite"):
        write_block(plan, memoryview(bytearray(plan.nbytes)), EPOCH, {"p": first_not_finite})
    with pytest.raises(IndexError):
        groups[5]
    with pytest.raises(TransferError, match="groups are given twice"):
        plan_block(Columns(WholeGroups(["u", "u"], [1, 1]), {}))


def test_non_contiguous_values_are_stored_in_their_order() -> None:
    base = np.arange(24, dtype=np.int32).reshape(4, 6)
    seen = _read(
        [
            Entry("u", 0, "a", base[:, ::2]),
            Entry("u", 0, "b", base.T),
            Entry("u", 1, "a", base[0, ::-1]),
        ]
    )
    _assert_equal(seen["u", 0], {"a": base[:, ::2], "b": base.T})
    _assert_equal(seen["u", 1], {"a": base[0, ::-1]})


def test_views_point_into_the_block_and_are_aligned() -> None:
    values = [np.arange(3, dtype=np.float64), np.arange(5, dtype=np.uint8)]
    view, ref = _write([Entry("u", 0, "a", values[0]), Entry("u", 0, "b", values[1])])
    row = open_block(view, ref, verify=False, where="test")["u", 0]
    begin = np.frombuffer(view, np.uint8).ctypes.data
    for array in row.values():
        assert begin <= array.ctypes.data < begin + len(view)
        assert array.ctypes.data % 64 == 0
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


IMAGE = np.random.default_rng(1).random((64, 512)).astype(np.float32)  # 128 KiB


@pytest.mark.parametrize("make", [lambda: IMAGE, IMAGE.copy], ids=["same object", "same bytes"])
def test_an_image_of_eight_samples_is_stored_once(make) -> None:
    entries = [Entry("u", index, "image", make()) for index in range(8)]
    view, _ = _write(entries)
    assert IMAGE.nbytes < len(view) < IMAGE.nbytes + 1024
    for row in _read(entries).values():
        _assert_equal(row["image"], IMAGE)


def test_images_that_differ_in_one_bit_between_the_samples_are_not_merged() -> None:
    other = IMAGE.copy()
    other.view(np.uint32).reshape(-1)[5000] ^= 1
    entries = [Entry("u", 0, "image", IMAGE), Entry("u", 1, "image", other)]
    rows = _read(entries)
    _assert_equal(rows["u", 0]["image"], IMAGE)
    _assert_equal(rows["u", 1]["image"], other)


@pytest.mark.parametrize("streams", [False, True])
def test_large_columns_are_hashed_in_pieces_as_a_whole(
    streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values around the size of a piece: copied in parts, verified in one go."""
    monkeypatch.setattr(block, "_STREAMS", streams)
    rng = np.random.default_rng(2)
    sizes = [3, 140_000, 131_072, 1, 262_144, 700_000, 0, 262_143]
    entries = [Entry("u", i, "x", rng.random(n).astype(np.float32)) for i, n in enumerate(sizes)]
    rows = _read(entries)
    for entry in entries:
        _assert_equal(rows["u", entry.sample_index]["x"], entry.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array([object()]), "group 0.7.0 sample 3: field x has dtype object"),
        (np.array(["text"]), "has dtype <U4"),
        (np.zeros(2, [("a", "i4")]), "put numeric arrays"),
        ({"a": None}, "'a' is NoneType"),
        ({3: b""}, "keys must be texts"),
        (None, "field x is None"),
    ],
)
def test_what_is_not_plain_data_is_refused(value, message: str) -> None:
    with pytest.raises(TransferError, match=message):
        plan_block([Entry("0.7.0", 3, "x", value)])


def test_a_field_given_twice_is_refused() -> None:
    entries = [Entry("u", 1, "x", np.zeros(1)), Entry("u", 1, "x", np.ones(1))]
    with pytest.raises(TransferError, match="group u sample 1: field x is given twice"):
        plan_block(entries)
    with pytest.raises(TransferError, match="rows are given twice"):
        plan_block(Columns([("u", 1), ("u", 1)], {}))
    with pytest.raises(TransferError, match="field x: 1 values for 2 rows"):
        plan_block(Columns([("u", 1), ("u", 2)], {"x": [np.zeros(1)]}))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [10, 200_000])
def test_a_value_that_is_not_finite_is_found_where_it_is(bad: float, size: int) -> None:
    values = [np.zeros(size, np.float32) + index for index in range(4)]
    values[2][size - 2] = bad
    entries = [Entry("0.1.0", index, "p", value) for index, value in enumerate(values)]
    plan = plan_block(entries)
    view = memoryview(bytearray(plan.nbytes))
    with pytest.raises(TransferError, match=r"group 0\.1\.0 sample 2: p is not finite: it holds"):
        write_block(plan, view, EPOCH, {"p": first_not_finite})
    ref = BlockRef("n1", "e", 0, plan.nbytes, EPOCH, 0)
    with pytest.raises(StaleEpochError):  # nothing was committed
        block.check_commit(view, ref, "test")
    values[2][size - 2] = 3e38  # its square is no float32, yet it is a number
    write_block(plan, view, EPOCH, {"p": first_not_finite})


def test_integers_are_always_finite_and_checks_see_every_element() -> None:
    seen: list[np.ndarray] = []

    def note(values: np.ndarray) -> int:
        seen.append(values.copy())
        return first_not_finite(values)

    values = np.arange(300_000, dtype=np.int32)
    _write([Entry("u", 0, "a", values), Entry("u", 1, "a", values[:7])], checks={"a": note})
    assert np.array_equal(np.concatenate(seen), np.concatenate([values, values[:7]]))


def _group() -> list[Entry]:
    rng = np.random.default_rng(3)
    return [
        Entry("0.5.0", index, name, rng.random(40 + index).astype(np.float32))
        for index in range(4)
        for name in ("tokens", "logprobs")
    ]


def test_every_flipped_bit_is_seen_and_named() -> None:
    """Bit by bit through prefix and header, byte by byte through the payload."""
    view, ref = _write(_group())
    spans = column_spans(view, ref, "test")
    good = bytes(view)
    payload_start = spans[0].start
    named = 0
    covered = [span for span in spans]
    bits = [(at, bit) for at in range(payload_start) for bit in range(8)]
    bits += [(at, at % 8) for at in range(payload_start, len(good))]
    for at, bit in bits:
        hurt = bytearray(good)
        hurt[at] ^= 1 << bit
        span = next((s for s in covered if s.start <= at < s.end), None)
        is_padding = span is None and at >= _header_end(good)
        if is_padding:
            open_block(memoryview(hurt), ref, verify=True, where="test")
            continue
        with pytest.raises(TransferError) as caught:
            open_block(memoryview(hurt), ref, verify=True, where="test")
        if span is not None:
            named += 1
            assert f"field {span.name} of group 0.5.0" in str(caught.value)
    assert named == sum(span.end - span.start for span in spans)


def _header_end(image: bytes) -> int:
    return 32 + struct.unpack_from("<I", image, 24)[0]


def test_column_spans_need_only_the_header() -> None:
    view, ref = _write(_group())
    copied = bytearray(len(view))
    copied[: _header_end(view)] = view[: _header_end(view)]
    spans = column_spans(memoryview(copied), ref, "test")
    assert [span.name for span in spans] == ["tokens", "logprobs"]
    assert all(span.uids == ("0.5.0",) and span.start % 64 == 0 for span in spans)
    assert spans == column_spans(view, ref, "test")


@pytest.mark.parametrize(
    ("tunables", "streams"),
    [
        ("", False),
        ("glibc.cpu.x86_non_temporal_threshold=1048576", True),
        ("glibc.malloc.check=1:glibc.cpu.x86_non_temporal_threshold=0x100000", True),
        ("glibc.cpu.x86_non_temporal_threshold=25165824", False),
    ],
)
def test_streaming_copies_are_known_from_the_environment(
    tunables: str, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    assert block._streams() is streams


def test_large_values_with_strides_are_compared_and_stored_in_order() -> None:
    base = np.arange(80_000, dtype=np.int32)
    rows = _read([Entry("u", 0, "x", base[::2]), Entry("u", 1, "x", base[::-2])])
    _assert_equal(rows["u", 0]["x"], base[::2])
    _assert_equal(rows["u", 1]["x"], base[::-2])


def test_empty_values_of_every_dtype() -> None:
    for dtype in ("f4", "c8", "?", "<i8"):
        rows = _read([Entry("u", index, "x", np.empty(0, dtype)) for index in range(3)])
        assert all(row["x"].dtype == dtype and row["x"].shape == (0,) for row in rows.values())
    assert _read([]) == {}


def test_stale_references_are_refused() -> None:
    view, ref = _write(_group())
    older = BlockRef("n1", "extent", 4096, ref.nbytes, EPOCH - 1, ref.digest)
    with pytest.raises(StaleEpochError, match=f"there is epoch {EPOCH}"):
        open_block(view, older, verify=False, where="test")
    with pytest.raises(TransferError, match="expected"):
        open_block(view[: ref.nbytes // 2], ref, verify=False, where="test")
    mark_free(view, 0)
    with pytest.raises(StaleEpochError, match="extent\\+4096 of node n1 \\(test\\) is gone"):
        open_block(view, ref, verify=False, where="test")


@pytest.mark.parametrize("phase", ["_read_header", "values_of"])
def test_a_block_recycled_while_it_is_read_is_stale(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a reader that was stopped (SIGSTOP, swap) between two looks must notice."""
    view, ref = _write(_group())
    right = getattr(block, phase)

    def recycle_then(*args):
        other = plan_block([Entry("0.9.0", 0, "x", np.full(100, 7.0))])
        write_block(other, view, EPOCH + 1)
        return right(*args)

    monkeypatch.setattr(block, phase, recycle_then)
    with pytest.raises(StaleEpochError):
        open_block(view, ref, verify=False, where="test")


def test_nothing_is_committed_before_everything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception after each column, as a kill would do it: the block never looks committed."""
    plan, original = plan_block(_group()), block._write_column
    for fatal in range(len(plan.columns)):
        raw = bytearray(b"\xab" * plan.nbytes)
        view = memoryview(raw)
        write_block(plan, view, EPOCH)  # an older block is there
        count = iter(range(10))

        def write_column(*args, fatal=fatal, count=count):
            if next(count) == fatal:
                raise KeyboardInterrupt
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(block, "_write_column", write_column)
            with pytest.raises(KeyboardInterrupt):
                write_block(plan, view, EPOCH + 1)
        for epoch in (EPOCH, EPOCH + 1):
            ref = BlockRef("n1", "e", 0, plan.nbytes, epoch, 0)
            with pytest.raises(StaleEpochError):
                block.check_commit(view, ref, "test")


def test_the_plan_does_not_change_what_it_was_given() -> None:
    entries = [Entry("u", 0, "d", {"a": np.arange(3), "b": {"c": b"x"}})]
    before = copy.deepcopy(entries)
    _write(entries)
    assert entries[0].value["b"] == before[0].value["b"]
    assert np.array_equal(entries[0].value["a"], before[0].value["a"])
    assert entries[0].value["a"].flags.writeable


def test_rows_of_a_group_are_picked_wherever_they_lie() -> None:
    """Whole groups are slices; rows of several groups that are mixed are looked up."""
    keys = [("a", 0), ("b", 1), ("a", 2), ("b", 0)]
    entries = [Entry(uid, s, "x", np.full(3, 10 * s, np.int32)) for uid, s in keys]
    for order in (entries, sorted(entries, key=lambda entry: entry[:2])):
        rows = _read(order)
        assert set(rows) == set(keys)
        assert [row["x"][0] for row in rows.pick("a", [0, 2])] == [0, 20]
        assert [row["x"][0] for row in rows.pick("b", [1, 0])] == [10, 0]
        assert rows.pick("a", [2, 1]) == [rows["a", 2], {}]
        assert rows.pick("c", [0]) == [{}]


@pytest.mark.parametrize("of_rows", [[], [0, 2], [0], [0, 1, 1], [-1, 0]])
def test_rows_without_a_group_are_refused(of_rows: list[int]) -> None:
    with pytest.raises(ValueError, match="2 rows of groups"):
        Rows(BlockHeader(["a", "b"], of_rows, [0, 1], []), [{}, {}])
