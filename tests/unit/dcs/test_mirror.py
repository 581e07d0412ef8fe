"""Weights across clusters: two weight services, real sockets and processes, a bad link, kills."""

import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from relax_hpc.dcs import mirror as mirror_module
from relax_hpc.dcs.client import WeightPublisher
from relax_hpc.dcs.layout import Box, TensorSpec
from relax_hpc.errors import DeadlineError, WeightSyncError
from relax_hpc.metrics.metric import read_metrics, series
from tests.link_proxy import FAULTS, Proxy

from .mirror_bed import (
    CHUNK,
    NBYTES,
    SPECS,
    changed,
    kill,
    random_weights,
    two_clusters,
    version,
    wait_until,
)

SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 20))]
DYING = Path(__file__).with_name("mirror_process.py")


@pytest.fixture
def bed(tmp_path):
    with two_clusters(tmp_path) as bed:
        yield bed


def test_versions_arrive_whole_then_as_deltas_between_processes(bed):
    weights = random_weights(0)
    bed.a.publish(3, weights)
    _, address = bed.serve()
    assert bed.follow(address).wait(60) == 0
    bed.b.check(version(3), weights)
    for number in (4, 7):
        weights = changed(weights, number)
        bed.a.publish(number, weights)
        assert bed.follow(address).wait(60) == 0
        bed.b.check(version(number), weights)
    whole, *deltas = bed.logged("received_share")
    assert 1 <= whole < 1.001
    assert len(deltas) == 2 and max(deltas) <= 0.06, deltas
    assert len(series(read_metrics(bed.b.run), "dcs/mirror_share")) == 3
    secret = bed.key_file.read_text().strip()
    assert secret not in bed.log("serve") + bed.log("follow")


def test_a_version_that_is_published_wakes_the_mirror_that_waits(bed):
    _, address = bed.serve()
    child = bed.follow(address, versions=2)
    weights = random_weights(0)
    bed.a.publish(0, weights)
    wait_until(lambda: bed.b.newest() == version(0), "version 0 in the other cluster")
    weights = changed(weights, 1)
    bed.a.publish(1, weights)
    assert child.wait(60) == 0
    bed.b.check(version(1), weights)


def test_nothing_newer_is_none_and_a_rollback_is_newer(bed):
    old, weights = random_weights(0), random_weights(1)
    bed.a.publish(9, old)
    mirror = bed.mirror(bed.source().address)
    assert mirror.pull(10) == version(9)
    assert mirror.pull(0.1) is None
    bed.a.publish(4, weights, incarnation=2)  # from a checkpoint
    assert mirror.pull(10) == version(4, incarnation=2)
    bed.b.check(version(4, incarnation=2), weights)


def test_a_source_without_news_is_no_silent_one(bed):
    mirror = bed.mirror(bed.source().address, patience_s=1.0)
    assert mirror.pull(3.0) is None
    bed.a.publish(0, random_weights(0))
    assert mirror.pull(10) == version(0)


def test_a_source_that_holds_two_models_is_enough_for_a_mirror(bed):
    weights = random_weights(0)
    bed.a.publish(0, weights)
    mirror = bed.mirror(bed.source(max_versions=2).address)
    mirror.pull(10)
    for number in range(1, 5):
        weights = changed(weights, number)
        bed.a.publish(number, weights)
        assert mirror.pull(10) == version(number)
        bed.b.check(version(number), weights)
    assert mirror.stats.full_versions == 1


def test_a_mirror_that_missed_versions_gets_the_newest_against_what_it_has(bed):
    weights = random_weights(0)
    bed.a.publish(0, weights)
    mirror = bed.mirror(bed.source().address)
    mirror.pull(10)
    for number in range(1, 6):
        weights = changed(weights, number, share=0.004)
        bed.a.publish(number, weights)
    wait_until(lambda: mirror.pull(1) == version(5), "version 5")  # the source may learn it late
    bed.b.check(version(5), weights)
    assert mirror.stats.full_versions == 1
    assert mirror.stats.kept_bytes < 1.06 * NBYTES


def test_shards_of_several_ranks_become_whole_tensors(bed):
    """The trainer publishes halves of rows; the delta is one of whole tensors all the same."""
    specs = [TensorSpec("w", "bfloat16", (64, 300))]
    weights = random_weights(0, specs)
    mirror = bed.mirror(bed.source().address)
    for number in (0, 1):
        words = weights["w"].view(np.uint16).reshape(64, 300)
        ranks = [
            threading.Thread(target=publish_rows, args=(bed.a, number, words, rank))
            for rank in (0, 1)
        ]
        for thread in ranks:
            thread.start()
        assert mirror.pull(20) == version(number)
        for thread in ranks:
            thread.join(30)
        bed.b.check(version(number), weights, specs)
        weights = changed(weights, 1, specs=specs)
    assert mirror.stats.full_versions == 1


def publish_rows(cluster, number, words, rank):
    rows = words[32 * rank : 32 * rank + 32]
    box = Box("w", (32 * rank, 0), (32 * rank + 32, 300))
    specs = [TensorSpec("w", "bfloat16", (64, 300))]
    publisher = WeightPublisher(cluster.me("train", rank=rank))
    publisher.publish(number, [(box, "bfloat16", rows)], specs, 2, rank, timeout_s=20)


def test_other_tensors_come_whole(bed):
    bed.a.publish(0, random_weights(0))
    mirror = bed.mirror(bed.source().address)
    mirror.pull(10)
    specs = [*SPECS[:-1], TensorSpec("lora", "float32", (64, 8))]
    weights = random_weights(1, specs)
    bed.a.publish(1, weights, specs=specs)
    assert mirror.pull(10) == version(1)
    bed.b.check(version(1), weights, specs)
    assert mirror.stats.full_versions == 2


# -- the link ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bad_link_costs_time_only(bed, seed, monkeypatch):
    """W5: dropped, repeated, reordered, cut and changed bytes; 20 ms; connections that stand."""
    monkeypatch.setattr("relax_hpc.dcs.mirror_stream._STALL_S", 0.5)
    rng = random.Random(seed)
    weights = random_weights(seed)
    bed.a.publish(0, weights)
    source = bed.source()
    with Proxy(source.address, delay_s=0.02) as proxy:
        for fault in FAULTS:
            proxy.at(rng.randrange(NBYTES), fault)
        mirror = bed.mirror(proxy.address)
        assert mirror.pull(30) == version(0)
        bed.b.check(version(0), weights)
        weights = changed(weights, seed)
        bed.a.publish(1, weights)
        for fault in FAULTS:
            proxy.at(rng.randrange(NBYTES // 25), fault)
        assert mirror.pull(30) == version(1)
        bed.b.check(version(1), weights)
        assert sorted(proxy.done) == sorted(FAULTS * 2)
    assert mirror.stats.full_versions == 1
    assert source.stats().get("end_internal", 0) == 0


def test_what_is_sent_again_after_a_break_is_a_chunk_for_each_stream(bed):
    weights = random_weights(0)
    bed.a.publish(0, weights)
    with Proxy(bed.source().address) as proxy:
        for at in (NBYTES // 3, NBYTES // 2):
            proxy.at(at, proxy.break_all)
        mirror = bed.mirror(proxy.address)
        assert mirror.pull(30) == version(0)
    bed.b.check(version(0), weights)
    stats = mirror.stats
    assert stats.breaks >= 2
    assert NBYTES <= stats.kept_bytes < 1.001 * NBYTES
    assert stats.received_bytes - stats.kept_bytes <= 2 * 3 * (CHUNK + 64)


def test_a_link_that_stays_cut_is_an_error_with_host_version_and_bytes(bed):
    bed.a.publish(0, random_weights(0))
    with Proxy(bed.source().address) as proxy:
        proxy.at(NBYTES // 2, lambda: setattr(proxy, "target", ("127.0.0.1", 1)))
        proxy.at(NBYTES // 2, proxy.break_all)
        mirror = bed.mirror(proxy.address, patience_s=3.0)
        expected = rf"version 0 .* 127.0.0.1:{proxy.address[1]}: nothing came for 3 s; \d{{6}}"
        with pytest.raises(DeadlineError, match=expected):
            mirror.pull(30)
        assert bed.b.newest() is None
        with pytest.raises(DeadlineError, match="a newer version from the mirror source"):
            mirror.pull(30)


def test_a_mirror_without_a_source_ends_with_the_code_for_try_again(bed):
    assert bed.follow(("127.0.0.1", 1), patience_s=0.3).wait(60) == 75
    assert "nothing came for 0.3 s" in bed.log()


# -- kills ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_mirrors_that_are_killed_go_on_where_they_were(bed, seed):
    """W1, W5: kill -9 at random bytes of a full version and of a delta."""
    rng = random.Random(seed)
    weights = random_weights(seed)
    _, address = bed.serve()
    with Proxy(address) as proxy:
        for number, nbytes in ((0, NBYTES), (1, NBYTES // 25)):
            bed.a.publish(number, weights)
            num_before = proxy.bytes_down
            for _ in range(2):
                child = bed.follow(proxy.address, streams=2)
                proxy.at(rng.randrange(nbytes // 4, nbytes // 3), child.kill)
                assert child.wait(60) == -signal.SIGKILL
                served = None if number == 0 else version(0)
                assert bed.b.newest() == served  # a half version is never served
            assert bed.follow(proxy.address).wait(60) == 0
            bed.b.check(version(number), weights)
            # Lost with each kill: what 2 streams had asked for ahead.
            assert proxy.bytes_down - num_before < 1.3 * nbytes + 2 * 2 * 8 * CHUNK
            weights = changed(weights, number)
    whole, delta = bed.logged("resumed_share")
    assert whole > 0.1 and delta > 0.004


@pytest.mark.parametrize("seed", SEEDS)
def test_sources_that_are_killed_are_found_again(bed, seed):
    rng = random.Random(seed)
    weights = random_weights(seed)
    sources = [bed.serve()]
    with Proxy(sources[0][1]) as proxy:

        def restart():
            kill(sources[-1][0])
            sources.append(bed.serve())
            proxy.target = sources[-1][1]

        for number, nbytes in ((0, NBYTES), (1, NBYTES // 25)):
            bed.a.publish(number, weights)
            proxy.at(rng.randrange(nbytes // 8, nbytes // 2), lambda: kill(sources[-1][0]))
            child = bed.follow(proxy.address)
            sources[-1][0].wait(60)
            restart()
            assert child.wait(60) == 0
            bed.b.check(version(number), weights)
            weights = changed(weights, number)
    whole, delta = bed.logged("received_share")
    assert whole < 1.2 and delta < 0.12, "it began anew"
    assert len(sources) == 3


@pytest.mark.parametrize("point", ["before_announce", "after_publish"])
def test_a_mirror_killed_between_apply_and_acknowledgement(bed, point):
    """W5: applied exactly once: either it is served and never fetched again, or it is not."""
    weights = random_weights(0)
    bed.a.publish(0, weights)
    source = bed.source()
    address = source.address
    assert bed.follow(address).wait(60) == 0
    weights = changed(weights, 1)
    bed.a.publish(1, weights)
    command = [sys.executable, str(DYING), point, str(bed.b.run.path), bed.b.node]
    command += [str(bed.key_file), str(address[1]), str(bed.spool)]
    assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGKILL
    sent = source.stats()["sent_bytes"]
    mirror = bed.mirror(address)
    found = mirror.pull(0.5)
    if point == "after_publish":
        assert found is None and bed.b.newest() == version(1)
    else:
        assert found == version(1)
        assert mirror.stats.resumed_bytes > 0
    assert source.stats()["sent_bytes"] == sent, "nothing is sent twice"
    bed.b.check(version(1), weights)
    weights = changed(weights, 2)
    bed.a.publish(2, weights)
    assert mirror.pull(10) == version(2)
    bed.b.check(version(2), weights)
    assert mirror.stats.full_versions == 0


# -- the chain of deltas ----------------------------------------------------------------------


def test_a_base_that_the_source_has_no_more_means_all_of_it(bed):
    weights = random_weights(0)
    bed.a.publish(0, weights)
    address = bed.source().address
    mirror = bed.mirror(address)
    mirror.pull(10)
    mirror.close()
    for number in range(1, 4):
        weights = changed(weights, number)
        bed.a.publish(number, weights)  # version 0 retires
    late = bed.mirror(bed.source().address)
    assert late.pull(10) == version(3)
    bed.b.check(version(3), weights)
    assert late.stats.full_versions == 1


def test_a_base_with_another_digest_means_all_of_it(bed):
    bed.a.publish(0, random_weights(0))
    bed.b.publish(0, random_weights(1))  # the same number, other weights
    weights = changed(random_weights(0), 0)
    mirror = bed.mirror(bed.source().address)
    assert mirror.pull(0.3) is None  # no newer one
    bed.a.publish(1, weights)
    assert mirror.pull(10) == version(1)
    bed.b.check(version(1), weights)
    assert mirror.stats.full_versions == 1


def test_a_base_that_is_damaged_here_means_all_of_it(bed):
    weights = random_weights(0)
    bed.a.publish(0, weights)
    address = bed.source().address
    mirror = bed.mirror(address)
    mirror.pull(10)
    mirror.close()
    path = bed.b.run.shm(bed.b.node) / "weights" / version(0).folder_name / "rank-0"
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    weights = changed(weights, 1)
    bed.a.publish(1, weights)
    again = bed.mirror(address)
    assert again.pull(10) == version(1)
    bed.b.check(version(1), weights)
    assert again.stats.full_versions == 1


def test_a_wrong_result_is_never_served_and_all_of_it_is_fetched(bed, monkeypatch):
    weights = random_weights(0)
    bed.a.publish(0, weights)
    mirror = bed.mirror(bed.source().address)
    mirror.pull(10)
    damaged = dict(mirror._base.tensors)
    data = damaged["mlp"].data.copy()
    data[17] ^= 1  # memory went bad behind the checksums
    damaged["mlp"] = damaged["mlp"]._replace(data=data)
    monkeypatch.setattr(
        mirror, "_base", mirror_module._Base(version(0), damaged, mirror._base.content)
    )
    weights = changed(weights, 1)
    bed.a.publish(1, weights)
    assert mirror.pull(10) == version(1)
    bed.b.check(version(1), weights)
    assert mirror.stats.full_versions == 2
    weights = changed(weights, 2)
    bed.a.publish(2, weights)
    assert mirror.pull(10) == version(2)  # deltas again
    assert mirror.stats.full_versions == 2


def test_a_version_that_the_engines_side_refuses_keeps_the_old_one_served(bed):
    old = random_weights(0)
    bed.a.publish(0, old)
    mirror = bed.mirror(bed.source().address)
    mirror.pull(10)
    bed.b.coordinator.table.withdraw(version(1), "for the test")
    bed.a.publish(1, changed(old, 1))
    with pytest.raises(WeightSyncError, match="withdrawn: for the test"):
        mirror.pull(10)
    bed.b.check(version(0), old)
    assert mirror.pull(0.3) is None, "it is not fetched again and again"
    weights = changed(old, 2)
    bed.a.publish(2, weights)
    assert mirror.pull(10) == version(2)
    bed.b.check(version(2), weights)


def test_two_mirrors_of_one_source_do_not_disturb_each_other(bed, tmp_path):
    (tmp_path / "other").mkdir()
    weights = random_weights(0)
    bed.a.publish(0, weights)
    source = bed.source()
    with two_clusters(tmp_path / "other") as other:
        other.key = bed.key
        mirrors = [bed.mirror(source.address), other.mirror(source.address)]
        for mirror in mirrors:
            assert mirror.pull(10) == version(0)
        weights = changed(weights, 1)
        bed.a.publish(1, weights)
        for mirror, each in zip(mirrors, (bed, other), strict=True):
            assert mirror.pull(10) == version(1)
            each.b.check(version(1), weights)
    assert source.stats()["delta_offers"] == 2


def test_a_spool_has_one_mirror(bed):
    bed.mirror(("127.0.0.1", 1))
    with pytest.raises(WeightSyncError, match="in use by another mirror"):
        bed.mirror(("127.0.0.1", 1))


def test_deltas_of_a_source_that_does_not_deflate(bed):
    weights = random_weights(0)
    bed.a.publish(0, weights)
    mirror = bed.mirror(bed.source(deflate=False).address)
    mirror.pull(10)
    weights = changed(weights, 1)
    bed.a.publish(1, weights)
    assert mirror.pull(10) == version(1)
    bed.b.check(version(1), weights)
    assert mirror.stats.kept_bytes < 1.06 * NBYTES


def test_the_tensors_of_this_file_have_every_width():
    widths = {spec.nbytes // spec.size for spec in SPECS if spec.size}
    assert widths == {1, 2, 4, 8} and np.prod(SPECS[2].shape) == 0
