"""Bookkeeping of versions: atomic, retention, leases, rollback, garbage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.dcs.layout import Box, TensorSpec
from relax_hpc.dcs.store import Piece, ShardManifest, VersionId
from relax_hpc.dcs.versions import VersionTable
from relax_hpc.errors import StaleIncarnationError, WeightSyncError

SPECS = [TensorSpec("w", "float32", (8, 2))]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def shard(version, rank, rows, checksum=1, node="n01"):
    box = Box("w", (rows[0], 0), (rows[1], 2))
    piece = Piece(box, "float32", 0, box.size * 4, checksum)
    return ShardManifest(version=version, rank=rank, node=node, nbytes=64, pieces=[piece])


def table(keep=2, clock=None):
    return VersionTable(attempt=1, keep=keep, lease_s=10.0, clock=clock or Clock())


def publish(t, incarnation, version, checksum=1):
    """Publish a version of one shard; returns the retired ones."""
    return t.commit(
        t.announce(shard(VersionId(incarnation, version), 0, (0, 8), checksum), 1, SPECS)
    )


def test_version_is_served_only_when_all_shards_came():
    t, version = table(), VersionId(1, 0)
    assert t.announce(shard(version, 1, (4, 8)), 2, SPECS) is None
    assert t.newest is None
    assert not t.is_settled(version)
    assert t.missing_ranks(version) == [0]
    assert t.announce(shard(version, 1, (4, 8)), 2, SPECS) is None  # a repeated message
    whole = t.announce(shard(version, 0, (0, 4)), 2, SPECS)
    assert t.newest is None  # until it is durable
    t.commit(whole)
    assert t.newest == version
    assert t.is_settled(version)
    assert t.announce(shard(version, 0, (0, 4)), 2, SPECS) is None


@pytest.mark.parametrize(
    ("rows", "match"),
    [((5, 8), r"w\[4:5, 0:2\] are held by no shard"), ((3, 8), r"w\[3:4, 0:2\] are held twice")],
)
def test_gap_and_overlap_refuse_the_version_for_all_ranks(rows, match):
    t = table()
    publish(t, 1, 0)
    version = VersionId(1, 1)
    t.announce(shard(version, 0, (0, 4)), 2, SPECS)
    with pytest.raises(WeightSyncError, match=match):
        t.announce(shard(version, 1, rows), 2, SPECS)
    assert t.newest == VersionId(1, 0)
    assert t.is_settled(version)
    with pytest.raises(WeightSyncError, match=match):
        t.check_settled(version)
    with pytest.raises(WeightSyncError, match=match):  # the first rank's message again
        t.announce(shard(version, 0, (0, 4)), 2, SPECS)
    assert t.garbage([version]) == [version]
    publish(t, 1, 2)
    assert t.newest == VersionId(1, 2)


def test_contradictions_are_refused():
    t, version = table(), VersionId(1, 5)
    t.announce(shard(version, 0, (0, 4)), 2, SPECS)
    with pytest.raises(WeightSyncError, match="says 3 shards, others said 2"):
        t.announce(shard(version, 1, (4, 8)), 3, SPECS)
    with pytest.raises(WeightSyncError, match="specs differ"):
        t.announce(shard(version, 1, (4, 8)), 2, [TensorSpec("w", "float32", (8, 3))])
    with pytest.raises(WeightSyncError, match="different contents"):
        t.announce(shard(version, 0, (0, 4), checksum=9), 2, SPECS)
    with pytest.raises(WeightSyncError, match="rank 2 of 2"):
        t.announce(shard(version, 2, (4, 8)), 2, SPECS)
    t.commit(t.announce(shard(version, 1, (4, 8)), 2, SPECS))
    with pytest.raises(WeightSyncError, match="cannot change"):
        t.announce(shard(version, 1, (4, 8), checksum=9), 2, SPECS)
    with pytest.raises(WeightSyncError, match="only grow"):
        t.announce(shard(VersionId(1, 4), 0, (0, 8)), 1, SPECS)


def test_another_dtype_is_refused():
    t, version = table(), VersionId(1, 0)
    with pytest.raises(WeightSyncError, match=r"are float32.*tensor is bfloat16"):
        t.announce(shard(version, 0, (0, 8)), 1, [TensorSpec("w", "bfloat16", (8, 2))])


def test_newest_two_stay_and_a_read_one_longer():
    clock = Clock()
    t = table(clock=clock)
    for number in range(3):
        publish(t, 1, number)
    t.acquire(VersionId(1, 1), "reader")
    assert publish(t, 1, 3) == []
    assert publish(t, 1, 4) == [VersionId(1, 2)]
    present = [VersionId(1, number) for number in range(6)]
    assert t.garbage(present) == [VersionId(1, 0), VersionId(1, 2)]
    t.acquire(VersionId(1, 1), "other")
    t.release("reader")
    assert t.retire() == []
    clock.now = 9.0
    t.acquire(VersionId(1, 1), "other")  # renewed
    clock.now = 18.0
    assert t.retire() == []
    clock.now = 19.5
    assert t.retire() == [VersionId(1, 1)]
    with pytest.raises(WeightSyncError, match=r"not served any more.*version 4"):
        t.acquire(VersionId(1, 1), "late")
    t.release("never existed")


def test_reader_that_restarted_gives_its_leases_back():
    t = table(keep=1)
    publish(t, 1, 0)
    t.acquire(VersionId(1, 0), "rollout/1.1:a")
    t.acquire(VersionId(1, 0), "rollout/11.1:a")
    publish(t, 1, 1)
    t.release_reader("rollout/1.")
    assert t.retire() == []
    t.release_reader("rollout/11.")
    assert t.retire() == [VersionId(1, 0)]


def test_rollback_newest_is_of_the_newest_incarnation():
    t = table()
    publish(t, 2, 44)
    publish(t, 2, 45)
    t.announce(shard(VersionId(2, 46), 0, (0, 4)), 2, SPECS)  # killed before its second shard
    t.announce(shard(VersionId(3, 40), 0, (0, 4)), 2, SPECS)
    assert t.newest == VersionId(2, 45)  # the old one is served until the new one is whole
    assert t.garbage([VersionId(2, 46), VersionId(3, 40)]) == [VersionId(2, 46)]
    with pytest.raises(StaleIncarnationError, match="incarnation 3 has published"):
        t.announce(shard(VersionId(2, 46), 1, (4, 8)), 2, SPECS)
    with pytest.raises(StaleIncarnationError):
        t.check_settled(VersionId(2, 46))
    t.acquire(VersionId(2, 44), "slow")
    retired = t.commit(t.announce(shard(VersionId(3, 40), 1, (4, 8)), 2, SPECS))
    assert t.newest == VersionId(3, 40)
    assert retired == [VersionId(2, 45)]
    t.release("slow")
    assert t.retire() == [VersionId(2, 44)]


def test_shard_that_is_not_announced_yet_is_no_garbage():
    t = table()
    assert t.garbage([VersionId(1, 0)]) == []
    publish(t, 1, 0)
    assert t.garbage([VersionId(1, 1), VersionId(2, 0)]) == []


def test_withdrawn_version_is_neither_served_nor_kept():
    t = table()
    publish(t, 1, 0)
    publish(t, 1, 1)
    assert t.withdraw(VersionId(1, 1), "corrupt")
    assert not t.withdraw(VersionId(1, 1), "corrupt")
    assert t.newest == VersionId(1, 0)
    assert t.garbage([VersionId(1, 1)]) == [VersionId(1, 1)]
    with pytest.raises(WeightSyncError, match="withdrawn: corrupt"):
        t.check_settled(VersionId(1, 1))


def test_restored_versions_are_not_taken_from_readers_that_may_exist():
    clock = Clock()
    t, first = table(clock=clock), table()
    publish(first, 1, 0)
    t.restore([first.get(VersionId(1, 0))])
    assert t.newest == VersionId(1, 0)
    for number in (1, 2, 3):
        publish(t, 1, number)
    assert t.get(VersionId(1, 0)) is not None
    t.acquire(VersionId(1, 0), "reader")  # renews after the restart
    clock.now = 9.0
    t.retire()
    assert t.get(VersionId(1, 0)) is not None
    t.release("reader")
    assert t.retire() == [VersionId(1, 0)]


@given(st.lists(st.sampled_from("pgarR"), max_size=40), st.integers(1, 3))
def test_random_life_never_deletes_what_is_newest_or_read(actions, keep):
    """p publish, g garbage collection, a acquire newest, r release oldest, R train restart."""
    t = table(keep=keep)
    incarnation, version, leases, on_disk = 1, 0, {}, set()
    for number, action in enumerate(actions):
        if action == "p":
            publish(t, incarnation, version)
            on_disk.add(VersionId(incarnation, version))
            version += 1
        elif action == "g":
            on_disk -= set(t.garbage(on_disk))
        elif action == "a" and t.newest is not None:
            t.acquire(t.newest, str(number))
            leases[str(number)] = t.newest
        elif action == "r" and leases:
            name = next(iter(leases))
            t.release(name)
            del leases[name]
        elif action == "R":
            incarnation, version = incarnation + 1, max(0, version - 2)
        t.retire()
        assert set(leases.values()) <= on_disk
        assert t.newest is None or t.newest == max(on_disk)
        assert all(t.get(v) is not None for v in leases.values())
    on_disk -= set(t.garbage(on_disk))
    assert len(on_disk) <= keep + len(set(leases.values()))
