"""Processes by pid and start time: a reused pid is never taken for ours."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path


class ClusterError(Exception):
    """One sentence for the user."""


def boot_id() -> str:
    """Start times count from the boot, so a record is good for one boot only."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> str:
    """Start time in clock ticks (proc(5), stat field 22); empty if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def environment_of(pid: int) -> set[str]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()


def all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def signal_pid(pid: int, start: str, number: int) -> None:
    """Signal the process unless its pid was reused."""
    if start and start_time(pid) == start:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_until(ready: Callable[[], bool], deadline_s: float) -> bool:
    end = time.monotonic() + deadline_s
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def stop_processes(processes: dict[int, str], grace_s: float) -> None:
    """TERM, then KILL after the grace time. Args: processes: pid -> start time."""
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 60.0)):
        for pid, start in processes.items():
            signal_pid(pid, start, number)
        if wait_until(lambda: all(start_time(p) != s for p, s in processes.items()), patience_s):
            return
    alive = [pid for pid, start in processes.items() if start_time(pid) == start]
    raise ClusterError(f"processes {alive} do not end, not even by SIGKILL (ps -o pid,stat,wchan)")


def ancestors() -> set[int]:
    """This process and its parents: never to be stopped by itself."""
    pid, found = os.getpid(), set()
    while pid > 0:
        found.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            break
    return found
