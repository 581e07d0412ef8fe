"""The run folder: every path of a run, atomic writes, secrets and shared-memory names.

RUN/config.json            resolved configuration, all that steps read
RUN/plan.json              the job steps: role, nodes, ranks, GPUs
RUN/state.json             life cycle as the supervisor sees it (status, attempt, cause)
RUN/secret/                mode 0700: CURVE keys of the control plane, engine API key (files 0600)
RUN/control/               published addresses, one file per service (`NAME.addr`)
RUN/journal/               queue and registry journals
RUN/logs/attempt_N/ROLE/   one log per task; `RUN/logs/latest` links to the newest attempt
                           INDEX-iK-rankR.cause: why that task ended, one sentence
RUN/.lock                  held (flock) while a supervisor decides whether it may go on
RUN/postmortem/            one page per step that died: what its logs say about the cause
RUN/metrics/               ROLE.jsonl, TensorBoard events
RUN/mirror/NODE/           what has come of the next version, where weights follow another cluster
RUN/trajectories/          every group that was put (HDF5), if rollout.archive
RUN/checkpoints/step_N/    durable state; complete when it holds manifest.json
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from relax_hpc.errors import ConfigError, RelaxError
from relax_hpc.log import kv

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run. Creating the object touches nothing on disk."""

    path: Path

    @property
    def run_id(self) -> str:
        """Unique id of the run (name of the folder): part of every shm name."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.json"

    @property
    def plan(self) -> Path:
        """The job steps of this run."""
        return self.path / "plan.json"

    @property
    def state(self) -> Path:
        """Life cycle of the run."""
        return self.path / "state.json"

    @property
    def secret(self) -> Path:
        """Folder of keys, mode 0700."""
        return self.path / "secret"

    @property
    def control(self) -> Path:
        """Folder of published addresses."""
        return self.path / "control"

    @property
    def journal(self) -> Path:
        """Folder of journals."""
        return self.path / "journal"

    @property
    def metrics(self) -> Path:
        """Folder of metric files."""
        return self.path / "metrics"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def trajectories(self) -> Path:
        """Folder of archived groups."""
        return self.path / "trajectories"

    def logs(self, attempt: int, role: str) -> Path:
        """Folder of one role's logs in one attempt."""
        return self.path / "logs" / f"attempt_{attempt}" / role

    def shm(self, node: str) -> Path:
        """This run's folder in shared memory for one (Slurm) node name.

        Several slurmd may share one host, so the node's name is part of the path. The digest of
        the whole run path keeps two runs of the same folder name apart.
        """
        digest = hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:12]
        return Path("/dev/shm") / f"relax-{os.getuid()}-{digest}-{node}"


def create_run_folder(parent: Path, name: str) -> RunFolder:
    """Make a new run folder `NAME-K` with the smallest free K, and its sub-folders.

    Raises:
        ConfigError: no folder can be made there.
    """
    with refuse_unwritable(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for number in range(1, 100_000):
            path = parent / f"{name}-{number}"
            try:
                path.mkdir(mode=0o755)
            except FileExistsError:
                continue
            return open_run_folder(path)
    raise RelaxError(f"no free run folder name {name}-1 .. {name}-99999 in {parent}")


def open_run_folder(path: Path) -> RunFolder:
    """Make the run folder `path` and its sub-folders; those that exist are kept.

    Raises:
        ConfigError: it cannot be made.
    """
    with refuse_unwritable(path):
        path.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(path.resolve())
        for sub in (folder.control, folder.journal, folder.metrics, folder.checkpoints):
            sub.mkdir(exist_ok=True)
        folder.secret.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextlib.contextmanager
def refuse_unwritable(folder: Path) -> Iterator[None]:
    """Turn what the system refuses while run files are made into one sentence.

    Raises:
        ConfigError: names the folder, the file and the reason.
    """
    try:
        yield
    except OSError as err:
        raise ConfigError(
            f"run.folder={str(folder)!r}: {err.filename or folder} cannot be written "
            f"({err.strerror or err}); set run.folder to a folder on a shared file system "
            "that you may write to"
        ) from err


_LOCK_TIMEOUT_S = 60.0
"""A supervisor holds the lock for a few file writes and one question to Slurm."""


@contextlib.contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Hold RUN/.lock: one supervisor at a time decides whether it may go on with the run.

    flock(2) also holds between nodes over NFS and Lustre (mounted with -o flock). A file system
    without locks is used without one, and says so in the log.

    Raises:
        ConfigError: another process held it all the time.
    """
    descriptor = os.open(folder.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while not _try_lock(descriptor, folder.path):
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{folder.path}: another process has been starting this run for "
                    f"{_LOCK_TIMEOUT_S:.0f} s (it holds .lock): end it first"
                )
            time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as err:
        _LOG.warning("no file locks here %s", kv(folder=path, error=err))
    return True


def write_atomic(path: Path, data: bytes | str, mode: int = 0o644) -> None:
    """Write tmp + fsync + rename: readers see the old file or the whole new one."""
    payload = data.encode() if isinstance(data, str) else data
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_secret(path: Path, data: bytes | str) -> None:
    """Write a secret that only the owner can read (mode 0600)."""
    write_atomic(path, data, mode=0o600)


def new_token() -> str:
    """Return 256 bits of randomness as text."""
    return secrets.token_urlsafe(32)
