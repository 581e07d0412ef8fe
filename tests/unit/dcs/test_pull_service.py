"""Fetches of boxes from other nodes: bytes on the wire, and everything that can go wrong there."""

import os
import random
import signal
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from relax_hpc.dcs import client, cuts
from relax_hpc.dcs.architectures import read_model
from relax_hpc.dcs.assemble import Assembly
from relax_hpc.dcs.cuts import CutRequest, CutServer
from relax_hpc.dcs.engine_layout import EngineParallel, engine_layout
from relax_hpc.dcs.layout import Box, TensorSpec
from relax_hpc.dcs.store import VersionId, WeightStore
from relax_hpc.dcs.trainer_layout import TrainerParallel, trainer_layout
from relax_hpc.errors import WeightSyncError
from relax_hpc.metrics.metric import read_metrics, series
from relax_hpc.transfer import tcp_stream
from relax_hpc.transfer.frames import MAX_TOLD_BYTES, FrameError
from relax_hpc.transfer.wire import DataAccess
from tests.stopping import stop
from tests.unit.dcs.pull_shards import make_shard, owned_boxes
from tests.unit.dcs.weight_run import kill, wait_until
from tests.unit.dcs.weight_shapes import CONFIGS, random_tensors
from tests.wire_proxy import WireProxy

ROWS = 1024
SPEC = TensorSpec("w", "bfloat16", (ROWS, 4096))  # 8 MiB: 32 parts
LEFT = Box("w", (0, 0), (ROWS, 1024))
V0 = VersionId(1, 0)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(cuts, "PART_BYTES", 256 << 10)


def matrix(seed):
    return np.random.default_rng(seed).integers(0, 2**16, SPEC.shape, dtype=np.uint16)


def publish(run, version, node="n01"):
    """One rank publishes all; returns the tensor."""
    whole = matrix(version)
    run.publisher(node).publish(version, [(SPEC.whole(), SPEC.dtype, whole)], [SPEC], 1, 0)
    return whole


def check(tensor, expected):
    assert tensor.data.tobytes() == expected.tobytes()


def wired(run, wires, node="n03", **more):
    """A subscriber that reaches each node through its wire."""

    def access(of, deadline, refresh):
        return DataAccess(*wires[of].address)

    return run.subscriber(node, access=access, **more)


class Middle:
    """Calls something once, when some bytes of a fetch have been placed and more are missing."""

    def __init__(self, monkeypatch, act, after=4):
        self._lock, self._left, self._act = threading.Lock(), after, act
        place = Assembly.place

        def placed(assembly, read, data):
            place(assembly, read, data)
            with self._lock:
                self._left -= 1
                if self._left == 0:
                    self._act()

        monkeypatch.setattr(Assembly, "place", placed)


# -- bytes ----------------------------------------------------------------------------------------


def publish_tp2_pp2(run):
    """A model from TP2 x PP2 on two nodes; returns its tensors."""
    config = CONFIGS["qwen3"] | {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64}
    model = read_model(config | {"vocab_size": 1000})
    layout = trainer_layout(model, TrainerParallel(tp=2, pp=2, vocab_multiple=128))
    tensors = random_tensors(model, 3)
    threads = []
    for rank, boxes in owned_boxes(layout, lambda ranks: ranks[:1]).items():
        pieces = [(box, "bfloat16", tensors[box.name][box.slices]) for box in boxes]
        publisher = run.publisher(f"n0{1 + rank // 2}", rank)
        arguments = (0, pieces, layout.specs, layout.num_ranks, rank)
        threads.append(threading.Thread(target=publisher.publish, args=arguments))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return model, tensors


def test_each_rank_of_tp4_pulls_its_boxes_and_nothing_else_travels(run):
    run.coordinator()
    servers = {node: run.agent(node) for node in ("n01", "n02")}
    model, tensors = publish_tp2_pp2(run)
    layout = engine_layout(model, EngineParallel(tp=4))
    for rank in range(4):
        boxes = layout.boxes_of(rank)
        minimum = sum(box.size * 2 for box in boxes)
        with (
            WireProxy(servers["n01"].data.address) as one,
            WireProxy(servers["n02"].data.address) as two,
        ):
            subscriber = wired(run, {"n01": one, "n02": two})
            found = subscriber.fetch(V0, boxes)
            on_the_wire = one.num_answered + two.num_answered
        assert list(found) == boxes
        for box, tensor in found.items():
            check(tensor, tensors[box.name][box.slices])
        assert minimum <= on_the_wire <= 1.02 * minimum
    sent = sum(agent.data.stats()["sent_bytes"] for agent in servers.values())
    assert sent == layout.rank_bytes.sum(), "payload is exactly what the ranks hold"
    # On a node with some of the shards only the others' bytes travel.
    of_one, boxes = servers["n01"].data.stats()["sent_bytes"], layout.boxes_of(1)
    for box, tensor in run.subscriber("n01").fetch(V0, boxes).items():
        check(tensor, tensors[box.name][box.slices])
    assert servers["n01"].data.stats()["sent_bytes"] == of_one
    assert servers["n02"].data.stats()["sent_bytes"] > sent - of_one
    largest = max(layout.rank_bytes) / 1e9
    for name in ("dcs/fetch_gb", "dcs/fetch_minimum_gb"):
        assert series(read_metrics(run.folder), name)[-1] == (0, pytest.approx(largest))


def test_a_piece_is_verified_by_its_source_once_a_version(run, monkeypatch):
    seen = []
    verify = cuts.verify_piece

    def counted(manifest, piece, data):
        seen.append((manifest.version.version, piece.box))
        verify(manifest, piece, data)

    monkeypatch.setattr(cuts, "verify_piece", counted)
    run.coordinator()
    run.agent("n01")
    for number in range(2):
        whole = publish(run, number)
        for index in range(2):
            found = run.subscriber("n03", index).fetch(VersionId(1, number), [LEFT])
            check(found[LEFT], whole[:, :1024])
    assert seen == [(0, SPEC.whole()), (1, SPEC.whole())]


# -- a source that dies, stops, comes back --------------------------------------------------------


def test_an_agent_killed_in_mid_fetch_and_restarted_is_read_to_the_end(run, monkeypatch):
    run.coordinator()
    agents = [run.agent_process("n01")]
    whole = publish(run, 0)

    def restart():
        kill(agents[0])
        agents.append(run.agent_process("n01", 2))

    Middle(monkeypatch, restart)
    check(run.subscriber("n03").fetch(V0, [LEFT])[LEFT], whole[:, :1024])
    assert len(agents) == 2


NAMED = (
    r"weights version 0 \(train incarnation 1\), shards of ranks 0 on node n01: not read within "
    r".* s: [1-9]\d* of 2097152 bytes came"
)


def test_an_agent_that_stays_dead_ends_the_fetch_and_the_next_one_is_whole(run, monkeypatch):
    run.coordinator()
    agent = run.agent_process("n01")
    whole = publish(run, 0)
    Middle(monkeypatch, lambda: kill(agent))
    subscriber = run.subscriber("n03", stall_s=2.0)
    with pytest.raises(WeightSyncError, match=NAMED):
        subscriber.fetch(V0, [LEFT])
    assert subscriber.wait_newer(None, 1) == V0, "silence is no proof that a version is lost"
    run.agent_process("n01", 2)
    check(subscriber.fetch(V0)["w"], whole)


def test_an_agent_that_stands_still_ends_the_fetch_and_the_next_one_is_whole(run, monkeypatch):
    run.coordinator()
    agent = run.agent_process("n01")
    whole = publish(run, 0)

    Middle(monkeypatch, lambda: stop(agent.pid))
    subscriber = run.subscriber("n03", stall_s=2.0)
    with pytest.raises(WeightSyncError, match=NAMED):
        subscriber.fetch(V0, [LEFT])
    # From its first word on, too: connections are open, nobody answers.
    with pytest.raises(WeightSyncError, match=r"0 of 8388608 bytes came"):
        subscriber.fetch(V0)
    os.kill(agent.pid, signal.SIGCONT)
    check(subscriber.fetch(V0)["w"], whole)


def test_the_default_deadlines_add_up_to_less_than_30_s():
    """Silence, then a look for a new address and a connection, then the release of the lease."""
    aside_s = max(tcp_stream._REFRESH_S, tcp_stream._CONNECT_S) + client._ASIDE_S
    assert client.STALL_S + aside_s < 30


def test_one_dead_source_does_not_keep_the_others_threads(run, monkeypatch):
    """Two sources, one is dead from the start: the error names it, and no thread goes on."""
    run.coordinator()
    run.agent("n01")
    publish(run, 0)
    dead = run.agent_process("n02")
    kill(dead)
    before = set(threading.enumerate())
    halves = [Box("w", (0, 0), (512, 4096)), Box("w", (512, 0), (1024, 4096))]
    whole = matrix(1)
    threads = [
        threading.Thread(
            target=run.publisher(node, rank).publish,
            args=(1, [(box, SPEC.dtype, whole[box.slices])], [SPEC], 2, rank),
        )
        for rank, (box, node) in enumerate(zip(halves, ("n01", "n02"), strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with pytest.raises(WeightSyncError, match=r"shards of ranks 1 on node n02: not read .* 0 of"):
        run.subscriber("n03", stall_s=1.5).fetch(VersionId(1, 1))
    left = [t for t in set(threading.enumerate()) - before if "data-questions" in t.name]
    assert not left


def test_a_stalled_reader_holds_up_neither_the_trainer_nor_others(run, monkeypatch):
    coordinator = run.coordinator()
    run.agent("n01")
    first = publish(run, 0)
    is_in_the_middle, may_go_on = threading.Event(), threading.Event()

    def stand_still():
        is_in_the_middle.set()
        assert may_go_on.wait(60)

    Middle(monkeypatch, stand_still)
    slow, found = run.subscriber("n03", 0), []
    reader = threading.Thread(target=lambda: found.append(slow.fetch(V0, [LEFT])))
    reader.start()
    assert is_in_the_middle.wait(60)
    monkeypatch.undo()
    last = [publish(run, number) for number in (1, 2, 3)][-1]
    quick = run.subscriber("n03", 1)
    check(quick.fetch(VersionId(1, 3))["w"], last)
    assert coordinator.table.newest == VersionId(1, 3)
    may_go_on.set()
    reader.join(60)
    check(found[0][LEFT], first[:, :1024])


# -- hurt bytes, wrong keys, retirement -----------------------------------------------------------


def test_a_byte_flipped_on_the_wire_is_read_again(run):
    run.coordinator()
    agent = run.agent("n01")
    whole = publish(run, 0)
    flipped = []

    def hurt(at, data):
        if at > 1_000_000 and len(data) > 20_000 and not flipped:
            flipped.append(at)
            return data[:10_000] + bytes([data[10_000] ^ 1]) + data[10_001:]
        return data

    with WireProxy(agent.data.address, hurt) as wire:
        subscriber = wired(run, {"n01": wire})
        check(subscriber.fetch(V0, [LEFT])[LEFT], whole[:, :1024])
    assert flipped
    (read,) = series(read_metrics(run.folder), "dcs/fetch_gb")
    (minimum,) = series(read_metrics(run.folder), "dcs/fetch_minimum_gb")
    assert minimum == (0, LEFT.size * 2 / 1e9)
    assert read[1] > minimum[1]


def test_a_wire_that_hurts_everything_is_an_error_and_the_version_is_still_served(run):
    run.coordinator()
    agent = run.agent("n01")
    whole = publish(run, 0)

    def hurt(at, data):
        return data if len(data) < 5000 else data[:3000] + bytes([data[3000] ^ 1]) + data[3001:]

    with (
        WireProxy(agent.data.address, hurt) as wire,
        pytest.raises(WeightSyncError, match=r"0 of 2097152 bytes"),
    ):
        wired(run, {"n01": wire}, stall_s=2.0).fetch(V0, [LEFT])
    check(run.subscriber("n03").fetch(V0)["w"], whole)


def test_a_byte_flipped_in_the_shard_is_found_by_its_source(run):
    run.coordinator()
    agent = run.agent("n01")
    whole = publish(run, 0)
    publish(run, 1)
    with run.store().path(VersionId(1, 1), 0).open("r+b") as file:
        file.seek(5_000_000)
        byte = file.read(1)[0]
        file.seek(5_000_000)
        file.write(bytes([byte ^ 0x40]))
    subscriber = run.subscriber("n03")
    with pytest.raises(
        WeightSyncError, match=r"weights w\[0:1024, 0:4096\] of version 1 .*corrupt"
    ):
        subscriber.fetch(VersionId(1, 1), [LEFT])
    assert "sent_bytes" not in agent.data.stats() or agent.data.stats()["sent_bytes"] == 0
    assert subscriber.wait_newer(None, 10) == V0, "it was withdrawn"
    check(subscriber.fetch(V0)["w"], whole)


def test_who_has_another_key_learns_nothing(run, monkeypatch):
    run.coordinator()
    agent = run.agent("n01")
    whole = publish(run, 0)
    with monkeypatch.context() as patch:
        patch.setattr(client, "data_key", lambda folder: b"q" * 32)
        stranger = run.subscriber("n03")
    with pytest.raises(WeightSyncError, match=r"did not prove this run's key"):
        stranger.fetch(V0)
    assert "sent_bytes" not in agent.data.stats()
    assert stranger.wait_newer(None, 1) == V0
    check(run.subscriber("n03").fetch(V0)["w"], whole)


def test_a_shard_that_retires_in_between_is_told_and_the_newest_is_whole(run, monkeypatch):
    run.coordinator()
    run.agent("n01")
    publish(run, 0)
    whole = publish(run, 1)
    Middle(monkeypatch, lambda: run.store().remove(V0))
    subscriber = run.subscriber("n03")
    with pytest.raises(WeightSyncError, match=r"rank 0 of version 0 .* is not on node n01.*newest"):
        subscriber.fetch(V0, [LEFT])
    assert subscriber.wait_newer(None, 10) == VersionId(1, 1)
    check(subscriber.fetch(VersionId(1, 1))["w"], whole)


def test_a_version_that_is_withdrawn_in_mid_fetch_is_not_loaded(run, monkeypatch):
    coordinator = run.coordinator()
    run.agent("n01")
    publish(run, 0)
    Middle(monkeypatch, lambda: coordinator.table.withdraw(V0, "test"))
    with pytest.raises(WeightSyncError, match="not served any more"):
        run.subscriber("n03", lease_s=0.0).fetch(V0, [LEFT])


def test_retired_shards_give_their_memory_back_though_they_were_served(run):
    run.coordinator()
    run.agent("n01")
    for number in range(4):
        publish(run, number)
        run.subscriber("n03").fetch(VersionId(1, number), [LEFT])
    kept = [VersionId(1, 2), VersionId(1, 3)]
    wait_until(lambda: run.store().versions() == kept, "retirement")

    def mapped():
        maps = Path("/proc/self/maps").read_text().splitlines()
        return [line for line in maps if str(run.store().root) in line and "(deleted)" in line]

    wait_until(lambda: not mapped(), "unmapping of retired shards")


# -- strangers and mistakes -----------------------------------------------------------------------


@pytest.fixture
def served(run):
    """A server of one shard, and a good request."""
    store = WeightStore(run.folder, "n01")
    whole = matrix(0)
    manifest = store.write_shard(V0, 0, [(SPEC.whole(), SPEC.dtype, whole)])
    return CutServer(store), CutRequest(manifest, [(0, (1, 2), (3, 9))]), whole


def test_a_request_is_answered_with_its_boxes(served):
    server, request, whole = served
    answer = server.answer(msgspec.msgpack.encode(request))
    assert bytes(answer) == whole[1:3, 2:9].tobytes()
    both = msgspec.structs.replace
    cuts_of = [(0, (1, 2), (3, 9)), (0, (0, 0), (0, 0)), (0, (5, 0), (6, 4096))]
    answer = server.answer(msgspec.msgpack.encode(both(request, cuts=cuts_of)))
    assert bytes(answer) == whole[1:3, 2:9].tobytes() + whole[5].tobytes()
    assert bytes(server.answer(msgspec.msgpack.encode(both(request, cuts=[])))) == b""


@pytest.mark.parametrize(
    "cut",
    [
        (1, (0, 0), (1, 1)),
        (-1, (0, 0), (1, 1)),
        (0, (0, 0), (1, 4097)),
        (0, (-1, 0), (1, 1)),
        (0, (2, 0), (1, 1)),
        (0, (0,), (1,)),
        (0, (0, 0), (1, 1, 1)),
    ],
)
def test_cuts_outside_of_their_piece_are_no_request(served, cut):
    server, request, _ = served
    with pytest.raises(FrameError, match="cut "):
        server.answer(msgspec.msgpack.encode(msgspec.structs.replace(request, cuts=[cut])))


def test_requests_of_nonsense_and_of_too_much(served):
    server, request, _ = served
    rng, good = random.Random(0), msgspec.msgpack.encode(request)
    for _ in range(300):
        bad = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        try:
            server.answer(bytes(bad))
        except (FrameError, WeightSyncError):
            continue
    (piece,) = request.shard.pieces
    for box in (Box("w", (ROWS, 4096), (0, 0)), Box("w", (0,), SPEC.shape)):
        odd = msgspec.structs.replace(piece, box=box)
        shard = msgspec.structs.replace(request.shard, pieces=[odd])
        with pytest.raises(FrameError):
            server.answer(msgspec.msgpack.encode(msgspec.structs.replace(request, shard=shard)))
    whole = [(0, (0, 0), SPEC.shape)] * (MAX_TOLD_BYTES // SPEC.nbytes + 1)
    with pytest.raises(FrameError, match="at most"):
        server.answer(msgspec.msgpack.encode(msgspec.structs.replace(request, cuts=whole)))


def test_a_manifest_that_lies_is_refused(served):
    server, request, _ = served
    (piece,) = request.shard.pieces
    lies = [
        msgspec.structs.replace(request.shard, pieces=[msgspec.structs.replace(piece, checksum=1)]),
        msgspec.structs.replace(request.shard, rank=7),
        msgspec.structs.replace(request.shard, nbytes=piece.nbytes + 64),
        make_shard(0, "n01", [SPEC.whole()], {"w": matrix(5)})[0],
    ]
    for lie in lies:
        with pytest.raises(WeightSyncError, match=r"corrupt|is not on node|has \d+ bytes"):
            server.answer(msgspec.msgpack.encode(msgspec.structs.replace(request, shard=lie)))
