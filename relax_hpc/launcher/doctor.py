"""`relax-hpc doctor`: what dead runs left on this node, and what may remove files of live ones.

Looks at /dev/shm and at spill folders. Removes a folder only if it carries our owner file, belongs
to this user and host, its agent and all who wrote into it are dead, no process has its run in its
environment, and nothing in it changed for a while (a run may be restarting).
"""

import dataclasses
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from relax_hpc.rollout import sglang_shm
from relax_hpc.topology.node_facts import removes_ipc
from relax_hpc.transfer import leftovers
from relax_hpc.transfer.leftovers import FolderState, RunFolderLeft, scan


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One folder of a run."""

    left: RunFolderLeft
    is_removed: bool

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        left, owner = self.left, self.left.owner
        return {
            "path": str(left.path),
            "state": str(left.state),
            "removed": self.is_removed,
            "bytes": left.nbytes,
            "files": left.num_files,
            "age_s": round(left.age_s, 1),
            "run": None if owner is None else owner.run,
            "node": None if owner is None else owner.node,
            "attempt": None if owner is None else owner.attempt,
            "slurm_job": None if owner is None else owner.slurm_job,
        }

    def __str__(self) -> str:
        left, owner = self.left, self.left.owner
        state = "removed" if self.is_removed else str(left.state)
        size = f"{left.nbytes / 2**20:.1f} MB in {left.num_files} files"
        if owner is None:
            return f"{state:8} {left.path}  {size}  (no owner file: not touched)"
        job = f" job {owner.slurm_job}" if owner.slurm_job else ""
        return (
            f"{state:8} {left.path}  {size}, changed {left.age_s / 60:.0f} min ago; "
            f"run {owner.run} attempt {owner.attempt} node {owner.node}{job}"
        )


def examine(
    folders: Sequence[Path] = (), *, clean: bool = False, min_age_s: float = leftovers.REAP_AFTER_S
) -> list[Finding]:
    """Look at /dev/shm and `folders` (spill folders); remove what is dead if `clean`."""
    findings = []
    for root in (leftovers.SHM, *folders):
        for left in scan(root, min_age_s=min_age_s):
            is_removed = clean and left.state is FolderState.DEAD
            if is_removed:
                _remove(left.path)
            findings.append(Finding(left, is_removed and not left.path.exists()))
    return findings


def _remove(folder: Path) -> None:
    for record in folder.glob(sglang_shm.RECORDS):  # names segments outside of the folder
        sglang_shm.remove(record)
    shutil.rmtree(folder, ignore_errors=True)


def hints(
    etc: Path = Path("/etc"), run: Path = Path("/run"), var: Path = Path("/var"), uid: int = -1
) -> list[str]:
    """Say what on this node may remove shared memory of live runs."""
    if not removes_ipc(etc, run, var, uid):
        return []
    return [
        "logind has RemoveIPC=yes: when your last session on this node ends, also one that has "
        "nothing to do with the run, it removes your files in /dev/shm, those of live runs too. "
        "Run `loginctl enable-linger`, or ask for RemoveIPC=no in /etc/systemd/logind.conf or for "
        "Slurm's job_container/tmpfs"
    ]


def report(findings: Sequence[Finding], advice: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the command."""
    usage = os.statvfs(leftovers.SHM)
    free, size = (n * usage.f_frsize / 2**20 for n in (usage.f_bavail, usage.f_blocks))
    yield f"{leftovers.SHM}: {free:.0f} of {size:.0f} MB are free"
    yield from map(str, findings)
    dead = [finding for finding in findings if finding.left.state is FolderState.DEAD]
    held = sum(finding.left.nbytes for finding in dead if not finding.is_removed) / 2**20
    if any(finding.is_removed for finding in dead):
        gone = sum(finding.left.nbytes for finding in dead if finding.is_removed) / 2**20
        yield f"{gone:.1f} MB of dead runs removed"
    if held:
        yield f"{held:.1f} MB belong to dead runs: `relax-hpc doctor --clean` removes them"
    elif not dead:
        yield "nothing is left of dead runs"
    yield from (f"hint: {line}" for line in advice)
