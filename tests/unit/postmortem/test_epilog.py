"""tools/postmortem_epilog with commands of a node that are missing, loud, or hang: always 0."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.launcher_samples import ROOT

EPILOG = ROOT / "tools" / "postmortem_epilog"

DMESG = """#!/bin/sh
echo '2026-06-26T16:48:25,440+00:00 NVRM: Xid (PCI:0000:dc:00): 79, GPU has fallen off the bus.'
echo '2026-06-26T16:48:25,440+00:00 usb 1-1: new device'
"""


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def put(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def run_epilog(folder: Path, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "SLURM_JOB_ID": "4242",
        "SLURMD_NODENAME": "gpu-07",
        "RELAX_POSTMORTEM_DIR": str(out),
        "RELAX_TEST_ID": os.environ.get("RELAX_TEST_ID", ""),
    }
    return subprocess.run(
        ["bash", str(EPILOG)],
        env={**known, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_keeps_what_the_kernel_and_the_driver_say(bin_folder: Path, tmp_path: Path) -> None:
    put(bin_folder, "dmesg", DMESG)
    put(bin_folder, "nvidia-smi", "#!/bin/sh\necho index, ecc; echo 0, 3\n")
    put(bin_folder, "ibstat", "#!/bin/sh\nexit 3\n")
    done = run_epilog(bin_folder, tmp_path / "out")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    folder = tmp_path / "out" / "4242"
    kernel = (folder / "gpu-07.kernel.log").read_text()
    assert "Xid (PCI:0000:dc:00): 79" in kernel
    assert "usb" not in kernel
    assert "0, 3" in (folder / "gpu-07.gpu.log").read_text()
    assert (
        not (folder / "gpu-07.net.log").exists()
        or "ibstat" not in (folder / "gpu-07.net.log").read_text()
    )
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_commands_that_hang_or_flood_do_not_stop_the_node(bin_folder: Path, tmp_path: Path) -> None:
    put(bin_folder, "timeout", '#!/bin/sh\nshift 2\nexec /usr/bin/timeout -k 1 1 "$@"\n')
    put(bin_folder, "dmesg", "#!/bin/sh\nexec sleep 100\n")
    put(bin_folder, "journalctl", "#!/bin/sh\nexit 1\n")
    put(bin_folder, "nvidia-smi", "#!/bin/sh\nexec yes Xid\n")
    assert run_epilog(bin_folder, tmp_path / "out").returncode == 0
    assert (tmp_path / "out" / "4242" / "gpu-07.gpu.log").stat().st_size < 14_000_000


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_JOB_ID": ""},
        {"SLURM_JOB_ID": "../../etc"},
        {"SLURMD_NODENAME": "../x"},
        {"RELAX_POSTMORTEM_DIR": "/proc/nowhere"},
    ],
)
def test_bad_names_and_folders_write_nothing(
    bin_folder: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    put(bin_folder, "dmesg", DMESG)
    put(bin_folder, "nvidia-smi", "#!/bin/sh\nexit 1\n")
    assert run_epilog(bin_folder, tmp_path / "out", **environment).returncode == 0
    assert not (tmp_path / "out").exists()
