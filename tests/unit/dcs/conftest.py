"""A run folder whose services end with the test."""

import contextlib
import shutil

import pytest

from relax_hpc.control.rpc import create_keys
from relax_hpc.runfolder import create_run_folder
from tests.unit.dcs.weight_run import NODES, Run


@pytest.fixture
def run(tmp_path):
    folder = create_run_folder(tmp_path, "run")
    create_keys(folder)
    with contextlib.ExitStack() as stack:
        for node in NODES:
            stack.callback(shutil.rmtree, folder.shm(node), ignore_errors=True)
        yield Run(folder, stack)
