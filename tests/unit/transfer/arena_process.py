"""Processes of test_arena: writers that are killed, readers that are stopped, a small tmpfs.

python arena_process.py ROLE FOLDER [ARGUMENTS]
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from relax_hpc.errors import ArenaFullError, RelaxError
from relax_hpc.transfer import block
from relax_hpc.transfer.arena import Arena, ArenaLimits, LocalGate
from relax_hpc.transfer.block import Entry, open_block
from relax_hpc.transfer.extent import ExtentMap
from relax_hpc.transfer.owner import Owner, process_start
from relax_hpc.transfer.wire import BlockRef

MB = 1 << 20
PHASES = (
    "prefix",
    "column 1",
    "column 2",
    "before commit",
    "after commit",
    "before free",
    "after free",
)


def owner() -> Owner:
    pid = os.getpid()
    return Owner("run", 1, pid, process_start(pid), "rollout", 0, 0, 1)


def say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def fields(number: int, size: int) -> list[Entry]:
    """A group whose values say which one it is (modulo 251, for the smallest dtype)."""
    return [
        Entry(f"0.{number}.0", sample, name, np.full(size + sample, number % 251, dtype))
        for sample in range(4)
        for name, dtype in (("tokens", np.int32), ("logprobs", np.float32), ("mask", np.uint8))
    ]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(phase: str, nth: int) -> None:
    """Have this process killed at the n-th time that it comes to `phase`."""
    left = [nth]

    def maybe_die() -> None:
        left[0] -= 1
        if left[0] <= 0:
            die()

    write_column, real = block._write_column, block._EPOCH

    def counted(plan, column, target, check):
        names = [c.path[0] for c in plan.columns]
        if phase == "prefix" and column.path[0] == names[0]:
            maybe_die()
        digest = write_column(plan, column, target, check)
        if phase == f"column {names.index(column.path[0]) + 1}":
            maybe_die()
        return digest

    class Commit:
        size = real.size

        @staticmethod
        def pack_into(view, at, epoch):
            what = "free" if epoch == 0 else "commit"
            if phase == f"before {what}":
                maybe_die()
            real.pack_into(view, at, epoch)
            if phase == f"after {what}":
                maybe_die()

    block._write_column, block._EPOCH = counted, Commit


def writer(folder: Path, out: int, seed: int, phase: str) -> None:
    """Put and free in a loop; tells every reference that put returned. Never ends by itself."""
    dice = random.Random(seed)
    if phase:
        arm(phase, dice.randrange(1, 60))
    limits = ArenaLimits(extent_bytes=MB, max_bytes=3 * MB, low_water=MB // 4)
    arena = Arena(LocalGate(folder), owner(), limits)
    live: list[BlockRef] = []
    for number in range(1, 1 << 30):
        ref = arena.put(fields(number, dice.randrange(1, 9000)), timeout_s=20)
        os.write(out, json.dumps(["put", number, msgspec.to_builtins(ref)]).encode() + b"\n")
        live.append(ref)
        while len(live) > 5:
            gone = live.pop(dice.randrange(len(live)))
            os.write(out, json.dumps(["free", number, msgspec.to_builtins(gone)]).encode() + b"\n")
            arena.free([(gone.extent, gone.offset, gone.epoch)])


def killer(folder: Path, rounds: str, seed: str) -> None:
    """Fork writers and kill them, one after the other; says what each had told."""
    dice = random.Random(int(seed))
    for number in range(int(rounds)):
        phase = PHASES[number % len(PHASES)] if number % 2 else ""
        place = folder / str(number)
        place.mkdir()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            try:
                writer(place, write, dice.randrange(1 << 30), phase)
            finally:
                os._exit(1)
        os.close(write)
        lines = b""
        with os.fdopen(read, "rb") as file:
            if not phase:
                lines = file.readline()  # it has started
                time.sleep(dice.random() * 0.03)
                os.kill(child, signal.SIGKILL)
            lines += file.read()  # until it is dead
        _, status = os.waitpid(child, 0)
        told = [json.loads(line) for line in lines.splitlines() if line.endswith(b"]")]
        say(round=number, phase=phase, signal=os.WTERMSIG(status), told=told)


def reader(folder: Path, text: str, stop_in: str) -> None:
    """Open one block; stop (as if by SIGSTOP from outside) before, or in the middle of it."""
    ref = msgspec.convert(json.loads(text), BlockRef)
    extents = ExtentMap(folder)
    if stop_in == "between looks":
        look = block._read_header

        def stopping(*args):
            found = look(*args)
            os.kill(os.getpid(), signal.SIGSTOP)
            return found

        block._read_header = stopping
    else:
        extents.view(ref, "test")  # mapped: it will not see a missing file
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        rows = open_block(extents.view(ref, "test"), ref, verify=False, where="test")
        say(rows={f"{uid} {sample}": list(row) for (uid, sample), row in rows.items()})
    except RelaxError as err:
        say(error=type(err).__name__, message=str(err))


def rss(kind: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(kind + ":"):
            return int(line.split()[1]) << 10
    raise AssertionError(kind)


def rss_reader(folder: Path, text: str) -> None:
    """Open blocks, touch every byte of them, and say what that cost in memory."""
    refs = msgspec.convert(json.loads(text), list[BlockRef])
    extents = ExtentMap(folder)
    private, shared = rss("RssAnon"), rss("RssShmem")
    rows = [open_block(extents.view(ref, "test"), ref, verify=False, where="test") for ref in refs]
    opened = rss("RssAnon") + rss("RssShmem") - private - shared
    total = sum(
        int(array[::64].sum()) for row in rows for f in row.values() for array in f.values()
    )
    say(
        opened=opened, private=rss("RssAnon") - private, shared=rss("RssShmem") - shared,
        total=total, nbytes=sum(a.nbytes for row in rows for f in row.values() for a in f.values()),
    )  # fmt: skip


def small_tmpfs(folder: Path) -> None:
    """In a mount namespace of its own: fill a tmpfs of 8 MB in every way there is."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs", folder], check=True)
    limits = ArenaLimits(extent_bytes=2 * MB, max_bytes=64 * MB, low_water=MB)
    arena = Arena(LocalGate(folder), owner(), limits)
    refs: list[BlockRef] = []
    try:
        while True:
            refs.append(arena.put(fields(len(refs), 20_000), timeout_s=0.5))
    except ArenaFullError as err:
        message = str(err)
    (folder / "filler").write_bytes(bytes(max(0, _free(folder) - 4096)))  # by somebody else
    held = [(ref.extent, ref.offset, ref.epoch) for ref in refs]
    arena.free(held)
    again = [arena.put(fields(i, 20_000), timeout_s=0.5) for i in range(len(refs))]
    extents = ExtentMap(folder)
    for i, ref in enumerate(again):
        rows = open_block(extents.view(ref, "test"), ref, verify=True, where="test")
        assert (rows[f"0.{i}.0", 3]["tokens"] == i).all()
    say(
        message=message, blocks=len(refs), reused=len(again), reserved=arena.stats().reserved,
        left=[path.name for path in folder.glob(".*")],
    )  # fmt: skip


def _free(folder: Path) -> int:
    usage = os.statvfs(folder)
    return usage.f_bavail * usage.f_frsize


def limited_file(folder: Path) -> None:
    """A limit of the file size (RLIMIT_FSIZE) refuses an extent: an error, nothing left."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MB, MB))
    limits = ArenaLimits(extent_bytes=2 * MB, max_bytes=64 * MB, low_water=MB)
    arena = Arena(LocalGate(folder), owner(), limits)
    try:
        arena.put(fields(1, 100), timeout_s=0.2)
    except ArenaFullError as err:
        say(message=str(err), left=[path.name for path in folder.iterdir()])


if __name__ == "__main__":
    role, place, *rest = sys.argv[1:]
    {
        "killer": killer,
        "reader": reader,
        "rss_reader": rss_reader,
        "small_tmpfs": small_tmpfs,
        "limited_file": limited_file,
    }[role](Path(place), *rest)
