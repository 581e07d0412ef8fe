"""What a reader pulls: each wanted byte once, the right bits, near before far, balanced."""

import itertools
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.dcs.architectures import read_model
from relax_hpc.dcs.assemble import Assembly, piece_part
from relax_hpc.dcs.engine_layout import engine_layout
from relax_hpc.dcs.layout import Box, TensorSpec
from relax_hpc.dcs.pull import cut_box, plan_pull
from relax_hpc.dcs.trainer_layout import TrainerParallel, trainer_layout
from relax_hpc.errors import WeightSyncError
from tests.unit.dcs.pull_shards import make_shard, owned_boxes
from tests.unit.dcs.weight_shapes import (
    CONFIGS,
    config_strategy,
    engine_strategy,
    random_tensors,
    trainer_strategy,
)

DTYPES = {"uint8": np.uint8, "bfloat16": np.uint16, "float32": np.uint32, "int64": np.uint64}


def carry_out(plan, shards, mapped):
    """Fill the wanted boxes: some shards are mapped, the bytes of the others come in pieces."""
    assembly = Assembly(plan, mapped)
    for number, (manifest, data) in enumerate(shards):
        if number in mapped:
            assembly.view(number, manifest, data)
            continue
        for read in plan.reads[number]:
            for box in cut_box(read.box, 2, 100):
                part = np.ascontiguousarray(piece_part(manifest.pieces[read.piece], data, box))
                assembly.place(read._replace(box=box), part.reshape(-1).view(np.uint8))
    return dict(zip(plan.wanted, assembly.tensors(), strict=True))


def check_exact(plan, shards, tensors, mapped=()):
    """The oracle: counts of elements, and slices of the whole tensors."""
    wanted = {name: np.zeros(array.shape, int) for name, array in tensors.items()}
    times = {name: np.zeros(array.shape, int) for name, array in tensors.items()}
    for box in plan.wanted:
        wanted[box.name][box.slices] = 1
    for (manifest, _), reads in zip(shards, plan.reads, strict=True):
        for read in reads:
            held = manifest.pieces[read.piece].box
            for a, lo, hi, b in zip(read.box.start, held.start, held.stop, read.box.stop):  # noqa: B905
                assert lo <= a < b <= hi
            times[read.box.name][read.box.slices] += 1
    nbytes = 0
    for name, counted in wanted.items():
        assert np.array_equal(counted, times[name]), name
        nbytes += int(counted.sum()) * tensors[name].itemsize
    assert plan.minimum_bytes == sum(plan.shard_bytes) == nbytes
    found = carry_out(plan, shards, mapped)
    assert list(found) == list(plan.wanted)
    for box, tensor in found.items():
        part = tensors[box.name][box.slices]
        assert tensor.shape == part.shape and tensor.data.dtype == np.uint8
        assert tensor.data.tobytes() == part.tobytes() and not tensor.data.flags.writeable


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_engine_rank_pulls_its_boxes_from_any_trainer(data):
    model = read_model(data.draw(config_strategy(max_layers=3)))
    trainer = trainer_layout(model, data.draw(trainer_strategy(model, max_dp=2)))
    engine = engine_layout(model, data.draw(engine_strategy(model, max_engines=1)))
    is_shared = data.draw(st.booleans())  # all replicas publish, or one
    seed = data.draw(st.integers(0, 99))
    published = owned_boxes(trainer, lambda r: r if is_shared else [r[seed % len(r)]])
    tensors = random_tensors(model, seed)
    nodes = data.draw(st.integers(1, 4))
    shards = [
        make_shard(rank, f"n{rank * nodes // trainer.num_ranks}", boxes, tensors)
        for rank, boxes in published.items()
    ]
    manifests = [manifest for manifest, _ in shards]
    boxes = engine.boxes_of(data.draw(st.integers(0, engine.num_ranks - 1)))
    plan = plan_pull(
        engine.specs, manifests, boxes,
        distance=lambda node: int(node != "n0"), reader=seed, unit_bytes=64,
    )  # fmt: skip
    mapped = [i for i, manifest in enumerate(manifests) if manifest.node == "n0"]
    check_exact(plan, shards, tensors, mapped)
    far_names = {
        read.box.name for i, reads in enumerate(plan.reads) if i not in mapped for read in reads
    }
    for i in mapped:  # what is near is never read from afar
        for piece in manifests[i].pieces:
            if piece.box.name in far_names:
                for j, reads in enumerate(plan.reads):
                    if j not in mapped:
                        assert not any(overlap(piece.box, read.box) for read in reads)


def overlap(one, other):
    return one.name == other.name and all(
        max(a, c) < min(b, d)
        for a, b, c, d in zip(one.start, one.stop, other.start, other.stop, strict=True)
    )


@st.composite
def boxes_of(draw, spec):
    start, stop = [], []
    for length in spec.shape:
        a, b = sorted((draw(st.integers(0, length)), draw(st.integers(0, length))))
        start.append(a)
        stop.append(b)
    return Box(spec.name, tuple(start), tuple(stop))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_boxes_of_any_pieces(data):
    """Wanted boxes that repeat and overlap, scalars and empty ones, pieces that overlap."""
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    specs, tensors, pieces = [], {}, {0: [], 1: [], 2: []}
    for number in range(data.draw(st.integers(1, 3))):
        shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=3)))
        spec = TensorSpec(f"t{number}", dtype, shape)
        specs.append(spec)
        words = DTYPES[dtype]
        array = np.arange(int(np.prod(shape)), dtype=np.uint64).astype(words) * words(3)
        tensors[spec.name] = array.reshape(shape)
        pieces[data.draw(st.integers(0, 2))].append(spec.whole())
        for _ in range(data.draw(st.integers(0, 3))):
            pieces[data.draw(st.integers(0, 2))].append(data.draw(boxes_of(spec)))
    wanted = data.draw(st.lists(st.sampled_from(specs).flatmap(boxes_of), max_size=6))
    shards = [make_shard(i, f"n{i}", pieces[i], tensors, dtype) for i in range(3)]
    manifests = [manifest for manifest, _ in shards]
    unit_bytes = data.draw(st.sampled_from([1, 16, 1 << 20]))
    plan = plan_pull(specs, manifests, wanted, distance=lambda n: n == "n2", unit_bytes=unit_bytes)
    mapped = data.draw(st.sets(st.integers(0, 2)))
    check_exact(plan, shards, tensors, mapped)
    check_exact(plan_pull(specs, manifests), shards, tensors, mapped)


def test_replicas_share_a_pull_by_bytes():
    """Ranks that hold the same boxes give the same bytes, to within one unit."""
    model = read_model(CONFIGS["qwen3"])
    trainer = trainer_layout(model, TrainerParallel(tp=2, pp=2, dp=4, vocab_multiple=4))
    tensors = random_tensors(model, 0)
    held = {rank: tuple(trainer.boxes_of(rank)) for rank in range(trainer.num_ranks)}
    manifests = [make_shard(rank, "n0", boxes, tensors)[0] for rank, boxes in held.items()]
    for reader in range(5):
        plan = plan_pull(trainer.specs, manifests, reader=reader, unit_bytes=256)
        for boxes in set(held.values()):
            loads = [plan.shard_bytes[rank] for rank, own in held.items() if own == boxes]
            assert len(loads) == 4 and max(loads) - min(loads) <= 256
    assert plan.reads == plan_pull(trainer.specs, manifests, reader=4, unit_bytes=256).reads
    other = plan_pull(trainer.specs, manifests, reader=5, unit_bytes=256)
    assert plan.reads != other.reads, "readers begin at different replicas"


def test_what_covers_a_box_on_this_node_is_viewed_not_copied():
    spec = TensorSpec("w", "bfloat16", (8, 6))
    tensors = {"w": np.arange(48, dtype=np.uint16).reshape(8, 6)}
    (manifest, data) = shard = make_shard(0, "n0", [spec.whole()], tensors)
    boxes = [Box("w", (2, 0), (5, 6)), Box("w", (0, 2), (2, 4)), Box("w", (6, 1), (8, 2))]
    plan = plan_pull([spec], [manifest], boxes)
    found = carry_out(plan, [shard], [0])
    for box in boxes:
        assert np.shares_memory(found[box].data, data), box
    assert found[boxes[0]].data.shape == (36,)
    torch = pytest.importorskip("torch")
    for box in boxes:  # as HostTensor says
        view = torch.from_numpy(found[box].data.copy()).view(torch.bfloat16).reshape(box.shape)
        expected = torch.from_numpy(tensors["w"][box.slices].copy()).view(torch.bfloat16)
        assert torch.equal(view.view(torch.uint8), expected.view(torch.uint8))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            strided = torch.from_numpy(found[box].data)
        strided = strided.view(torch.bfloat16).reshape(box.shape)
        assert strided.data_ptr() == found[box].data.ctypes.data, "no copy in torch either"


@pytest.mark.parametrize(
    ("box", "match"),
    [
        (Box("x", (0,), (1,)), r"x\[0:1\] are wanted, but the trainer publishes no tensor 'x'"),
        (Box("w", (0, 0), (5, 7)), r"w\[0:5, 0:7\] are wanted, which is outside .*\[4, 7\]"),
        (Box("w", (0,), (4,)), "outside of the tensor's shape"),
        (Box("w", (3, 0), (2, 7)), "outside of the tensor's shape"),
        (Box("w", (1, 2), (3, 6)), r"weights w\[2:3, 2:6\] are wanted, but no shard holds them"),
    ],
)
def test_what_nobody_has_is_named(box, match):
    spec = TensorSpec("w", "uint8", (4, 7))
    tensors = {"w": np.zeros((4, 7), np.uint8)}
    manifest, _ = make_shard(0, "n0", [Box("w", (0, 0), (2, 7))], tensors, "uint8")
    with pytest.raises(WeightSyncError, match=match):
        plan_pull([spec], [manifest], [box])


@settings(max_examples=100, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), max_size=4),
    element_bytes=st.sampled_from([1, 2, 4]),
    max_bytes=st.integers(1, 200),
)
def test_cuts_of_a_box_are_whole_in_order_and_small(shape, element_bytes, max_bytes):
    box = Box("w", (0,) * len(shape), tuple(shape))
    numbers = np.arange(box.size).reshape(shape)
    cuts = list(cut_box(box, element_bytes, max_bytes))
    seen = list(itertools.chain.from_iterable(numbers[cut.slices].reshape(-1) for cut in cuts))
    assert seen == list(range(box.size))
    assert all(cut.size * element_bytes <= max(max_bytes, element_bytes) for cut in cuts)
