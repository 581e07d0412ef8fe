"""Debian packages that the cluster needs, installed only where they are missing."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from local_slurm.process import ClusterError

PACKAGES = ("slurm-wlm", "munge", "mpich")
COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
ACCOUNTING_PACKAGES = ("slurmdbd", "mariadb-server")
ACCOUNTING_COMMANDS = ("slurmdbd", "mariadbd", "mariadb-install-db", "mariadb")


def say(text: str) -> None:
    print(f"slurm_cluster: {text}", file=sys.stderr, flush=True)


def search_path() -> str:
    """PATH with the sbin folders, which an ordinary user's PATH lacks on Debian."""
    return os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/local/sbin:/usr/sbin:/sbin"


def require_commands(commands: tuple[str, ...], packages: tuple[str, ...]) -> None:
    missing = [name for name in commands if shutil.which(name, path=search_path()) is None]
    if not missing:
        return
    names = " ".join(packages)
    if os.getuid() != 0 or shutil.which("apt-get") is None:
        raise ClusterError(
            f"{', '.join(missing)} not found; install them: sudo apt-get install {names}"
        )
    say(f"installing {names} (missing: {', '.join(missing)})")
    install_packages(packages)
    still = [name for name in commands if shutil.which(name, path=search_path()) is None]
    if still:
        raise ClusterError(f"{names} installed, but {', '.join(still)} still not found")


def install_packages(packages: tuple[str, ...]) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    options = ["-q", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300"]
    commands = (["apt-get", "-q", "update"], ["apt-get", *options, "install", *packages])
    with services_stay_off():
        for command in commands:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=1800, check=False
            )
            if done.returncode != 0:
                lines = (done.stdout + done.stderr).strip().splitlines()[-8:]
                raise ClusterError(f"{' '.join(command)} failed:\n  " + "\n  ".join(lines))


@contextlib.contextmanager
def services_stay_off() -> Iterator[None]:
    """Keep dpkg from starting Debian's own slurmctld, slurmd, munged (invoke-rc.d, policy-rc.d)."""
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink(missing_ok=True)
