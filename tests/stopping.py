"""Stop a process for real: SIGSTOP takes effect on each thread when that is next scheduled."""

import os
import signal
import time
from pathlib import Path


def is_stopped(pid: int) -> bool:
    """Return whether all threads are in state T (proc(5))."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(text.rpartition(")")[2].split()[0] == "T" for text in texts)


def stop(pid: int, deadline_s: float = 30.0) -> None:
    """Send SIGSTOP and wait until no thread runs any more; end it with SIGCONT."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + deadline_s
    while not is_stopped(pid):
        assert time.monotonic() < end, f"threads of {pid} run on {deadline_s:g} s after SIGSTOP"
        time.sleep(0.005)
