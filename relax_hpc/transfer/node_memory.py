"""How much shared memory a node still has: its tmpfs, its RAM, and the cgroup that pays for it.

A full tmpfs is an error of posix_fallocate. Full RAM (a tmpfs may be as large) or a full cgroup is
none: the kernel ends a process. So all of them are looked at before memory is reserved.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

_KEEP_FRACTION = 0.02
"""Of the tmpfs and of RAM: left for weights, libraries and other jobs of the node."""
_NO_LIMIT = 1 << 60
"""cgroup v1 writes a number like this for "no limit"."""


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """Bytes that may still be reserved, and what bounds them."""

    nbytes: int
    bound: str


def room(folder: Path, cgroups: Path = Path("/sys/fs/cgroup")) -> Room:
    """Return what can be reserved in the tmpfs of `folder` now."""
    usage = os.statvfs(folder)
    free = usage.f_bavail * usage.f_frsize
    kept = int(usage.f_blocks * usage.f_frsize * _KEEP_FRACTION)
    rooms = [Room(max(free - kept, 0), f"{free} bytes are free in {folder}, {kept} of them kept")]
    total, available = _ram()
    left = max(available - int(total * _KEEP_FRACTION), 0)
    rooms.append(Room(left, f"{available} bytes of RAM are available"))
    rooms += [
        Room(left, f"{left} bytes are left in the memory cgroup {path}")
        for path, left in _cgroup_rooms(cgroups)
    ]
    return min(rooms, key=lambda one: one.nbytes)


def _ram() -> tuple[int, int]:
    """Return RAM in bytes: all, and what can be had without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    values = {name: int(rest.split()[0]) << 10 for name, rest in (li.split(":") for li in lines)}
    return values["MemTotal"], values["MemAvailable"]


def _cgroup_rooms(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield (cgroup, bytes left) for this process's cgroups that have a limit, up to the root."""
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        place = base / path.lstrip("/")
        for folder in (place, *place.parents):
            with contextlib.suppress(OSError, ValueError):  # no limit at this level, or no cgroup
                limit = int((folder / names[0]).read_text(encoding="ascii"))
                used = int((folder / names[1]).read_text(encoding="ascii"))
                if limit < _NO_LIMIT:
                    yield folder, max(limit - used + _reclaimable(folder), 0)
            if folder == base:
                break


def _reclaimable(folder: Path) -> int:
    """Page cache of files: counted as used, given back under pressure. tmpfs is not in it."""
    text = (folder / "memory.stat").read_text(encoding="ascii")
    values = dict(line.split() for line in text.splitlines())
    total = "total_" if "total_inactive_file" in values else ""  # v1: with the groups below
    return sum(int(values.get(f"{total}{name}", 0)) for name in ("inactive_file", "active_file"))
