"""What a killed SGLang server leaves in /dev/shm, and how it is removed.

SGLang (0.5.23) names its segments at random (`sglang_loads_RANDOM_*.shm`, 16 KB) or after a process
(`sgl_shm_KIND_PID_*`, 25 MB each), so no name follows from the run. A segment belongs to a server
iff a process of the server's session has it mapped: the names are noted while it lives, in a file
that the next incarnation of the engine (or the dcs step at the end of the run) finds, and unlinked
once all of its processes are dead.
"""

import contextlib
import logging
import os
import re
from pathlib import Path

from relax_hpc.log import kv
from relax_hpc.runfolder import write_atomic

log = logging.getLogger(__name__)

RECORDS = "sglang-*/shared-memory"
"""Where the records of a node's engines lie in the run's folder in shm."""
_MAPPED = re.compile(r" (/dev/shm/(?:sglang_loads_|sgl_shm_)[\w.-]+)$", re.MULTILINE)
_NAME = re.compile(r"/dev/shm/(?:sglang_loads_|sgl_shm_)[\w.-]+")


def mapped_by(session: int) -> set[str]:
    """Paths of SGLang's segments that processes of a session have mapped now."""
    found: set[str] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended while we looked
            if os.getsid(int(entry.name)) == session:
                found |= set(_MAPPED.findall((entry / "maps").read_text(errors="replace")))
    return found


def note(record: Path, session: int) -> None:
    """Add what a session has mapped to the names in `record`."""
    known = _read(record)
    if new := mapped_by(session) - known:
        write_atomic(record, "".join(f"{path}\n" for path in sorted(known | new)))


def remove(record: Path) -> None:
    """Unlink the segments that `record` names, then the record. Their server must be dead."""
    paths = _read(record)
    for path in paths:
        Path(path).unlink(missing_ok=True)
    if paths:
        log.info("shared memory of a dead sglang server removed %s", kv(segments=len(paths)))
    record.unlink(missing_ok=True)


def _read(record: Path) -> set[str]:
    with contextlib.suppress(FileNotFoundError):
        lines = record.read_text(encoding="ascii", errors="replace").splitlines()
        return {line for line in lines if _NAME.fullmatch(line)}
    return set()
