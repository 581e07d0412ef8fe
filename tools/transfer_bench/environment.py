"""The environment that holds TransferQueue, made once in .cache; and the variables of processes.

Ray and TransferQueue never enter the project's own environment. The other one sees the project's
packages through a .pth file, so that only what is missing is installed, and both sides run the
same torch, numpy and pyzmq.
"""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from transfer_bench.side import MARK, SideError

ROOT = Path(__file__).resolve().parent.parent.parent
_REQUIREMENTS = ROOT / "requirements" / "bench.txt"
_FOLDER = ROOT / ".cache" / "bench-venv"
_INSTALL_TIMEOUT_S = 900.0


def transferqueue_python() -> Path:
    """Return the interpreter that can import transfer_queue; installs it the first time.

    Raises:
        SideError: it cannot be installed; holds the end of pip's output.
    """
    wanted = f"{_REQUIREMENTS.read_text()}\n{sys.prefix} {sys.version}"
    stamp, python = _FOLDER / "requirements.stamp", _FOLDER / "bin" / "python"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print("making .cache/bench-venv (once)", file=sys.stderr)
    stamp.unlink(missing_ok=True)
    _FOLDER.parent.mkdir(exist_ok=True)
    _run(sys.executable, "-m", "venv", "--clear", str(_FOLDER))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = _FOLDER / "lib" / version / "site-packages"
    (packages / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (str(python), "-m", "pip", "--disable-pip-version-check", "install", "--no-deps")
    _run(*pip, "-r", str(_REQUIREMENTS))
    stamp.write_text(wanted)
    return python


def variables(mark: str, **more: str) -> Mapping[str, str]:
    """Return the environment of a side's processes."""
    return {
        **os.environ,
        MARK: mark,
        "PYTHONPATH": f"{ROOT / 'tools'}{os.pathsep}{ROOT}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_worker_niceness": "0",
        "TQ_NUM_THREADS": "2",
        "RAY_USAGE_STATS_ENABLED": "0",
        **more,
    }


def _run(*command: str) -> None:
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False
    )
    if result.returncode != 0:
        end = "\n".join((result.stdout + result.stderr).splitlines()[-15:])
        raise SideError(f"cannot make {_FOLDER}: {' '.join(command)}\n{end}")
