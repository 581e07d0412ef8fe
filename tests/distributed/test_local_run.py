"""Whole runs with launcher = local: the real supervisor, real processes, stub roles, real kills."""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from submitit.core.utils import FailedJobError

from relax_hpc.launcher.executor import RelaxExecutor
from relax_hpc.recovery.lifecycle import RunState, read_state
from relax_hpc.runfolder import RunFolder
from tests.launcher_samples import (
    SMALL,
    STUB,
    config_of,
    environment_of,
    relax,
    wait_for,
    write_inputs,
    write_recipe,
)


class Run:
    """One supervised run in a folder of its own; faults are laid before it starts."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.recipe = write_recipe(folder, SMALL, **changes)
        self.folder = RunFolder(folder / "runs" / "stub-1")
        self.process: subprocess.Popen[str] | None = None
        self._parent = folder

    def start(
        self, step_s: float = 0.1, faults: dict[str, str] | None = None, hold: bool = False
    ) -> "Run":
        """Make the run folder, lay the faults, then supervise; `hold` keeps train waiting."""
        code = (
            "import sys; from pathlib import Path\n"
            "from relax_hpc.config import load_recipe, config_to_json\n"
            "from relax_hpc.launcher.preflight import resolve_inputs\n"
            "from relax_hpc.runfolder import create_run_folder\n"
            "c = resolve_inputs(load_recipe(Path('recipe.toml')))\n"
            "f = create_run_folder(Path('runs'), 'stub'); f.config.write_text(config_to_json(c))"
        )
        environment = environment_of(STUB_STEP_S=str(step_s))
        subprocess.run([sys.executable, "-c", code], cwd=self._parent, env=environment, check=True)
        self.lay(faults if faults is not None else {})
        if hold:
            (self.folder.path / "hold").touch()
        return self.go(environment)

    def go(self, environment: dict[str, str], *more: str) -> "Run":
        command = [sys.executable, "-m", "relax_hpc.cli", "supervise", "--resume"]
        command += [str(self.folder.path), "--step-program", str(STUB), *more]
        self.process = subprocess.Popen(
            command, cwd=self._parent, env=environment, stderr=subprocess.PIPE, text=True
        )
        return self

    def lay(self, faults: dict[str, str]) -> None:
        (self.folder.path / "faults").mkdir(exist_ok=True)
        for task, text in faults.items():
            (self.folder.path / "faults" / task).write_text(text)

    def release(self) -> None:
        (self.folder.path / "hold").unlink()

    def end(self, timeout_s: float = 120) -> tuple[int, str]:
        assert self.process is not None
        _, text = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, text

    def state(self) -> RunState:
        state = read_state(self.folder)
        assert state is not None
        return state

    def pid_of(self, name: str) -> int:
        """Pid of a stub, once it has noted it: `train-0-1-i1`."""
        path = self.folder.path / "seen" / f"{name}.json"
        text = wait_for(lambda: path.exists() and path.read_text(), f"{name} starts")
        return int(json.loads(text)["pid"])

    def failures(self) -> list[tuple[str, int, int]]:
        return [(h.role, h.index, h.exit_code) for h in self.state().history if h.exit_code]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    one = Run(tmp_path)
    yield one
    if one.process is not None and one.process.poll() is None:
        one.process.kill()
        one.process.communicate()


def assert_nothing_is_left(run: Run) -> None:
    pids = [json.loads(p.read_text())["pid"] for p in (run.folder.path / "seen").iterdir()]
    alive = [p for p in pids if psutil.pid_exists(p) and _is_stub(p)]
    assert not alive
    assert not run.folder.shm("local").exists()


def _is_stub(pid: int) -> bool:
    try:
        return str(STUB) in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False


def test_a_run_from_start_to_end(run: Run) -> None:
    code, _ = run.start().end()
    state = run.state()
    assert code == 0
    assert (state.status, state.train_step, state.cause) == ("done", 6, "")
    assert state.result["train_steps"] == 6
    assert state.result["metrics"]["train/reward_mean"] == 1.0
    assert [s.restarts for s in state.steps] == [0, 0, 0, 0]
    assert (run.folder.path / "logs" / "latest").resolve().name == "attempt_1"
    assert not (run.folder.path / "postmortem").exists()
    seen = json.loads((run.folder.path / "seen" / "train-0-1-i1.json").read_text())
    assert seen["trace"] == str(run.folder.logs(1, "train") / "0-i1-nccl_trace_rank_")
    assert_nothing_is_left(run)
    told = json.loads(relax("status", str(run.folder.path), "--json", cwd=Path.cwd()).stdout)
    assert told["curves"]["train/reward_mean"][-1] == [6, 1.0]


def test_each_role_restarts_alone(run: Run) -> None:
    """A rollout, the dcs and a train rank die; the run ends with its full number of steps."""
    run.start(faults={"rollout-1-0": "exit 9", "train-0-1": "kill at 3"}, hold=True)
    run.pid_of("train-0-0-i1")
    # A rank that starts later begins at the checkpoint, past its fault.
    wait_for(lambda: run.state().steps[1].status == "running", "both train ranks registered")
    os.kill(run.pid_of("dcs-0-0-i1"), signal.SIGKILL)
    run.pid_of("dcs-0-0-i2")
    run.release()
    code, text = run.end()
    state = run.state()
    assert code == 0, text
    assert (state.status, state.train_step) == ("done", 6)
    assert set(run.failures()) == {("rollout", 1, 9), ("dcs", 0, 137), ("train", 0, 137)}
    assert state.incarnations["train-0"] == 2
    assert state.incarnations["rollout-0"] == 1
    assert_nothing_is_left(run)


def test_a_stopped_engine_is_restarted(run: Run) -> None:
    """SIGSTOP: the process is there but gives no sign of life."""
    run.start(hold=True)
    pid = run.pid_of("rollout-0-0-i1")
    wait_for(lambda: run.state().steps[2].status == "running", "rollout-0 has registered")
    os.kill(pid, signal.SIGSTOP)
    run.pid_of("rollout-0-0-i2")
    run.release()
    code, text = run.end()
    assert code == 0, text
    (record,) = [h for h in run.state().history if h.exit_code]
    assert record.cause == "rank [0] gave no sign of life within 6 s"
    assert not psutil.pid_exists(pid)


def test_a_stopped_control_service_is_restarted(run: Run) -> None:
    run.start(hold=True)
    run.pid_of("train-0-1-i1")
    pid = run.pid_of("dcs-0-0-i1")
    os.kill(pid, signal.SIGSTOP)
    run.pid_of("dcs-0-0-i2")
    run.release()
    code, text = run.end()
    assert code == 0, text
    assert "the control service did not answer" in run.state().history[0].cause
    assert [h.role for h in run.state().history if h.exit_code] == ["dcs"]


def test_wrong_configuration_ends_at_once_with_2(run: Run) -> None:
    code, text = run.start(faults={"train-0-1": "exit 2"}).end()
    state = run.state()
    assert code == 2
    assert state.status == "failed"
    assert state.cause == (
        "train-0: rank 1 ended with exit code 2 (wrong configuration or input), "
        "see logs/attempt_1/train/0-i1-rank1.log"
    )
    assert text.splitlines()[-1] == f"relax-hpc: stub failed: {state.cause}"
    assert "train-0| stub meets ['exit', '2']" in text
    assert_nothing_is_left(run)


def test_waiting_says_the_cause_and_ends_with_the_runs_code(tmp_path: Path) -> None:
    write_recipe(tmp_path, SMALL)
    sentence = "reward.kind='foo': unknown"
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(STUB.parents[1])!r})\n"
        "from relax_hpc.control.identity import Identity\nfrom tests import stub_step\n"
        "me = Identity.from_env()\n"
        "if me.role == 'train' and me.rank == 1:\n"
        "    (me.run.path / 'faults').mkdir(exist_ok=True)\n"
        f"    (me.run.path / 'faults' / 'train-0-1').write_text({'tell 2 ' + sentence!r})\n"
        "sys.exit(stub_step.main())\n"
    )
    done = relax("submit", "recipe.toml", "--wait", "--step-program", str(program), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        f"relax-hpc submit: stub failed: train-0: rank 1 ended with exit code 2: {sentence} "
        "(wrong configuration or input), see logs/attempt_1/train/0-i1-rank1.log\n"
    )


def test_an_interrupted_wait_leaves_the_run(tmp_path: Path) -> None:
    write_recipe(tmp_path, SMALL)
    command = [sys.executable, "-m", "relax_hpc.cli", "submit", "recipe.toml", "--wait"]
    waiting = subprocess.Popen(
        [*command, "--step-program", str(STUB)],
        cwd=tmp_path,
        env=environment_of(STUB_STEP_S="1.5"),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    folder = RunFolder(tmp_path / "runs" / "stub-1")
    wait_for(lambda: (folder.path / "seen").is_dir(), "a step has started")
    waiting.send_signal(signal.SIGINT)
    _, text = waiting.communicate(timeout=30)
    assert waiting.returncode == 130
    assert text.startswith("relax-hpc submit: interrupted; the run goes on: relax-hpc status ")
    assert len(text.splitlines()) == 1
    assert relax("cancel", str(folder.path), cwd=tmp_path).returncode == 0


def test_a_budget_that_is_used_up_names_the_cause(tmp_path: Path) -> None:
    run = Run(tmp_path, recovery={"max_role_restarts": 1, "max_train_restarts": 1})
    code, _ = run.start(faults={"rollout-0-0": "forever exit 5"}, hold=True).end()
    assert code == 1
    assert run.state().cause == (
        "rollout-0 failed 2 times; the last time: rank 0 ended with exit code 5, "
        "see logs/attempt_1/rollout/0-i2-rank0.log"
    )
    assert_nothing_is_left(run)


def test_a_failed_run_has_a_post_mortem_of_each_end(tmp_path: Path) -> None:
    """The log of a stub rank, written by the fault, says why; status and state.json quote it."""
    run = Run(tmp_path, recovery__max_train_restarts=1)
    code, text = run.start(faults={"train-0-1": "forever raise 3 at 1"}).end()
    assert code == 1
    told = [h.verdict for h in run.state().history if h.role == "train"]
    assert len(told) == 2
    assert all("ValueError" in verdict for verdict in told), told
    assert "python-exception" in told[0]
    assert f"post-mortem: {told[-1]}" in text
    assert told[-1] in relax("status", str(run.folder.path), cwd=tmp_path).stdout
    pages = sorted(path.name for path in (run.folder.path / "postmortem").iterdir())
    assert pages == ["train-0-i1.html", "train-0-i2.html"]
    assert_nothing_is_left(run)


def test_a_member_that_never_registers(tmp_path: Path) -> None:
    run = Run(tmp_path, recovery={"start_timeout_s": 4.0, "heartbeat_timeout_s": 6.0})
    run.start(faults={"train-0-1": "mute"}, hold=True).pid_of("train-0-1-i2")
    run.release()
    code, text = run.end()
    assert code == 0, text
    assert run.state().history[0].cause == "rank [1] did not register within 4 s"


def test_no_progress_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, recovery={"progress_timeout_s": 4.0})
    code, _ = run.start(hold=True).end()
    assert code == 1
    assert "no train step completed for 4 s (train step 0 of 6)" in run.state().cause
    assert_nothing_is_left(run)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_orderly_stop_and_going_on(run: Run, number: signal.Signals) -> None:
    run.start(step_s=0.5)
    wait_for(lambda: (run.folder.checkpoints / "step_2").exists(), "a checkpoint")
    assert run.process is not None
    run.process.send_signal(number)
    code, text = run.end()
    assert code == 1
    assert run.state().status == "cancelled"
    assert number.name in run.state().cause
    assert_nothing_is_left(run)
    code, text = run.go(environment_of(STUB_STEP_S="0.1"), "--steps", "8").end()
    assert code == 0, text
    state = run.state()
    assert (state.status, state.attempt, state.train_step) == ("done", 2, 8)
    assert state.incarnations == {"dcs-0": 2, "train-0": 2, "rollout-0": 2, "rollout-1": 2}
    assert {h.attempt for h in state.history} == {1, 2}


def test_a_killed_supervisor_leaves_nothing_and_can_be_resumed(run: Run) -> None:
    run.start(hold=True)
    pids = [run.pid_of(name) for name in ("train-0-0-i1", "rollout-1-0-i1", "dcs-0-0-i1")]
    assert run.process is not None
    run.process.kill()
    run.process.communicate()
    wait_for(lambda: not any(_is_stub(pid) for pid in pids), "the steps die with it", 10)
    path = str(run.folder.path)
    assert run.state().status in ("starting", "running")
    text = relax("status", path, cwd=Path.cwd()).stdout
    assert f"lost (resume: relax-hpc submit --resume {path})" in text
    assert json.loads(relax("status", path, "--json", cwd=Path.cwd()).stdout)["status"] == "lost"
    done = relax("cancel", path, cwd=Path.cwd())
    assert (done.returncode, "(it was lost)" in done.stdout) == (0, True)
    assert run.state().status == "cancelled"
    done = relax("cancel", path, cwd=Path.cwd())
    assert (done.returncode, "is cancelled already" in done.stderr) == (2, True)
    run.release()
    code, text = run.go(environment_of(STUB_STEP_S="0.1")).end()
    assert code == 0, text
    assert run.state().attempt == 2


def test_two_supervisors_of_one_run(run: Run) -> None:
    run.start(hold=True)
    wait_for(run.folder.state.exists, "it runs")
    done = relax("submit", "--resume", str(run.folder.path), cwd=run.folder.path.parents[1])
    assert done.returncode == 2
    assert "is still" in done.stderr
    done = relax("cancel", str(run.folder.path), cwd=run.folder.path.parents[1])
    assert done.returncode == 0, done.stderr
    assert run.end()[0] == 1
    assert run.state().status == "cancelled"


def test_resumes_that_start_together(run: Run) -> None:
    """Exactly one goes on; the others say why not, and their callers hear it."""
    run.start(step_s=0.1).end()
    (run.folder.path / "hold").touch()
    path, place = str(run.folder.path), run.folder.path.parents[1]
    command = [sys.executable, "-m", "relax_hpc.cli", "submit", "--resume", path, "--steps", "8"]
    rivals = [
        subprocess.Popen(
            [*command, "--step-program", str(STUB)],
            cwd=place,
            env=environment_of(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    told = [rival.communicate(timeout=120)[1] for rival in rivals]
    assert sorted(rival.returncode for rival in rivals) == [0, 2, 2]
    assert sorted("is still" in text for text in told) == [False, True, True]
    assert run.state().attempt == 2
    assert relax("cancel", path, cwd=place).returncode == 0


@pytest.mark.parametrize("command", ["submit", "supervise"])
def test_fewer_steps_than_the_newest_checkpoint_are_refused(run: Run, command: str) -> None:
    run.start(step_s=0.1).end()
    path = str(run.folder.path)
    done = relax(command, "--resume", path, "--steps", "3", cwd=run.folder.path.parents[1])
    assert done.returncode == 2
    assert "--steps 3" in done.stderr
    assert "has a checkpoint of train step 6 already; give 6 or more" in done.stderr
    assert run.state().attempt == 1


def test_near_the_time_limit_without_slurm(run: Run) -> None:
    run.start(hold=True)
    run.pid_of("train-0-0-i1")
    assert run.process is not None
    run.process.send_signal(signal.SIGUSR2)
    code, _ = run.end()
    assert code == 75
    assert "relax-hpc submit --resume" in run.state().cause


def test_the_submitit_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", environment_of()["PYTHONPATH"])
    job = RelaxExecutor("runs", str(STUB)).submit(config_of(SMALL, run__train_steps=2))
    result = job.result()
    assert result["train_steps"] == 2
    assert result["run"] == str(tmp_path / "runs" / "stub-1")
    assert job.state == "COMPLETED"
    assert job.done()
    assert "run ends" in str(job.stdout())
    assert job.exception() is None
    again = RelaxExecutor("runs", str(STUB)).resume(job.run_folder.path, steps=4)
    assert again.result()["train_steps"] == 4
    assert pickle.loads(pickle.dumps(again)).state == "COMPLETED"


def test_a_failed_run_raises_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", environment_of()["PYTHONPATH"])
    job = RelaxExecutor("runs", str(tmp_path / "absent.py")).submit(config_of(SMALL))
    with pytest.raises(FailedJobError, match=r"dcs-0: rank 0 ended with exit code 2"):
        job.result()
    assert job.state == "FAILED"
