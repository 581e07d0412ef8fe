"""The arena: recycled memory, waiting for room, killed writers, stopped readers, a full tmpfs."""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash

from relax_hpc.errors import ArenaFullError, StaleEpochError, TransferError
from relax_hpc.transfer import arena as arena_module
from relax_hpc.transfer.arena import Arena, ArenaLimits, LocalGate
from relax_hpc.transfer.block import MAGIC, Columns, Entry, first_not_finite, open_block
from relax_hpc.transfer.extent import (
    ExtentMap,
    ReserveExtent,
    extents,
    make_extent,
    map_extent,
    read_owner,
    segments,
)
from relax_hpc.transfer.owner import Owner
from relax_hpc.transfer.spill import SpillLimits, SpillWriter, read_spilled
from relax_hpc.transfer.wire import BlockRef

from .arena_process import MB, PHASES, fields, owner

PROGRAM = [sys.executable, str(Path(__file__).with_name("arena_process.py"))]
LIMITS = ArenaLimits(extent_bytes=MB, max_bytes=4 * MB, low_water=MB // 4)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix=f"test-{os.getpid()}-") as name:
        yield Path(name)


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., Arena]]:
    made: list[Arena] = []

    def build(limits: ArenaLimits = LIMITS, **options) -> Arena:
        made.append(Arena(options.pop("gate", LocalGate(folder)), owner(), limits, **options))
        return made[-1]

    yield build
    for one in made:
        one.close()


def _wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline, "waited 60 s"
        time.sleep(0.005)


def _places(refs: Sequence[BlockRef]) -> list[tuple[str, int, int]]:
    return [(ref.extent, ref.offset, ref.epoch) for ref in refs]


def _open(view: memoryview, ref: BlockRef):
    return open_block(view, ref, verify=True, where="test")


def _blob(nbytes: int, number: int = 0) -> list[Entry]:
    return [Entry("u", 0, "x", np.full(nbytes, number, np.uint8))]


# ---------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------


def test_blocks_are_read_where_they_were_written(make, folder: Path) -> None:
    arena, maps = make(), ExtentMap(folder)
    refs = arena.put_many([fields(number, 100) for number in range(5)], timeout_s=20)
    assert len({ref.epoch for ref in refs}) == 5
    for number, ref in enumerate(refs):
        rows = _open(maps.view(ref, "test"), ref)
        assert (rows[f"0.{number}.0", 2]["tokens"] == number).all()
        assert ref.node == "local" and ref.offset % 64 == 0 and ref.tier == "shm"
    stats = arena.stats()
    assert stats.num_blocks == 5 and stats.used >= sum(ref.nbytes for ref in refs)
    arena.free(_places(refs))
    assert arena.stats().used == 0 and arena.stats().high_water == stats.used


def test_freed_memory_is_the_next_that_is_used(make) -> None:
    """What was just freed is warm: recycled before untouched memory."""
    arena = make()
    first = arena.put(_blob(1000), timeout_s=20)
    for _ in range(100):
        arena.free(_places([first]))
        again = arena.put(_blob(1000), timeout_s=20)
        assert (again.extent, again.offset) == (first.extent, first.offset)
        assert again.epoch > first.epoch
        first = again


def test_old_references_are_stale_from_the_free_on(make, folder: Path) -> None:
    arena, maps = make(), ExtentMap(folder)
    old = arena.put(fields(1, 100), timeout_s=20)
    maps.view(old, "test")
    arena.free(_places([old]))
    with pytest.raises(StaleEpochError, match="its memory was freed or recycled"):
        maps.view(old, "test")
    new = arena.put(fields(2, 100), timeout_s=20)
    assert (new.extent, new.offset) == (old.extent, old.offset)
    with pytest.raises(StaleEpochError):
        maps.view(old, "test")


def test_frees_that_come_twice_or_late_change_nothing(make, folder: Path) -> None:
    """No ABA: the place has a new block, the free is of the old one."""
    arena, maps = make(), ExtentMap(folder)
    old = arena.put(fields(1, 100), timeout_s=20)
    arena.free(_places([old]))
    new = arena.put(fields(2, 100), timeout_s=20)
    arena.free([*_places([old]), ("rollout0.0-1.1-00000000.1", 4096, 1)])
    assert _open(maps.view(new, "test"), new)["0.2.0", 0]["tokens"][0] == 2
    assert arena.stats().ignored_frees == 2 and arena.stats().num_blocks == 1


def test_random_puts_and_frees_never_overlap(make, folder: Path) -> None:
    dice, arena, maps = random.Random(5), make(), ExtentMap(folder)
    live: dict[int, BlockRef] = {}
    for number in range(1, 1500):
        while sum(ref.nbytes for ref in live.values()) > 2 * MB or (live and dice.random() < 0.4):
            arena.free(_places([live.pop(dice.choice(list(live)))]))
        size = dice.choice([1, 64, 1000, 30_000, 100_000])
        live[number] = arena.put(_blob(size, number % 251), timeout_s=20)
        if number % 100 == 0:
            for seen, ref in live.items():
                assert (_open(maps.view(ref, "test"), ref)["u", 0]["x"] == seen % 251).all()
    arena.free(_places(list(live.values())))
    assert arena.stats().used == 0
    for extent in arena._extents.values():
        assert extent.holes == [(4096, extent.nbytes - 4096)], "all holes joined again"


def test_many_threads_put_and_free(make, folder: Path) -> None:
    arena, maps = make(), ExtentMap(folder)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        try:
            for number in range(60):
                refs = arena.put_many(
                    [_blob(dice.randrange(1, 200_000), seed) for _ in range(number % 3 + 1)],
                    timeout_s=60,
                )
                for ref in refs:
                    assert (_open(maps.view(ref, "test"), ref)["u", 0]["x"] == seed).all()
                arena.free(_places(refs))
        except (TransferError, AssertionError) as err:
            failures.append(err)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    stats = arena.stats()
    assert stats.used == 0 and stats.num_blocks == 0 and stats.reserved <= LIMITS.max_bytes


def test_a_block_larger_than_an_extent_gets_its_own(make, folder: Path) -> None:
    arena, maps = make(), ExtentMap(folder)
    ref = arena.put(_blob(3 * MB, 9), timeout_s=20)
    assert (_open(maps.view(ref, "test"), ref)["u", 0]["x"] == 9).all()
    with pytest.raises(ArenaFullError, match="can never fit into arena"):
        arena.put(_blob(4 * MB), timeout_s=20)


def test_empty_extents_make_room_for_a_large_block(make, folder: Path) -> None:
    arena, maps = make(), ExtentMap(folder)
    small = [arena.put(_blob(900_000), timeout_s=20) for _ in range(4)]
    for ref in small:
        maps.view(ref, "test")
    arena.free(_places(small))
    large = arena.put(_blob(2_500_000, 3), timeout_s=20)
    assert (_open(maps.view(large, "test"), large)["u", 0]["x"] == 3).all()
    assert arena.stats().reserved <= LIMITS.max_bytes
    assert len(maps) == len(list(extents(folder))), "maps of removed extents are dropped"


# ---------------------------------------------------------------------------------------------
# Waiting
# ---------------------------------------------------------------------------------------------


def test_a_put_waits_for_a_free_without_turning(make) -> None:
    arena = make()
    refs = [arena.put(_blob(900_000), timeout_s=20) for _ in range(4)]
    got: list[BlockRef] = []
    thread = threading.Thread(target=lambda: got.append(arena.put(_blob(800_000), timeout_s=60)))
    thread.start()
    _wait_until(lambda: len(arena._waiting) == 1)
    looks = _count_looks(arena)
    time.sleep(0.3)
    assert len(looks) <= 2, "it looks again only when something changed"
    arena.free(_places(refs[1:2]))
    thread.join(60)
    assert got and (got[0].extent, got[0].offset) == (refs[1].extent, refs[1].offset)
    assert arena.stats().blocked_s >= 0.3


def _count_looks(arena: Arena) -> list[int]:
    looks: list[int] = []
    look = arena._try_all

    def counted(sizes: Sequence[int]):
        looks.append(1)
        return look(sizes)

    arena._try_all = counted
    return looks


def test_a_full_arena_is_an_error_with_numbers_and_leaves_nothing(make) -> None:
    arena = make()
    refs = [arena.put(_blob(900_000), timeout_s=20) for _ in range(4)]
    before = arena.stats()
    with pytest.raises(
        ArenaFullError, match=r"is full: a put of \d+ bytes .* by 4 blocks"
    ) as caught:
        arena.put_many([_blob(100_000), _blob(500_000)], timeout_s=0.1)
    assert f"of {before.reserved} bytes" in str(caught.value)
    after = arena.stats()
    assert (after.used, after.num_blocks) == (before.used, 4)
    arena.free(_places(refs))
    assert arena.stats().used == 0


def test_a_large_put_is_not_starved_by_small_ones(make) -> None:
    arena = make()
    refs = [arena.put(_blob(450_000), timeout_s=20) for _ in range(8)]
    large: list[BlockRef] = []
    stop = threading.Event()
    thread = threading.Thread(target=lambda: large.append(arena.put(_blob(900_000), timeout_s=60)))
    thread.start()
    _wait_until(lambda: len(arena._waiting) == 1)

    def small() -> None:
        while not stop.is_set():
            try:
                arena.free(_places([arena.put(_blob(400_000), timeout_s=0.01)]))
            except ArenaFullError:
                continue

    others = [threading.Thread(target=small) for _ in range(3)]
    for other in others:
        other.start()
    arena.free(_places([ref for ref in refs if ref.extent == refs[0].extent]))
    thread.join(60)
    stop.set()
    for other in others:
        other.join(60)
    assert large


def test_a_refused_value_gives_its_memory_back(make) -> None:
    arena = make()
    values = [np.array([1.0, np.nan], np.float32)]
    bad = Columns([("0.4.0", 0)], {"p": values})
    with pytest.raises(TransferError, match=r"group 0\.4\.0 sample 0: p is not finite"):
        arena.put_many([_blob(10), bad], timeout_s=20, checks=[{}, {"p": first_not_finite}])
    assert arena.stats().used == 0 and arena.stats().num_blocks == 0


def test_the_next_extent_is_there_before_it_is_needed(make) -> None:
    arena = make()
    arena.put(_blob(1), timeout_s=20)
    assert arena.stats().num_extents == 1
    arena.put(_blob(MB - 200_000), timeout_s=20)
    _wait_until(lambda: arena.stats().num_extents == 2)


class _RefusingGate(LocalGate):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked = 0
        self.is_open = False

    def reserve_extent(self, request: ReserveExtent, timeout_s: float) -> None:
        self.asked += 1
        if not self.is_open:
            raise ArenaFullError("the node has no room: 1 of 2 bytes")
        super().reserve_extent(request, timeout_s)


def test_a_node_without_room_is_asked_again_but_not_in_a_loop(
    make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "_RETRY_S", 0.05)
    gate = _RefusingGate(folder)
    arena = make(gate=gate)
    with pytest.raises(ArenaFullError, match="refused: the node has no room: 1 of 2 bytes"):
        arena.put(_blob(10), timeout_s=0.5)
    assert 1 <= gate.asked <= 8
    gate.is_open = True
    assert arena.put(_blob(10), timeout_s=60).nbytes > 0


def test_a_put_that_the_node_cannot_hold_does_not_make_and_drop_extents(make, folder: Path) -> None:
    """Room for two extents, blocks for three: to drop those that are there is no help."""

    class SmallNode(LocalGate):
        asked = 0

        def reserve_extent(self, request: ReserveExtent, timeout_s: float) -> None:
            self.asked += 1
            if sum(path.stat().st_size for path in folder.iterdir()) + request.nbytes > 2 * MB:
                raise ArenaFullError("the node has no room")
            super().reserve_extent(request, timeout_s)

    gate = SmallNode(folder)
    arena = make(gate=gate)
    with pytest.raises(ArenaFullError, match="refused: the node has no room"):
        arena.put_many([_blob(900_000) for _ in range(3)], timeout_s=2.0)
    assert gate.asked <= 5
    assert arena.put_many([_blob(900_000) for _ in range(2)], timeout_s=20)


def test_close_wakes_who_waits(make) -> None:
    arena = make()
    for _ in range(4):
        arena.put(_blob(900_000), timeout_s=20)
    failures: list[Exception] = []

    def put() -> None:
        try:
            arena.put(_blob(900_000), timeout_s=600)
        except TransferError as err:
            failures.append(err)

    thread = threading.Thread(target=put)
    thread.start()
    _wait_until(lambda: len(arena._waiting) == 1)
    arena.close()
    thread.join(60)
    assert "was closed while a put waited" in str(failures[0])
    with pytest.raises(TransferError, match="is closed"):
        arena.put(_blob(1), timeout_s=1)


def test_a_fork_must_not_write(make) -> None:
    arena = make()
    arena._owner = Owner("run", 1, os.getpid() + 1, 1)
    with pytest.raises(TransferError, match="a forked process makes an arena of its own"):
        arena.put(_blob(1), timeout_s=1)


class _Spill:
    """Keeps images in a dictionary; full beyond `limit` blocks."""

    def __init__(self, arena: str, stamp: bytes) -> None:
        self.arena, self.stamp, self.limit, self.num_refused = arena, stamp, 2, 0
        self.images: dict[tuple[int, int], bytes] = {}

    def append(self, image: memoryview, *, epoch: int, digest: int) -> BlockRef:
        if len(self.images) >= self.limit:
            self.num_refused += 1
            raise ArenaFullError("the spill is full")
        offset = 4096 * (epoch + 1)
        self.images[offset, epoch] = bytes(image)
        return BlockRef("local", f"{self.arena}.s1", offset, len(image), epoch, digest, "spill")

    def free(self, blocks: Sequence[tuple[str, int, int]]) -> None:
        for _, offset, epoch in blocks:
            del self.images[offset, epoch]


def test_blocks_spill_when_the_arena_stays_full(make) -> None:
    limits = ArenaLimits(extent_bytes=MB, max_bytes=2 * MB, low_water=MB // 4, spill_after_s=0.05)
    arena = make(limits, make_spill=_Spill)
    held = [arena.put(_blob(900_000), timeout_s=20) for _ in range(2)]
    spilled = arena.put_many([_blob(900_000, 5), _blob(900_000, 6)], timeout_s=20)
    assert [ref.tier for ref in (*held, *spilled)] == ["shm", "shm", "spill", "spill"]
    image = memoryview(arena._spill.images[spilled[1].offset, spilled[1].epoch])
    assert (_open(image, spilled[1])["u", 0]["x"] == 6).all()
    assert arena.stats().spilled_bytes == spilled[0].nbytes + spilled[1].nbytes
    arena._spill.num_refused = 0
    with pytest.raises(ArenaFullError, match="the spill is full"):
        arena.put(_blob(900_000), timeout_s=0.4)
    assert arena._spill.num_refused <= 10, "it waits between two tries"
    arena.free(_places(spilled[:1]))
    assert arena.put(_blob(900_000), timeout_s=20).tier == "spill"
    arena.free(_places(held))
    assert arena.put(_blob(900_000), timeout_s=20).tier == "shm"
    assert arena.stats().ignored_frees == 0
    assert arena._spill.stamp[:8] == b"RLXEXT1\n"


def test_puts_spill_at_once_while_nothing_becomes_free(make) -> None:
    limits = ArenaLimits(extent_bytes=MB, max_bytes=2 * MB, low_water=MB // 4, spill_after_s=0.05)
    arena = make(limits, make_spill=_Spill)
    arena._spill.limit = 100
    held = [arena.put(_blob(900_000), timeout_s=20) for _ in range(2)]
    assert arena.put(_blob(900_000), timeout_s=20).tier == "spill"
    arena._limits = dataclasses.replace(limits, spill_after_s=3600.0)
    for _ in range(10):
        assert arena.put(_blob(900_000), timeout_s=7200).tier == "spill"
    arena.free(_places(held[:1]))
    assert arena.put(_blob(900_000), timeout_s=20).tier == "shm"
    with pytest.raises(TimeoutError):  # it waits again
        _in_thread(lambda: arena.put(_blob(900_000), timeout_s=7200), wait_s=0.2)


def _in_thread(call: Callable[[], object], wait_s: float) -> None:
    """Raises TimeoutError if the call takes longer."""
    thread = threading.Thread(target=_quietly, args=(call,), daemon=True)
    thread.start()
    thread.join(wait_s)
    if thread.is_alive():
        raise TimeoutError


def _quietly(call: Callable[[], object]) -> None:
    with contextlib.suppress(TransferError):  # closed at the end of the test
        call()


def test_spilled_blocks_are_read_and_freed_like_the_others(make, folder: Path) -> None:
    """With the real spill: on disk with the arena's stamp, gone when all of it is free."""
    disk = folder / "disk"

    def make_spill(name: str, stamp: bytes) -> SpillWriter:
        return SpillWriter(disk, "local", name, SpillLimits(max_bytes=64 * MB), stamp)

    limits = ArenaLimits(extent_bytes=MB, max_bytes=2 * MB, low_water=MB // 4, spill_after_s=0.05)
    arena = make(limits, make_spill=make_spill)
    refs = [arena.put(fields(number, 20_000), timeout_s=20) for number in range(6)]
    spilled = [ref for ref in refs if ref.tier == "spill"]
    assert len(spilled) == 4 and [read_owner(path) for path in segments(disk)] == [owner()]
    for number, ref in enumerate(refs):
        view = ExtentMap(folder).view(ref, "t") if ref.tier == "shm" else read_spilled(disk, ref)
        assert (_open(view, ref)[f"0.{number}.0", 3]["tokens"] == number).all()
    arena.free(_places(refs))
    assert not list(segments(disk)) or arena.stats().ignored_frees == 0
    assert arena.stats().used == 0 and arena.stats().spilled_bytes == 4 * refs[0].nbytes


# ---------------------------------------------------------------------------------------------
# Extents
# ---------------------------------------------------------------------------------------------


def test_extents_are_reserved_stamped_and_private(folder: Path) -> None:
    request = ReserveExtent("train0.3-2.1-0badcafe.7", owner(), MB)
    path = make_extent(folder, request)
    info = path.stat()
    assert info.st_blocks * 512 >= MB and info.st_size == MB and info.st_mode & 0o777 == 0o600
    assert read_owner(path) == owner()
    assert make_extent(folder, request) == path, "asking twice is harmless"
    with pytest.raises(TransferError, match="belongs to another process"):
        make_extent(folder, ReserveExtent(request.name, Owner("other", 1, 1, 1), MB))
    with pytest.raises(ArenaFullError, match="needs 1125899906842624 bytes"):
        make_extent(folder, ReserveExtent("train0.3-2.1-0badcafe.8", owner(), 1 << 50))
    assert [entry.name for entry in folder.iterdir()] == [request.name]


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "", "owner.json", ".tmp-1-1-x", "rollout0.0-1.1-ab", "x" * 300]
)
def test_names_that_are_none_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(TransferError, match="cannot reserve extent"):
        make_extent(folder, ReserveExtent(name, owner(), MB))
    with pytest.raises(TransferError, match="is no extent's name"):
        ExtentMap(folder).view(BlockRef("n", name, 4096, 64, 1, 0), "test")


def test_a_damaged_stamp_is_nobodys(folder: Path) -> None:
    path = make_extent(folder, ReserveExtent("train0.3-2.1-0badcafe.7", owner(), MB))
    good = path.read_bytes()
    for at in (0, 9, 20, 30):
        hurt = bytearray(good)
        hurt[at] ^= 1
        path.write_bytes(hurt)
        assert read_owner(path) is None
    path.write_bytes(good[:10])
    assert read_owner(path) is None
    assert read_owner(folder / "missing") is None


def test_references_out_of_an_extent_are_refused(make, folder: Path) -> None:
    arena, maps = make(), ExtentMap(folder)
    ref = arena.put(_blob(10), timeout_s=20)
    for offset, nbytes in ((0, 64), (-64, 64), (4096, MB), (MB - 8, 64), (4096, -1), (1 << 62, 1)):
        with pytest.raises(TransferError, match="not inside the extent"):
            maps.view(msgspec.structs.replace(ref, offset=offset, nbytes=nbytes), "test")
    with pytest.raises(StaleEpochError, match="is not in"):
        maps.view(msgspec.structs.replace(ref, extent=ref.extent + "1"), "test")


def test_views_outlive_the_file_and_the_map(make, folder: Path) -> None:
    """RemoveIPC, a sweep or an rm under a running reader: what is mapped stays readable."""
    arena, maps = make(), ExtentMap(folder)
    ref = arena.put(fields(4, 1000), timeout_s=20)
    rows = _open(maps.view(ref, "test"), ref)
    for path in folder.iterdir():
        path.unlink()
    assert maps.trim() == 1 and len(maps) == 0
    assert (rows["0.4.0", 0]["tokens"] == 4).all()
    with pytest.raises(StaleEpochError, match="is not in"):
        maps.view(ref, "test")


# ---------------------------------------------------------------------------------------------
# Processes
# ---------------------------------------------------------------------------------------------


def _committed(folder: Path) -> list[BlockRef]:
    """Every block in an extent that looks committed, found without any reference."""
    found = []
    for path in extents(folder):
        data = memoryview(map_extent(path, writable=False))
        for offset in range(4096, len(data), 64):
            if data[offset : offset + 8] == MAGIC:
                epoch, nbytes, header = struct.unpack_from("<QQI", data, offset + 8)
                if epoch:
                    text = data[offset + 32 : offset + 32 + header]
                    digest = xxhash.xxh3_64_intdigest(text)
                    found.append(BlockRef("local", path.name, offset, nbytes, epoch, digest))
    return found


def _check_killed(folder: Path, told: list[list]) -> int:
    """What is committed after a kill is whole, and what was told is there; returns their number."""
    maps = ExtentMap(folder)
    committed = _committed(folder)
    for ref in committed:
        for (uid, sample), row in _open(maps.view(ref, "test"), ref).items():
            number = int(uid.split(".")[1]) % 251
            assert all(
                (value == np.asarray(number).astype(value.dtype)).all() for value in row.values()
            )
            assert set(row) == {"tokens", "logprobs", "mask"}, (uid, sample)
    freed = {tuple(ref) for what, _, ref in told if what == "free"}
    kept = {tuple(ref) for what, _, ref in told if what == "put"} - freed
    assert kept <= {msgspec.structs.astuple(ref) for ref in committed}
    assert len(committed) <= len(kept) + 2, "the block that was put or freed at the kill"
    return len(committed)


def _kill(folder: Path, rounds: int, seed: int) -> None:
    command = [*PROGRAM, "killer", str(folder), str(rounds), str(seed)]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=600).stdout
    results = [json.loads(line) for line in text.splitlines()]
    assert len(results) == rounds
    num_committed = 0
    for result in results:
        assert result["signal"] == signal.SIGKILL
        place = folder / str(result["round"])
        num_committed += _check_killed(place, result["told"])
        owners = [read_owner(path) for path in extents(place)]
        assert all(one is not None and not Path(f"/proc/{one.pid}").exists() for one in owners)
        shutil.rmtree(place)
    assert num_committed > rounds


def test_killed_writers_leave_no_torn_block(folder: Path) -> None:
    """SIGKILL at random moments and at each injected phase of put and free."""
    _kill(folder, 4 * len(PHASES), seed=11)


@pytest.mark.long
def test_killed_writers_leave_no_torn_block_200_times(folder: Path) -> None:
    for seed in range(10):
        _kill(folder, 30, seed)


@pytest.mark.parametrize("stop_in", ["before the look", "between looks"])
def test_a_stopped_reader_comes_too_late(make, folder: Path, stop_in: str) -> None:
    """SIGSTOP a reader, free and recycle its block, let it go on: StaleEpochError, no wrong row."""
    arena = make()
    ref = arena.put(fields(1, 1000), timeout_s=20)
    text = json.dumps(msgspec.to_builtins(ref))
    command = [*PROGRAM, "reader", str(folder), text, stop_in]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:
        _, status = os.waitpid(reader.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        arena.free(_places([ref]))
        again = arena.put(fields(2, 1000), timeout_s=20)
        assert (again.extent, again.offset, again.nbytes) == (ref.extent, ref.offset, ref.nbytes)
        reader.send_signal(signal.SIGCONT)
        out, _ = reader.communicate(timeout=60)
    assert json.loads(out)["error"] == "StaleEpochError"


def test_reads_on_the_node_copy_nothing(make, folder: Path) -> None:
    """128 MB cost a reader no memory of its own; and what the writer changes, the view shows."""
    arena = make(ArenaLimits(extent_bytes=32 * MB, max_bytes=256 * MB, low_water=MB))
    refs = [arena.put(_blob(8 * MB, number), timeout_s=60) for number in range(16)]
    text = json.dumps(msgspec.to_builtins(refs))
    command = [*PROGRAM, "rss_reader", str(folder), text]
    seen = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert seen["nbytes"] == 128 * MB
    assert seen["opened"] < 4 * MB, "opening touches headers only"
    assert seen["private"] < 4 * MB and seen["shared"] >= 100 * MB

    maps = ExtentMap(folder)
    view = _open(maps.view(refs[3], "test"), refs[3])["u", 0]["x"]
    assert view[12345] == 3
    extent = arena._extents[refs[3].extent]
    begin = view.ctypes.data - np.frombuffer(maps._map(refs[3], "test"), np.uint8).ctypes.data
    extent.memory[begin + 12345] = 77
    assert view[12345] == 77, "the reader looks at the writer's memory"


def _alone(*arguments: str) -> list[str]:
    """Run in a mount namespace of its own; as root, or with a user namespace in which we are."""
    user = [] if os.getuid() == 0 else ["--map-root-user"]
    return ["unshare", "--mount", *user, *PROGRAM, *arguments]


def test_a_full_tmpfs_is_an_error_and_no_sigbus(tmp_path: Path) -> None:
    done = subprocess.run(_alone("small_tmpfs", str(tmp_path)), stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == 0, f"ended with {done.returncode} (-7 is SIGBUS)"
    seen = json.loads(done.stdout)
    assert seen["blocks"] > 5 and seen["reused"] == seen["blocks"]
    assert seen["reserved"] <= 8 * MB and seen["left"] == []
    assert "is full: a put of" in seen["message"]
    assert "refused: shared memory is full: extent" in seen["message"]
    assert "are free in" in seen["message"]


def test_a_limit_on_file_sizes_is_an_error(folder: Path) -> None:
    command = [*PROGRAM, "limited_file", str(folder)]
    seen = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert "File too large" in seen["message"] and seen["left"] == []


def test_a_reader_that_exits_removes_nothing(make, folder: Path) -> None:
    """The resource tracker of multiprocessing would (CPython 82300); nothing here uses it."""
    arena = make()
    refs = [arena.put(_blob(MB // 2, 1), timeout_s=20)]
    for _ in range(3):
        text = json.dumps(msgspec.to_builtins(refs))
        subprocess.run([*PROGRAM, "rss_reader", str(folder), text], check=True, capture_output=True)
    assert (_open(ExtentMap(folder).view(refs[0], "test"), refs[0])["u", 0]["x"] == 1).all()
