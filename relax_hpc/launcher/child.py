"""`child.py PARENT SIGNAL -- PROGRAM ...`: become a child that dies with its parent, then PROGRAM.

PR_SET_PDEATHSIG must be set in the child. `preexec_fn` would do that between fork and exec of a
process that has threads (the supervisor watches members in one), where a lock may be held for ever;
a program of its own cannot. The setting survives execve(2) (prctl(2)).
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_EXIT_PARENT_GONE = 1
_EXIT_NOT_FOUND = 127
"""Exit code of shells for a program that cannot be started."""


def command(program: list[str], on_parent_death: signal.Signals) -> list[str]:
    """Wrap a program's argument list so that it gets a signal when this process ends."""
    head = [sys.executable, "-S", "-E", __file__, str(os.getpid()), str(int(on_parent_death))]
    return [*head, "--", *program]


def main(arguments: list[str]) -> int:
    """Set the parent-death signal and exec; returns only on failure."""
    parent, number = int(arguments[0]), int(arguments[1])
    program = arguments[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        sys.stderr.write(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}\n")
        return _EXIT_PARENT_GONE
    if os.getppid() != parent:  # it died before the call above took effect
        return _EXIT_PARENT_GONE
    try:
        os.execvp(program[0], program)
    except OSError as err:
        sys.stderr.write(f"cannot start {program[0]}: {err}\n")
    return _EXIT_NOT_FOUND


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
