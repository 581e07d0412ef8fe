"""The weight service with real sockets, shared memory and kills."""

import logging
import threading

import numpy as np
import pytest

from relax_hpc.dcs.client import WeightPublisher, WeightSubscriber
from relax_hpc.dcs.layout import Box, TensorSpec
from relax_hpc.dcs.store import VersionId
from relax_hpc.errors import ControlError, RelaxError, StaleIncarnationError, WeightSyncError
from relax_hpc.metrics.metric import read_metrics, series
from tests.unit.dcs.weight_run import kill, wait_until

SPECS = [TensorSpec("a", "bfloat16", (8, 6)), TensorSpec("b", "float32", (5,))]


def random_weights(seed):
    generator = np.random.default_rng(seed)
    return {s.name: generator.integers(0, 256, s.nbytes, dtype=np.uint8) for s in SPECS}


def tp_pieces(weights, rank):
    """Tensor a is split over two ranks by columns, b is held by rank 1."""
    a = weights["a"].view(np.uint16).reshape(8, 6)[:, 3 * rank : 3 * rank + 3]
    yield Box("a", (0, 3 * rank), (8, 3 * rank + 3)), "bfloat16", a
    if rank == 1:
        yield Box("b", (0,), (5,)), "float32", weights["b"]


def publish_tp2(run, version, weights, incarnation=1, nodes=("n01", "n02")):
    """Publish from two ranks at once, as two processes of the train step do."""
    failures = []

    def publish(rank):
        try:
            publisher = run.publisher(nodes[rank], rank, incarnation)
            publisher.publish(version, tp_pieces(weights, rank), SPECS, 2, rank, timeout_s=30)
        except RelaxError as err:
            failures.append(err)

    threads = [threading.Thread(target=publish, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failures:
        raise failures[0]
    return VersionId(incarnation, version)


def check_equal(tensors, weights):
    assert {name: (t.dtype, t.shape) for name, t in tensors.items()} == {
        s.name: (s.dtype, s.shape) for s in SPECS
    }
    for name, data in weights.items():
        assert tensors[name].data.tobytes() == data.tobytes()
        assert not tensors[name].data.flags.writeable


def test_local_remote_and_mixed_reads_are_equal_to_what_was_published(run):
    run.coordinator()
    for node in ("n01", "n02"):
        run.agent(node)
    for number, nodes in enumerate([("n01", "n01"), ("n02", "n02"), ("n01", "n02")]):
        weights = random_weights(number)
        version = publish_tp2(run, number, weights, nodes=nodes)
        for node in ("n01", "n02"):
            subscriber = run.subscriber(node)
            assert subscriber.wait_newer(None, 10) == version
            check_equal(subscriber.fetch(version), weights)


def test_far_read_of_many_parts(run, monkeypatch):
    monkeypatch.setattr("relax_hpc.dcs.cuts.PART_BYTES", 100)
    run.coordinator()
    run.agent("n01")
    spec = TensorSpec("w", "uint8", (1050,))
    data = np.random.default_rng(0).integers(0, 256, 1050, dtype=np.uint8)
    run.publisher().publish(0, [(spec.whole(), "uint8", data)], [spec], 1, 0)
    tensor = run.subscriber("n02", lease_s=0.0).fetch(VersionId(1, 0))["w"]  # renews at every look
    assert tensor.data.tobytes() == data.tobytes()


def test_wait_newer_wakes_on_commit_and_ends_at_its_deadline(run):
    run.coordinator()
    subscriber = run.subscriber()
    assert subscriber.wait_newer(None, 0.1) is None
    found = []
    waiter = threading.Thread(target=lambda: found.append(subscriber.wait_newer(None, 60)))
    waiter.start()
    version = publish_tp2(run, 0, random_weights(0))
    waiter.join(30)
    assert found == [version]
    assert subscriber.wait_newer(version, 0.1) is None


@pytest.mark.parametrize(("rank1", "match"), [(0, "held twice"), (None, "held by no shard")])
def test_every_rank_learns_why_a_version_was_refused(run, rank1, match):
    run.coordinator()
    old = random_weights(0)
    version = publish_tp2(run, 0, old)
    failures = {}

    def publish(rank, pieces):
        try:
            run.publisher(rank=rank).publish(1, pieces, SPECS, 2, rank, timeout_s=30)
        except WeightSyncError as err:
            failures[rank] = str(err)

    weights = random_weights(1)
    wrong = list(tp_pieces(weights, 1))[1:]
    if rank1 is not None:
        wrong += tp_pieces(weights, rank1)
    threads = [
        threading.Thread(target=publish, args=args)
        for args in [(0, list(tp_pieces(weights, 0))), (1, wrong)]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(failures) == {0, 1}
    assert all(match in message and "a[0:8" in message for message in failures.values())
    assert run.subscriber().wait_newer(version, 0.1) is None
    run.agent("n01")
    run.agent("n02")
    check_equal(run.subscriber().fetch(version), old)


def test_missing_rank_is_named_at_the_deadline(run):
    run.coordinator()
    with pytest.raises(WeightSyncError, match=r"shards of ranks \[1\] of 2 did not come"):
        run.publisher().publish(0, tp_pieces(random_weights(0), 0), SPECS, 2, 0, timeout_s=0.3)


def test_ranks_wait_for_each_other_in_the_meeting_with_their_shards_announced(run):
    coordinator = run.coordinator()
    number, seen = VersionId(1, 0), []

    def peer_is_dead():
        seen.append(coordinator.table.missing_ranks(number))
        raise RuntimeError("Connection closed by peer")

    pieces = tp_pieces(random_weights(0), 0)
    with pytest.raises(RuntimeError, match="closed by peer"):
        run.publisher().publish(0, pieces, SPECS, 2, 0, peer_is_dead)
    assert seen == [[1]]
    # The train step that starts next publishes; nobody was ever told of the half version.
    weights = random_weights(1)
    assert publish_tp2(run, 0, weights, incarnation=2) == VersionId(2, 0)
    assert run.subscriber().wait_newer(None, 10) == VersionId(2, 0)


def test_kill_of_a_publisher_in_the_middle_leaves_the_old_version_served(run):
    run.coordinator()
    run.agent("n01")
    first = run.process("publisher", "5", "-1")
    assert first.wait(timeout=60) == 0
    killed = run.process("publisher", "6", "2")
    assert killed.stdout.readline() == "middle\n"
    kill(killed)
    subscriber = run.subscriber("n02")
    assert subscriber.wait_newer(None, 10) == VersionId(1, 5)
    tensors = subscriber.fetch(VersionId(1, 5))
    assert tensors["w3"].data.view(np.float32).tolist() == [5 + 3 / 8] * 100
    assert VersionId(1, 6) in run.store().versions()  # what the kill left
    again = WeightPublisher(run.me("train", "n01", incarnation=2))
    spec = TensorSpec("w0", "float32", (1,))
    again.publish(5, [(spec.whole(), "float32", np.zeros(1, np.float32))], [spec], 1, 0)
    wait_until(lambda: run.store().versions() == [VersionId(2, 5)], "cleaning of incarnation 1")


def test_restarted_coordinator_serves_what_it_had_and_pending_ranks_go_on(run):
    run.agent("n01")
    run.agent("n02")
    first = run.process("coordinator", "1", "1")
    assert first.stdout.readline() == "serving\n"
    old, new = random_weights(0), random_weights(1)
    version = publish_tp2(run, 0, old)
    done = []
    rank0 = threading.Thread(
        target=lambda: done.append(
            run.publisher("n01", 0).publish(1, tp_pieces(new, 0), SPECS, 2, 0, timeout_s=60)
        )
    )
    rank0.start()  # its announcement waits for rank 1 when the coordinator dies
    wait_until(lambda: run.store("n01").path(VersionId(1, 1), 0).exists(), "rank 0's shard")
    kill(first)
    second = run.process("coordinator", "1", "2")
    assert second.stdout.readline() == "serving\n"
    subscriber = run.subscriber("n02")
    assert subscriber.wait_newer(None, 30) == version
    check_equal(subscriber.fetch(version), old)
    run.publisher("n02", 1).publish(1, tp_pieces(new, 1), SPECS, 2, 1, timeout_s=60)
    rank0.join(60)
    assert done == [VersionId(1, 1)]
    assert subscriber.wait_newer(version, 10) == VersionId(1, 1)
    check_equal(subscriber.fetch(VersionId(1, 1)), new)


def test_new_attempt_forgets_the_versions_of_the_old_one(run):
    first = run.process("coordinator", "1", "1")
    assert first.stdout.readline() == "serving\n"
    publish_tp2(run, 3, random_weights(0))
    kill(first)
    second = run.process("coordinator", "2", "2")
    assert second.stdout.readline() == "serving\n"
    late = WeightSubscriber(run.me("rollout", "n01", attempt=2, incarnation=2))
    assert late.wait_newer(None, 0.2) is None


def test_retention_keeps_two_and_never_takes_a_leased_version(run):
    coordinator = run.coordinator()
    run.agent("n01")
    publisher = run.publisher()
    spec = TensorSpec("w", "float32", (4,))

    def publish(number):
        array = np.full(4, number, np.float32)
        publisher.publish(number, [(spec.whole(), "float32", array)], [spec], 1, 0)

    publish(0)
    coordinator.table.acquire(VersionId(1, 0), "rollout/0.1:slow")
    for number in range(1, 5):
        publish(number)
    kept = [VersionId(1, number) for number in (0, 3, 4)]
    wait_until(lambda: run.store().versions() == kept, "retirement of 1 and 2")
    tensors = run.subscriber().fetch(VersionId(1, 0))
    assert tensors["w"].data.view(np.float32).tolist() == [0.0] * 4
    with pytest.raises(WeightSyncError, match="not served any more"):
        run.subscriber().fetch(VersionId(1, 1))
    # The reader comes back as a new incarnation: its old lease ends.
    WeightSubscriber(run.me("rollout", "n01", incarnation=2)).wait_newer(None, 1)
    publish(5)
    wait_until(lambda: run.store().versions() == [VersionId(1, 4), VersionId(1, 5)], "the rest")
    assert tensors["w"].data.view(np.float32).tolist() == [0.0] * 4  # the mapping outlives it


def test_rollback_serves_the_newer_incarnation(run):
    run.coordinator()
    run.agent("n01")
    run.agent("n02")
    publish_tp2(run, 45, random_weights(45))
    subscriber = run.subscriber()
    have = subscriber.wait_newer(None, 10)
    rolled_back = publish_tp2(run, 40, random_weights(40), incarnation=2)
    assert subscriber.wait_newer(have, 10) == rolled_back == VersionId(2, 40)
    check_equal(subscriber.fetch(rolled_back), random_weights(40))
    with pytest.raises(StaleIncarnationError):
        publish_tp2(run, 46, random_weights(46), incarnation=1)
    wait_until(lambda: run.store().versions()[0] == rolled_back, "cleaning of incarnation 1")


@pytest.mark.parametrize("reader", ["n01", "n02"])
def test_one_corrupt_byte_is_detected_and_the_version_withdrawn(run, reader, caplog):
    run.coordinator()
    run.agent("n01")
    good = random_weights(0)
    old = publish_tp2(run, 0, good, nodes=("n01", "n01"))
    bad = publish_tp2(run, 1, random_weights(1), nodes=("n01", "n01"))
    path = run.store().path(bad, 1)
    with path.open("r+b") as file:
        file.seek(10)
        byte = file.read(1)[0]
        file.seek(10)
        file.write(bytes([byte ^ 0x40]))
    subscriber = run.subscriber(reader)
    with pytest.raises(WeightSyncError, match=r"weights a\[0:8, 3:6\] .*corrupt"):
        subscriber.fetch(bad)
    assert "weights withdrawn" in caplog.text
    assert subscriber.wait_newer(None, 10) == old
    check_equal(subscriber.fetch(old), good)
    assert subscriber.wait_newer(old, 0.1) is None


@pytest.mark.parametrize("reader", ["n01", "n02"])
def test_vanished_shard_is_a_weight_sync_error(run, reader):
    run.coordinator()
    run.agent("n01")
    version = publish_tp2(run, 0, random_weights(0), nodes=("n01", "n01"))
    run.store().path(version, 0).unlink()
    with pytest.raises(WeightSyncError, match="newest version"):
        run.subscriber(reader).fetch(version)
    assert run.subscriber(reader).wait_newer(None, 0.1) is None


def test_unchanged_policy_raises_an_alarm_and_a_restart_does_not(run, caplog):
    caplog.set_level(logging.WARNING)
    run.coordinator()
    same = random_weights(0)
    publish_tp2(run, 0, same)
    publish_tp2(run, 0, same, incarnation=2)  # restarted from version 0: must be equal
    assert "policy unchanged" not in caplog.text
    publish_tp2(run, 1, same, incarnation=2)
    assert "policy unchanged" in caplog.text
    publish_tp2(run, 2, random_weights(2), incarnation=2)
    alarms = series(read_metrics(run.folder), "dcs/unchanged_policy")
    assert alarms == [(0, 0.0), (1, 1.0), (2, 0.0)]


def test_fetch_and_write_times_are_metrics(run):
    run.coordinator()
    run.agent("n02")
    version = publish_tp2(run, 3, random_weights(0))
    run.subscriber().fetch(version)
    names = {name for record in read_metrics(run.folder) for name in record.metrics}
    assert {"dcs/fetch_s_max", "dcs/write_s_max", "dcs/weights_gb"} <= names
    for name in ("dcs/fetch_gb", "dcs/fetch_minimum_gb"):
        assert series(read_metrics(run.folder), name) == [(3, sum(s.nbytes for s in SPECS) / 1e9)]


def test_publishing_for_another_incarnation_is_refused(run):
    run.coordinator()
    publisher = run.publisher(incarnation=1)
    manifest = run.store().write_shard(VersionId(9, 0), 0, tp_pieces(random_weights(0), 1))
    publisher._store.write_shard = lambda *_: manifest
    with pytest.raises(WeightSyncError, match="publishes its own versions only"):
        publisher.publish(0, [], SPECS, 1, 0)


def test_garbage_requests_change_nothing(run):
    run.coordinator()
    publish_tp2(run, 0, random_weights(0))
    publisher = run.publisher()
    from relax_hpc.control.rpc import Empty

    for method in ("announce", "sweep", "acquire", "lost", "release", "no such thing"):
        with pytest.raises(ControlError):
            publisher._rpc.call(method, Empty(), Empty, timeout_s=10, why="garbage")
    assert run.subscriber().wait_newer(None, 1) == VersionId(1, 0)
