"""The command that starts a mirror or its source: what it refuses, and its exit codes.

The way from one run's weight service to another's is in tests/unit/dcs/test_mirror.py.
"""

import logging

import msgspec
import pytest

from relax_hpc.control.rpc_message import Address
from relax_hpc.dcs.mirror_wire import create_mirror_key, load_mirror_key
from relax_hpc.runfolder import create_run_folder, write_atomic
from relax_hpc.steps.mirror import main


@pytest.fixture(autouse=True)
def _logging():
    """`main` sets logging up for a process: put it back."""
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]


@pytest.fixture
def key(tmp_path):
    create_mirror_key(tmp_path / "key")
    return str(tmp_path / "key")


def test_key_makes_a_key_once(tmp_path, capsys):
    path = tmp_path / "new.key"
    assert main(["key", str(path)]) == 0
    assert len(load_mirror_key(path)) == 32
    assert main(["key", str(path)]) == 2
    assert "not overwritten" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--listen", "localhost:0"], "not an IP address"),
        (["serve", "--listen", "127.0.0.1:0", "--chunk-bytes", "100"], "a multiple of 8"),
        (["follow", "--source", "h:1", "--streams", "0"], "must be > 0"),
        (["follow", "--source", "h:1"], "no weight service has started"),
    ],
)
def test_wrong_use_is_code_2_and_a_sentence(tmp_path, key, words, message, capsys):
    run = create_run_folder(tmp_path, "run")
    assert main([*words, "--run", str(run.path), "--key", key]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("address", ["nohost", ":1", "h:port", "h:99999"])
def test_addresses_that_are_none(tmp_path, key, address, capsys):
    with pytest.raises(SystemExit) as err:
        main(["follow", "--source", address, "--run", str(tmp_path), "--key", key])
    assert err.value.code == 2
    assert "is not HOST:PORT" in capsys.readouterr().err


def test_a_key_that_others_can_read_is_refused_before_anything_else(tmp_path, key, capsys):
    run = create_run_folder(tmp_path, "run")
    address = Address(address="tcp://127.0.0.1:1", pid=1, node="n", attempt=2, incarnation=1)
    write_atomic(run.control / "weights.addr", msgspec.json.encode(address))
    (tmp_path / "key").chmod(0o644)
    words = ["follow", "--source", "127.0.0.1:1", "--run", str(run.path), "--key", key]
    assert main(words) == 2
    assert "chmod 600" in capsys.readouterr().err
    assert not (run.path / "mirror").exists()
