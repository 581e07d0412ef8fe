"""Real processes: what srun does for us under Slurm must hold on a workstation."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from relax_hpc.launcher.allocation import local_allocation
from relax_hpc.launcher.local_steps import LocalBackend
from relax_hpc.launcher.plan import build_plan
from relax_hpc.launcher.site import Site
from relax_hpc.launcher.steps import StepExit, StepHandle, StepLaunch
from relax_hpc.runfolder import RunFolder, open_run_folder
from tests.launcher_samples import ROOT, SMALL, config_of, wait_for

PLAN = build_plan(config_of(SMALL), Site(name="test"))
TRAIN = next(step for step in PLAN.steps if step.role == "train")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = open_run_folder(tmp_path / "run-1")
    folder.logs(1, "train").mkdir(parents=True)
    return folder


def start(run: RunFolder, code: str) -> StepHandle:
    """Start the two train ranks with a program; `me` is the rank, `note(x)` writes a line."""
    head = (
        "import os, signal, subprocess, sys, time\n"
        "me = int(os.environ['RELAX_RANK'])\n"
        f"def note(x): open({str(run.path)!r} + f'/note-{{me}}', 'a').write(f'{{x}}\\n')\n"
    )
    launch = StepLaunch(
        plan=TRAIN,
        nodes=local_allocation(PLAN).node_names(TRAIN),
        run=run,
        attempt=1,
        incarnation=1,
        address_prefix="127.",
        extra_environment={"SITE": "yes"},
        program=(sys.executable, "-c", head + code),
    )
    return LocalBackend(os.environ).start(launch)


def notes(run: RunFolder, rank: int) -> list[str]:
    path = run.path / f"note-{rank}"
    text = path.read_text() if path.exists() else ""
    return text.split("\n")[:-1]


def end_of(handle: StepHandle) -> StepExit:
    ended: StepExit = wait_for(handle.poll, "the step ends")
    return ended


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # asking whether it exists first would be too early
        return True


def test_ranks_know_their_place(run: RunFolder) -> None:
    handle = start(
        run,
        "e = os.environ; note(' '.join([e['RELAX_WORLD'], e['RELAX_LOCAL_RANK'], "
        "e['RELAX_NODE'], e['RELAX_ROLE'], e['SITE']]))",
    )
    assert end_of(handle).exit_code == 0
    assert notes(run, 1) == ["2 1 local train yes"]


def test_a_failed_rank_ends_the_others_and_is_the_one_named(run: RunFolder) -> None:
    handle = start(
        run, "note(os.getpid()); time.sleep(0.3)\nif me == 1: sys.exit(7)\ntime.sleep(99)"
    )
    ended = end_of(handle)
    assert (ended.exit_code, ended.cause) == (7, "rank 1 ended with exit code 7")
    assert ended.log.name == "0-i1-rank1.log"
    assert is_gone(int(notes(run, 0)[0]))


def test_a_rank_that_told_its_cause_is_quoted(run: RunFolder) -> None:
    """The first that failed, not a victim that told more; blanks and line ends become blanks."""
    code = (
        "log = os.environ['RELAX_RUN'] + '/logs/attempt_1/train/0-i1-rank'\n"
        "if me == 0:\n"
        "    open(log + '0.cause', 'w').write('the store is gone'); note(1); time.sleep(99)\n"
        "while not os.path.exists(os.environ['RELAX_RUN'] + '/note-0'): time.sleep(0.05)\n"
        "open(log + '1.cause', 'w').write('reward.kind=foo:\\n unknown\\n'); sys.exit(2)"
    )
    ended = end_of(start(run, code))
    assert ended.exit_code == 2
    assert ended.cause == "rank 1 ended with exit code 2: reward.kind=foo: unknown"


def test_a_clean_end_of_one_rank_leaves_the_others(run: RunFolder) -> None:
    handle = start(run, "if me == 1: sys.exit(0)\ntime.sleep(0.5); note('done')")
    assert end_of(handle).exit_code == 0
    assert notes(run, 0) == ["done"]


def test_children_of_a_killed_rank_end_too(run: RunFolder) -> None:
    code = "note(subprocess.Popen(['sleep', '99']).pid); note(os.getpid()); time.sleep(99)"
    handle = start(run, code)
    wait_for(lambda: len(notes(run, 0)) == 2, "rank 0 is up")
    grandchild, rank = map(int, notes(run, 0))
    os.kill(rank, signal.SIGKILL)
    assert end_of(handle).cause == "rank 0 ended by SIGKILL"
    wait_for(lambda: is_gone(grandchild), "the grandchild ends", 5)


def test_a_stopped_rank_can_be_killed(run: RunFolder) -> None:
    handle = start(run, "note('up'); os.kill(os.getpid(), signal.SIGSTOP)")
    wait_for(lambda: notes(run, 0) and notes(run, 1), "both are up")
    assert handle.poll() is None
    handle.terminate()
    assert handle.poll() is None
    handle.kill()
    assert end_of(handle).exit_code == 128 + signal.SIGKILL


def test_terminate_lets_ranks_end_in_order(run: RunFolder) -> None:
    code = (
        "ended = []\nsignal.signal(signal.SIGTERM, lambda *_: ended.append(1))\nnote('up')\n"
        "while not ended: time.sleep(0.05)\nnote('bye')"
    )
    handle = start(run, code)
    wait_for(lambda: notes(run, 0) and notes(run, 1), "both are up")
    handle.terminate()
    assert end_of(handle).exit_code == 0
    assert notes(run, 1) == ["up", "bye"]


def test_ranks_die_with_the_supervisor(run: RunFolder) -> None:
    """PR_SET_PDEATHSIG: even after SIGKILL of the supervisor nothing is left."""
    parent = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import signal, subprocess, time\n"
        "from relax_hpc.launcher import child\n"
        "program = child.command(['sleep', '99'], signal.SIGKILL)\n"
        "c = subprocess.Popen(program, start_new_session=True)\n"
        "print(c.pid, flush=True); time.sleep(99)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    wait_for(lambda: psutil.Process(pid).name() == "sleep", "the child has become sleep")
    process.kill()
    process.wait()
    wait_for(lambda: is_gone(pid), "the child is gone", 5)


def test_a_program_that_is_not_there(run: RunFolder) -> None:
    launch_code = "os.execv('/nowhere/python', ['x'])"
    assert end_of(start(run, launch_code)).exit_code == 1
    from relax_hpc.launcher import child

    done = subprocess.run(
        child.command(["/nowhere/srun"], signal.SIGTERM),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 127
    assert "cannot start /nowhere/srun" in done.stderr
