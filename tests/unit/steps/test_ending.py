"""How steps end: exit codes and the sentence for the supervisor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relax_hpc.control.identity import Identity, LocalPlace, task_environment
from relax_hpc.control.rpc import create_keys
from relax_hpc.errors import CheckpointError, ConfigError, EngineError, RelaxError
from relax_hpc.runfolder import RunFolder, create_run_folder
from relax_hpc.steps import ending


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = create_run_folder(tmp_path, "run")
    create_keys(folder)
    return folder


def environment(folder: RunFolder, role: str, index: int = 0, rank: int = 0) -> dict[str, str]:
    return task_environment(
        run=folder,
        role=role,
        index=index,
        attempt=2,
        incarnation=3,
        address_prefix="127.",
        local=LocalPlace(rank=rank, world=rank + 1, local_rank=0, node="n01"),
    )


@pytest.fixture
def me(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Identity:
    for name, value in environment(folder, "train", rank=5).items():
        monkeypatch.setenv(name, value)
    return Identity.from_env()


def raising(error: BaseException) -> "ending.Callable[[Identity], int]":
    def body(identity: Identity) -> int:
        raise error

    return body


def test_a_relax_error_leaves_its_sentence(me: Identity) -> None:
    path = me.run.path / "logs" / "attempt_2" / "train" / "0-i3-rank5.cause"
    error = ConfigError("model.path=m: no tokenizer,\n  look at m\u00fcll")
    assert ending.run_step("train", raising(error)) == 2
    assert path.read_text("utf-8") == "model.path=m: no tokenizer, look at m\u00fcll\n"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert ending.run_step("train", raising(CheckpointError("a later one"))) == 1
    assert "no tokenizer" in path.read_text("utf-8")


def test_other_ends_leave_nothing(me: Identity) -> None:
    assert ending.run_step("train", lambda identity: 143) == 143
    assert ending.run_step("train", raising(ZeroDivisionError("bug"))) == 1
    assert not list(me.run.path.rglob("*.cause"))


def test_the_end_of_a_quoted_log_is_part_of_the_sentence() -> None:
    error = EngineError("server ended; end of x.log:\n  File 'a'\n\nRuntimeError: no memory\n")
    assert ending.sentence(error) == "server ended; end of x.log: RuntimeError: no memory"
    assert ending.sentence(RelaxError("")) == "RelaxError"
    assert ending.sentence(RelaxError("no file \udcff")) == "no file \\udcff"


def test_a_folder_that_cannot_be_written_is_no_other_error(
    me: Identity, caplog: pytest.LogCaptureFixture
) -> None:
    (me.run.path / "logs").write_text("in the way")
    assert ending.run_step("train", raising(ConfigError("why"))) == 2
    assert "cause not written" in caplog.text


@pytest.mark.parametrize("role", ["dcs", "train", "ref", "logprob", "rollout"])
def test_every_step_tells_its_cause(folder: RunFolder, role: str) -> None:
    folder.config.write_text('{"run": 3}')
    module = "forward" if role in ("ref", "logprob") else role
    done = subprocess.run(
        [sys.executable, "-m", f"relax_hpc.steps.{module}"],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment(folder, role, index=1, rank=0)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    cause = folder.logs(2, role) / "1-i3-rank0.cause"
    assert "run" in cause.read_text("utf-8")
    assert cause.read_text("utf-8").strip() in done.stderr.replace("\\'", "'")
