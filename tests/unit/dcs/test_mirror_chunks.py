"""How versions are cut into chunks and put together again; the spool that keeps them."""

import errno
import os

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.dcs.layout import DTYPE_BYTES, HostTensor, TensorSpec
from relax_hpc.dcs.mirror_chunks import (
    content_of,
    cut,
    decode_tensors,
    encode_chunk,
    max_encoded_bytes,
)
from relax_hpc.dcs.mirror_spool import Spool, SpoolKey
from relax_hpc.dcs.store import VersionId
from relax_hpc.errors import WeightSyncError

KEY = SpoolKey(VersionId(1, 7), 2**63 + 5, VersionId(1, 6), 99, 4096, 50)


@st.composite
def spec_lists(draw):
    shapes = st.lists(st.integers(0, 30), max_size=3).map(tuple)
    found = draw(st.lists(st.tuples(st.sampled_from(list(DTYPE_BYTES)), shapes), max_size=12))
    return [TensorSpec(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(found)]


def tensors_of(specs, rng, base=None, share=0.1):
    result = {}
    for spec in specs:
        data = rng.integers(0, 256, spec.nbytes, dtype=np.uint8)
        if base is not None:
            data = np.where(rng.random(spec.nbytes) < share, data, base[spec.name].data)
        result[spec.name] = HostTensor(spec.dtype, spec.shape, data)
    return result


@given(spec_lists(), st.sampled_from([8, 64, 1000, 4096]))
def test_chunks_hold_every_byte_once_in_order_with_whole_elements(specs, chunk_bytes):
    chunks = cut(specs, chunk_bytes)
    at = [0] * len(specs)
    for chunk in chunks:
        assert 0 < sum(s.stop - s.start for s in chunk) <= chunk_bytes
        for index, start, stop in chunk:
            width = DTYPE_BYTES[specs[index].dtype]
            assert start == at[index] < stop and start % width == stop % width == 0
            assert all(at[i] == spec.nbytes for i, spec in enumerate(specs[:index]))
            at[index] = stop
    assert at == [spec.nbytes for spec in specs]
    fill = [sum(s.stop - s.start for s in chunk) for chunk in chunks]
    assert all(nbytes > chunk_bytes - 8 for nbytes in fill[:-1]), "a chunk is filled up"


@given(spec_lists(), st.integers(0, 2**32), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_versions_come_back_bit_equal(specs, seed, has_base, deflate):
    rng = np.random.default_rng(seed)
    base = tensors_of(specs, rng) if has_base else None
    new = tensors_of(specs, rng, base)
    content, chunks = content_of(new), cut(specs, 512)
    assert content.specs == specs
    coded = [encode_chunk(specs, c, base, new, deflate=deflate) for c in chunks]
    assert all(len(x) <= max_encoded_bytes(c) for x, c in zip(coded, chunks, strict=True))
    found = {s.name: d for s, d in decode_tensors(content, chunks, coded.__getitem__, base)}
    assert list(found) == list(new)
    assert all(found[name].tobytes() == new[name].data.tobytes() for name in new)


@given(st.integers(0, 2**32), st.data())
@settings(max_examples=80)
def test_damaged_chunks_are_errors_that_name_the_tensor(seed, data):
    rng = np.random.default_rng(seed)
    specs = [TensorSpec("a", "bfloat16", (300,)), TensorSpec("b", "float32", (50,))]
    base = tensors_of(specs, rng)
    new = tensors_of(specs, rng, base, 0.03)
    content, chunks = content_of(new), cut(specs, 256)
    coded = [bytearray(encode_chunk(specs, c, base, new, deflate=True)) for c in chunks]
    victim = data.draw(st.integers(0, len(coded) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "longer", "other"]))
    if kind == "flip":
        at = data.draw(st.integers(0, len(coded[victim]) - 1))
        if at % 256 in (3,):  # a byte of the head that has no meaning
            return
        coded[victim][at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del coded[victim][data.draw(st.integers(0, len(coded[victim]) - 1)) :]
    elif kind == "longer":
        coded[victim] += b"\0"
    else:
        coded[victim] = coded[victim - 1]
    done = {}
    try:
        for spec, array in decode_tensors(content, chunks, coded.__getitem__, base):
            done[spec.name] = array
    except WeightSyncError:
        pass
    for name, array in done.items():
        assert array.tobytes() == new[name].data.tobytes()


def test_a_delta_without_its_base_is_an_error():
    specs = [TensorSpec("a", "bfloat16", (300,))]
    base = tensors_of(specs, np.random.default_rng(0))
    data = encode_chunk(specs, cut(specs, 4096)[0], base, base, deflate=True)
    with pytest.raises(WeightSyncError, match="a: a delta without a base"):
        list(decode_tensors(content_of(base), cut(specs, 4096), lambda _: data, None))


# -- spool ------------------------------------------------------------------------------------


def filled(folder, numbers=range(20)):
    folder.mkdir(exist_ok=True)
    spool, rng = Spool(folder), np.random.default_rng(0)
    spool.begin(KEY)
    for number in numbers:
        data = rng.integers(0, 256, 100 + 10 * number, dtype=np.uint8).tobytes()
        spool.add(number, xxhash.xxh3_64_intdigest(data), data)
    spool.leave()
    return folder / "chunks"


def numbers_in(folder):
    spool = Spool(folder)
    try:
        assert spool.load() in (KEY, None)
        if spool.key is None:
            return None
        here = set(range(KEY.num_chunks)) - set(spool.missing())
        for number in here:
            assert len(spool.read(number)) == 100 + 10 * number
        return here
    finally:
        spool.leave()


def test_a_spool_keeps_chunks_and_ignores_repeated_ones(tmp_path):
    filled(tmp_path / "s", [3, 1, 3, 2])
    assert numbers_in(tmp_path / "s") == {1, 2, 3}
    spool = Spool(tmp_path / "s")
    assert spool.load() == KEY
    spool.add(9, xxhash.xxh3_64_intdigest(b"x" * 190), b"x" * 190)
    spool.leave()
    assert numbers_in(tmp_path / "s") == {1, 2, 3, 9}


def test_a_torn_spool_loses_what_was_torn(tmp_path):
    path = filled(tmp_path / "s")
    whole = path.read_bytes()
    seen = set()
    for size in range(len(whole), 0, -37):
        path.write_bytes(whole[:size])
        here = numbers_in(tmp_path / "s")
        assert here is None or here == set(range(len(here)))
        seen.add(here is not None and len(here))
    assert seen == {False, *range(20)} | {20}


def test_flipped_bits_anywhere_are_seen(tmp_path):
    path = filled(tmp_path / "s")
    whole = path.read_bytes()
    for at in range(0, len(whole), 11):
        data = bytearray(whole)
        data[at] ^= 0x10
        path.write_bytes(data)
        here = numbers_in(tmp_path / "s")
        assert here is None or (len(here) < 20 and here == set(range(len(here))))


def test_records_in_any_order_and_twice_are_good(tmp_path):
    path = filled(tmp_path / "s")
    whole = path.read_bytes()
    starts = [i for i in range(len(whole)) if whole.startswith(b"CHNK", i)]
    ends = [*starts[1:], len(whole)]
    records = [whole[a:b] for a, b in zip(starts, ends, strict=True)]
    path.write_bytes(whole[: starts[0]] + b"".join([*records[::-1], records[4]]))
    assert numbers_in(tmp_path / "s") == set(range(20))


def test_what_the_disk_changes_while_it_is_used_is_an_error(tmp_path):
    path = filled(tmp_path / "s")
    spool = Spool(tmp_path / "s")
    spool.load()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightSyncError, match=r"chunk 19 in .* is damaged"):
        spool.read(19)
    spool.leave()


def test_a_full_disk_is_an_error_and_the_spool_stays_good(tmp_path, monkeypatch):
    (tmp_path / "s").mkdir()
    spool = Spool(tmp_path / "s")
    spool.begin(KEY)
    good = b"y" * 110
    spool.add(1, xxhash.xxh3_64_intdigest(good), good)
    write, calls = os.pwrite, []

    def fill_up(file, data, at):
        calls.append(at)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[: len(data) // 2], at)

    with monkeypatch.context() as patch:
        patch.setattr("relax_hpc.dcs.mirror_spool.os.pwrite", fill_up)
        with pytest.raises(WeightSyncError, match="No space left on device, 110 bytes"):
            spool.add(2, 0, b"z" * 120)
    spool.leave()
    assert numbers_in(tmp_path / "s") == {1}


def test_garbage_is_no_spool(tmp_path):
    path = filled(tmp_path / "s")
    rng = np.random.default_rng(0)
    for size in (0, 1, 19, 20, 21, 5000):
        path.write_bytes(rng.integers(0, 256, size, dtype=np.uint8).tobytes())
        assert numbers_in(tmp_path / "s") is None
        path.write_bytes(b"RLXSPL01" + b"\xff" * size)
        assert numbers_in(tmp_path / "s") is None
