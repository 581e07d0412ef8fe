"""The one-way order of layers, and that what a login node runs loads no torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TORCH_FREE = (
    "relax_hpc.cli",
    "relax_hpc.launcher",
    "relax_hpc.report",
    "relax_hpc.recovery",
    "relax_hpc.transfer",
    "relax_hpc.topology",
    "relax_hpc.control",
    "relax_hpc.metrics",
    "relax_hpc.config",
    "relax_hpc.records",
    "relax_hpc.slurm",
    "relax_hpc.runfolder",
    "relax_hpc.log",
    "relax_hpc.errors",
    "relax_hpc.dcs.layout",
    "relax_hpc.dcs.coordinator",
    "relax_hpc.data.prompts",
)
"""Packages stand for all of their modules."""


def modules_of(name: str) -> list[str]:
    path = ROOT / name.replace(".", "/")
    if path.is_dir():
        return [name, *(f"{name}.{file.stem}" for file in path.glob("[!_]*.py"))]
    return [name] if path.with_suffix(".py").exists() else []


def test_layers_import_only_what_is_below() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("name", TORCH_FREE)
def test_torch_free(name: str) -> None:
    """Every module of its own, in a fresh interpreter, with torch made impossible to import."""
    modules = modules_of(name)
    assert modules, f"{name} does not exist"
    code = (
        "import importlib, sys\n"
        "for heavy in ('torch', 'transformers', 'megatron', 'sglang'): sys.modules[heavy] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
