"""The state folder of one cluster: its paths, its shape, and the record of its processes."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from local_slurm.process import (
    ClusterError,
    all_pids,
    ancestors,
    boot_id,
    environment_of,
    start_time,
    wait_until,
)

MARK = "RELAX_CLUSTER_STATE"
"""Set in the environment of our daemons, and so of every slurmstepd that they start."""
DEADLINE_S = 90.0
"""For a daemon to answer; a loaded machine of 2 cores needs a few seconds."""
MAX_SOCKET_FOLDER = 60
"""slurmstepd's socket is FOLDER/spool/NODE/NODE_JOBID.STEPID; a Unix socket path has 107 bytes."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the user asked for; kept in the state folder."""

    nodes: int = 4
    cpus_per_node: int = 16
    memory_mb: int = 16000
    gpus_per_node: int = 0
    partitions: str = ""
    tree: str = ""
    accounting: bool = False
    settings: tuple[str, ...] = ()

    @property
    def node_names(self) -> list[str]:
        """n01 .. nNN: names of equal width sort like numbers."""
        width = max(2, len(str(self.nodes)))
        return [f"n{number:0{width}d}" for number in range(1, self.nodes + 1)]


class State:
    """Paths and records of one cluster."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.conf = path / "slurm.conf"
        self.log = path / "log"
        # Sockets need short paths; only a long state folder gets a second one.
        digest = hashlib.sha256(str(path).encode()).hexdigest()[:10]
        short = Path(f"/tmp/relax-cluster-{os.getuid()}-{digest}")
        self.run = path if len(str(path)) <= MAX_SOCKET_FOLDER else short

    @property
    def socket(self) -> Path:
        return self.run / "munge.socket"

    def read(self, name: str) -> dict[str, Any]:
        """Read a record; {} if there is none."""
        try:
            record: dict[str, Any] = json.loads((self.path / name).read_text())
        except FileNotFoundError:
            return {}
        except json.JSONDecodeError as err:
            raise ClusterError(
                f"{self.path / name} is damaged ({err}); remove {self.path}"
            ) from err
        return record

    def write(self, name: str, record: dict[str, Any]) -> None:
        temporary = self.path / f".{name}.new"
        temporary.write_text(json.dumps(record, indent=1) + "\n")
        temporary.replace(self.path / name)

    def require_ours(self) -> None:
        """Refuse to work in a folder that holds other things than a cluster of ours."""
        known = (self.path / "shape.json").exists() or (self.path / "processes.json").exists()
        if self.path.exists() and not known:
            other = [entry.name for entry in self.path.iterdir() if entry != self.log]
            if other:
                raise ClusterError(
                    f"{self.path} holds {other[0]!r} and no cluster; choose an empty --state folder"
                )

    def shape(self) -> Shape | None:
        record = self.read("shape.json")
        return Shape(**{**record, "settings": tuple(record["settings"])}) if record else None

    def recorded(self) -> dict[str, tuple[int, str]]:
        """Daemons that were started and still run: name -> (pid, start time)."""
        record = self.read("processes.json")
        if record.get("boot_id") != boot_id():
            return {}
        return {
            name: (entry["pid"], entry["start"])
            for name, entry in record["daemons"].items()
            if start_time(entry["pid"]) == entry["start"]
        }

    def remember(self, name: str, pid: int) -> None:
        daemons = {n: {"pid": p, "start": s} for n, (p, s) in self.recorded().items()}
        daemons[name] = {"pid": pid, "start": start_time(pid)}
        self.write("processes.json", {"boot_id": boot_id(), "daemons": daemons})

    def owned(self) -> dict[int, str]:
        """All that runs because of this cluster: daemons, slurmstepds, job processes; pid -> start.

        Job processes are known by SLURM_CONF together with SLURMD_NODENAME, which only slurmd sets:
        a user's shell that exported SLURM_CONF is not among them.
        """
        found = {pid: start for pid, start in self.recorded().values()}
        ours, conf = f"{MARK}={self.path}", f"SLURM_CONF={self.conf}"
        for pid in set(all_pids()) - ancestors():
            start, variables = start_time(pid), environment_of(pid)
            is_job = conf in variables and any(v.startswith("SLURMD_NODENAME=") for v in variables)
            if start and (ours in variables or is_job):
                found[pid] = start
        return found

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One up or down at a time; the lock file is beside the folder, which `down` removes."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = self.path.parent / f".{self.path.name}.lock"
        held: list[int] = []
        if not wait_until(lambda: try_lock(lock, held), 2 * DEADLINE_S):
            raise ClusterError(f"another slurm_cluster works on {self.path} (lock {lock})")
        try:
            yield
        finally:
            if not (self.path / "shape.json").exists():
                lock.unlink(missing_ok=True)
            os.close(held[0])


def try_lock(path: Path, held: list[int]) -> bool:
    """Lock the file; not if its last owner unlinked it meanwhile: then it guards nothing."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            held.append(descriptor)
            return True
    os.close(descriptor)
    return False


def tail(path: Path, count: int = 8) -> str:
    """Last lines of a log that matter, for an error message."""
    if not path.exists():
        return f"  {path}: does not exist"
    lines = path.read_text(errors="replace").splitlines()
    lines = [line for line in lines if "pmix" not in line]  # always complains, means nothing here
    bad = [line for line in lines if re.search(r"fatal|error|refus|denied", line, re.IGNORECASE)]
    return "\n".join([f"  {path}:", *(f"    {line}" for line in (bad or lines)[-count:])])
