"""What one node can say about itself: shared memory, limits, devices, ports, folders.

Gathered by `relax-hpc doctor` for the machine it runs on, and by `relax-hpc preflight` on every
node. Needs no rights and no GPU; nothing here judges.
"""

import os
import pwd
import re
import resource
import secrets
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

UNLIMITED = -1
_REMOVE_IPC = re.compile(r"^\s*RemoveIPC\s*=\s*(\S+)", re.MULTILINE | re.IGNORECASE)
_FIRST_USER = 1000
"""logind spares system users, root among them."""
_LISTEN = "0A"
"""TCP_LISTEN in /proc/net/tcp."""
_NVIDIA_SMI_TIMEOUT_S = 15.0
"""Without persistence mode the driver is loaded first."""


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as nvidia-smi shows it."""

    uuid: str
    name: str
    memory_mb: int


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one node. Filled by `gather`; tests fill it with faults."""

    node: str
    """Slurm's name of the node; several may share a host."""
    host: str = ""
    shm_bytes: int = 0
    shm_free_bytes: int = 0
    memlock_bytes: int = UNLIMITED
    """Soft limit of locked memory; -1 = none."""
    max_open_files: int = UNLIMITED
    rdma_active: tuple[str, ...] = ()
    """`mlx5_0/1`: device and port, state ACTIVE."""
    rdma_down: tuple[str, ...] = ()
    ephemeral: tuple[int, int] = (32768, 60999)
    """First and last port that the kernel gives out."""
    ephemeral_used: int = 0
    listening: tuple[int, ...] = ()
    removes_ipc: bool = False
    gpus: tuple[GpuFacts, ...] = ()
    folder_fault: str = ""
    """Why the shared folder cannot be used from here; empty = it can."""
    model_fault: str = ""
    clock_offset_s: float = 0.0
    """This node's clock minus that of whoever asked; filled by who compares."""


def gather(
    node: str, *, shm: Path = Path("/dev/shm"), root: Path = Path("/"), with_gpus: bool = True
) -> NodeFacts:
    """Gather what this machine says; a part that cannot be read keeps its default.

    Args:
        node: its name in Slurm.
        shm: what to measure as shared memory (a test mounts a small one).
        root: of /proc, /sys and /etc.
        with_gpus: ask nvidia-smi, which may take seconds.
    """
    size, free = _room(shm)
    active, down = rdma_ports(root / "sys/class/infiniband")
    low, high = ephemeral_range(root)
    used, listening = tcp_ports(root, low, high)
    return NodeFacts(
        node=node,
        host=socket.gethostname(),
        shm_bytes=size,
        shm_free_bytes=free,
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        max_open_files=_limit(resource.RLIMIT_NOFILE),
        rdma_active=active,
        rdma_down=down,
        ephemeral=(low, high),
        ephemeral_used=used,
        listening=listening,
        removes_ipc=removes_ipc(root / "etc", root / "run", root / "var"),
        gpus=tuple(list_gpus()) if with_gpus else (),
    )


def _room(folder: Path) -> tuple[int, int]:
    try:
        usage = os.statvfs(folder)
    except OSError:
        return 0, 0
    return usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize


def _limit(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def rdma_ports(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the (active, other) ports of the RDMA devices below `/sys/class/infiniband`."""
    active: list[str] = []
    down: list[str] = []
    for state in sorted(folder.glob("*/ports/*/state")):
        name = f"{state.parents[2].name}/{state.parent.name}"
        (active if "ACTIVE" in _read(state) else down).append(name)
    return tuple(active), tuple(down)


def ephemeral_range(root: Path = Path("/")) -> tuple[int, int]:
    """Return the first and the last port that the kernel gives to who asks for none."""
    words = _read(root / "proc/sys/net/ipv4/ip_local_port_range").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 else (32768, 60999)


def tcp_ports(root: Path, low: int, high: int) -> tuple[int, tuple[int, ...]]:
    """Return (number of ports in low..high that are in use, ports that are listened on)."""
    used: set[int] = set()
    listening: set[int] = set()
    for name in ("tcp", "tcp6"):
        for line in _read(root / "proc/net" / name).splitlines()[1:]:
            words = line.split()
            port = int(words[1].rpartition(":")[2], 16)
            if low <= port <= high:
                used.add(port)
            if words[3] == _LISTEN:
                listening.add(port)
    return len(used), tuple(sorted(listening))


def list_gpus() -> Iterator[GpuFacts]:
    """Yield the GPUs that nvidia-smi lists; none without it, or when it does not answer."""
    query = ["nvidia-smi", "--query-gpu=uuid,memory.total,name", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):  # how many there should be is judged elsewhere
        return
    for line in done.stdout.splitlines():
        uuid, memory, name = (word.strip() for word in line.split(",", 2))
        yield GpuFacts(uuid=uuid, name=name, memory_mb=int(memory) if memory.isdigit() else 0)


def removes_ipc(etc: Path, run: Path, var: Path, uid: int = -1) -> bool:
    """Tell whether logind removes this user's shared memory when the last session ends."""
    user = os.getuid() if uid < 0 else uid
    is_spared = user < _FIRST_USER or not (run / "systemd" / "system").is_dir()
    if is_spared or (var / "lib/systemd/linger" / user_name(user)).exists():
        return False
    folder = etc / "systemd"
    values = ["yes"]  # the default; the last setting counts
    for path in (folder / "logind.conf", *sorted((folder / "logind.conf.d").glob("*.conf"))):
        values += _REMOVE_IPC.findall(_read(path))
    return values[-1].lower() in ("1", "yes", "true", "on")


def user_name(uid: int) -> str:
    """Return the name of a user; the number in a container that does not know it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def folder_fault(folder: Path, canary: str = "", expected: str = "") -> str:
    """Write, read and remove a file of one's own; read the canary that the caller left.

    Args:
        folder: must exist already.
        canary: name of a file in it; empty = none.
        expected: its content.

    Returns:
        What does not work, in one phrase; empty if all does.
    """
    mine = folder / f".canary-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    data = secrets.token_bytes(1 << 16)
    try:
        if canary and (folder / canary).read_text(encoding="ascii") != expected:
            return f"{folder / canary} has another content than its writer gave it"
        try:
            mine.write_bytes(data)
            if mine.read_bytes() != data:
                return f"{folder}: a file reads back other bytes than were written"
        finally:
            mine.unlink(missing_ok=True)
    except (OSError, UnicodeDecodeError) as err:
        return f"{folder}: {getattr(err, 'strerror', None) or err}"
    return ""


def readable_fault(folder: Path) -> str:
    """Open every file of a model folder and read its first block; returns the first fault."""
    try:
        for path in sorted(folder.iterdir()):
            if path.is_file():
                with path.open("rb") as file:
                    file.read(4096)
    except OSError as err:
        return f"{err.filename or folder}: {err.strerror or err}"
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not there: the kernel or the distribution has no such file
        return ""
