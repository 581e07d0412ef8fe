"""Shards in shared memory: bit-exact, committed whole, checked, refused when wrong."""

import errno
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.dcs.assemble import Assembly, check_dtypes
from relax_hpc.dcs.layout import Box, TensorSpec, check_coverage
from relax_hpc.dcs.pull import plan_pull
from relax_hpc.dcs.store import VersionId, WeightStore, check_manifest, verify_piece
from relax_hpc.errors import WeightSyncError
from relax_hpc.runfolder import create_run_folder

V = VersionId(1, 7)


@pytest.fixture
def store(tmp_path):
    store = WeightStore(create_run_folder(tmp_path, "run"), "n01")
    yield store
    for version in store.versions():
        store.remove(version)
    if store.root.exists():
        store.root.rmdir()
        store.root.parent.rmdir()


def random_bytes(nbytes, seed):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def assemble(specs, shards):
    """Whole tensors of mapped shards."""
    plan = plan_pull(specs, [manifest for manifest, _ in shards])
    assembly = Assembly(plan, range(len(shards)))
    for number, (manifest, data) in enumerate(shards):
        assembly.view(number, manifest, data)
    return {box.name: tensor for box, tensor in zip(plan.wanted, assembly.tensors(), strict=True)}


def verify_shard(manifest, data):
    for piece in manifest.pieces:
        verify_piece(manifest, piece, data)


def cut(shape, axis, parts):
    """TP-like split of one axis into `parts` boxes; the last one may be smaller."""
    step = -(-shape[axis] // parts)
    for low in range(0, shape[axis], step):
        start, stop = [0] * len(shape), list(shape)
        start[axis], stop[axis] = low, min(low + step, shape[axis])
        yield tuple(start), tuple(stop)


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(["bfloat16", "float32"]),
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    parts=st.integers(1, 4),
    data=st.data(),
)
def test_assembly_of_tp_like_boxes_is_bit_exact(tmp_path_factory, dtype, shape, parts, data):
    store = WeightStore(create_run_folder(tmp_path_factory.mktemp("r"), "run"), "n01")
    axis = data.draw(st.integers(0, len(shape) - 1))
    torch = pytest.importorskip("torch")
    spec = TensorSpec("w", dtype, tuple(shape))
    whole = torch.from_numpy(random_bytes(spec.nbytes, seed=parts)).view(getattr(torch, dtype))
    whole = whole.reshape(shape)
    shards = []
    for rank, (start, stop) in enumerate(cut(tuple(shape), axis, parts)):
        box = Box("w", start, stop)
        piece = whole[box.slices].contiguous().view(torch.uint8).numpy()
        manifest = store.write_shard(V, rank, [(box, dtype, piece)])
        shards.append((manifest, store.map_shard(manifest)))
        verify_shard(*shards[-1])
    check_coverage([spec], {m.rank: [p.box for p in m.pieces] for m, _ in shards})
    tensor = assemble([spec], shards)["w"]
    assert (tensor.dtype, tensor.shape, tensor.data.dtype) == (dtype, tuple(shape), np.uint8)
    assert tensor.data.tobytes() == whole.view(torch.uint8).numpy().tobytes()
    back = torch.from_numpy(tensor.data.copy()).view(getattr(torch, dtype)).reshape(shape)
    assert torch.equal(back.view(torch.uint8), whole.view(torch.uint8))
    store.remove(V)
    store.root.rmdir()
    store.root.parent.rmdir()


def test_whole_pieces_are_mapped_not_copied_and_outlive_the_file(store):
    specs = [TensorSpec("a", "float32", (3, 5)), TensorSpec("s", "float32", ())]
    arrays = {"a": np.arange(15, dtype=np.float32).reshape(3, 5), "s": np.float32(2.5).reshape(())}
    manifest = store.write_shard(V, 0, [(s.whole(), s.dtype, arrays[s.name]) for s in specs])
    data = store.map_shard(manifest)
    tensors = assemble(specs, [(manifest, data)])
    assert np.shares_memory(tensors["a"].data, data)
    assert not tensors["a"].data.flags.writeable
    store.remove(V)
    assert tensors["a"].data.view(np.float32).tolist() == list(range(15))
    assert tensors["s"].data.view(np.float32).tolist() == [2.5]


def test_arrays_that_are_not_contiguous_keep_their_elements(store):
    spec = TensorSpec("a", "float32", (4, 3))
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    manifest = store.write_shard(V, 0, [(spec.whole(), "float32", array)])
    got = store.map_shard(manifest)[: spec.nbytes].view(np.float32).reshape(4, 3)
    assert np.array_equal(got, array)


def test_empty_pieces_and_empty_shards(store):
    empty, full = TensorSpec("e", "int64", (0, 4)), TensorSpec("f", "uint8", (3,))
    manifest = store.write_shard(
        V,
        0,
        [
            (full.whole(), "uint8", random_bytes(3, 1)),
            (empty.whole(), "int64", np.empty((0, 4), np.int64)),
        ],
    )
    check_manifest(manifest)
    tensors = assemble([empty, full], [(manifest, store.map_shard(manifest))])
    assert tensors["e"].data.size == 0
    nothing = store.write_shard(V, 1, [])
    assert store.map_shard(nothing).size == 0


def test_wrong_sizes_and_dtypes_commit_nothing(store):
    box = Box("w", (0,), (4,))
    with pytest.raises(WeightSyncError, match=r"need 8 bytes.*has 16"):
        store.write_shard(V, 0, [(box, "bfloat16", np.zeros(4, np.float32))])
    with pytest.raises(WeightSyncError, match="dtype 'bf16' is unknown"):
        store.write_shard(V, 0, [(box, "bf16", np.zeros(4, np.uint16))])
    assert list((store.root / V.folder_name).iterdir()) == []
    manifest = store.write_shard(V, 0, [(box, "float16", np.zeros(4, np.float16))])
    with pytest.raises(WeightSyncError, match=r"are float16.*tensor is bfloat16"):
        check_dtypes([TensorSpec("w", "bfloat16", (4,))], manifest)


def test_full_shared_memory_is_an_error_with_a_remedy(store, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightSyncError, match=r"GB are free.*give the node more"):
        store.write_shard(V, 0, [(Box("w", (0,), (4,)), "uint8", random_bytes(4, 0))])
    assert list((store.root / V.folder_name).iterdir()) == []


def test_one_flipped_byte_is_found_and_named(store):
    pieces = [
        (Box(n, (0,), (100,)), "uint8", random_bytes(100, i)) for i, n in enumerate(["a", "b"])
    ]
    manifest = store.write_shard(V, 0, pieces)
    verify_shard(manifest, store.map_shard(manifest))
    path = store.path(V, 0)
    content = bytearray(path.read_bytes())
    content[manifest.pieces[1].offset + 99] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightSyncError, match=r"weights b\[0:100\] of version 7 .* are corrupt"):
        verify_shard(manifest, store.map_shard(manifest))


def test_truncated_missing_and_lying_manifests_are_refused(store):
    manifest = store.write_shard(V, 0, [(Box("a", (0,), (100,)), "uint8", random_bytes(100, 0))])
    os.truncate(store.path(V, 0), 60)
    with pytest.raises(WeightSyncError, match="has 60 bytes, its manifest says 100"):
        store.map_shard(manifest)
    store.remove(V)
    store.remove(V)
    with pytest.raises(WeightSyncError, match=r"is not on node n01.*fetch the newest"):
        store.map_shard(manifest)
    lie = manifest.pieces[0].__class__(manifest.pieces[0].box, "uint8", 50, 100, 0)
    with pytest.raises(WeightSyncError, match="expected 100 within 100"):
        check_manifest(type(manifest)(version=V, rank=0, node="n01", nbytes=100, pieces=[lie]))


def test_newer_incarnation_wins_over_larger_version():
    assert VersionId(3, 40) > VersionId(2, 45) > VersionId(2, 44)


def test_versions_lists_folders_and_ignores_strangers(store):
    for version in (VersionId(2, 1), VersionId(1, 10), VersionId(1, 9)):
        store.write_shard(version, 0, [])
    (store.root / "notes").mkdir()
    assert store.versions() == [VersionId(1, 9), VersionId(1, 10), VersionId(2, 1)]
    (store.root / "notes").rmdir()


@pytest.mark.parametrize("pieces_before_the_kill", [0, 1, 3])
def test_kill_in_the_middle_of_a_shard_commits_nothing(store, tmp_path, pieces_before_the_kill):
    old = store.write_shard(V, 0, [(Box("w0", (0,), (10,)), "uint8", random_bytes(10, 0))])
    code = (
        "import sys, pathlib, time, numpy as np\n"
        "from relax_hpc.dcs.layout import Box\n"
        "from relax_hpc.dcs.store import VersionId, WeightStore\n"
        "from relax_hpc.runfolder import RunFolder\n"
        "def pieces():\n"
        "    for i in range(int(sys.argv[2])):\n"
        "        yield Box(f'w{i}', (0,), (1000,)), 'uint8', np.full(1000, i, np.uint8)\n"
        "    print('middle', flush=True)\n"
        "    time.sleep(60)\n"
        "store = WeightStore(RunFolder(pathlib.Path(sys.argv[1])), 'n01')\n"
        "store.write_shard(VersionId(1, 8), 0, pieces())\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run-1"), str(pieces_before_the_kill)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout.readline() == "middle\n"
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(timeout=30)
        child.stdout.close()
    new = VersionId(1, 8)
    assert new in store.versions()
    assert not store.path(new, 0).exists()
    verify_shard(old, store.map_shard(old))
    store.remove(new)
    assert store.versions() == [V]
