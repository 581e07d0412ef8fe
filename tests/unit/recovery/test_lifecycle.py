from pathlib import Path

import pytest

from relax_hpc.errors import RelaxError, StaleIncarnationError
from relax_hpc.recovery.lifecycle import RunState, RunStatus, read_state, write_state
from relax_hpc.runfolder import RunFolder


def state_of(attempt: int) -> RunState:
    return RunState(name="a", run="runs/a-1", launcher="local", attempt=attempt, host="n01")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert read_state(folder) is None
    write_state(folder, state_of(1))
    state = read_state(folder)
    assert state is not None
    assert state.updated > 0
    assert state.status is RunStatus.STARTING


def test_a_supervisor_of_an_older_attempt_may_not_write(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_state(folder, state_of(2))
    with pytest.raises(StaleIncarnationError, match=r"attempt 2 of runs/a-1 is running on n01"):
        write_state(folder, state_of(1))
    write_state(folder, state_of(2))


@pytest.mark.parametrize("garbage", [b"", b"{", b"[1]", b'{"name": 1}', b"\xff\xfe"])
def test_garbage_is_named(tmp_path: Path, garbage: bytes) -> None:
    folder = RunFolder(tmp_path)
    folder.state.write_bytes(garbage)
    with pytest.raises(RelaxError, match=r"state.json cannot be read"):
        read_state(folder)


@pytest.mark.parametrize("status", list(RunStatus))
def test_final_states(status: RunStatus) -> None:
    assert status.is_final == (status in ("done", "failed", "cancelled"))
