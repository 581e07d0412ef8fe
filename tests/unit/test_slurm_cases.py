"""What people who run such jobs under Slurm reported, a test for each theme, with those values.

Host lists (1, 27, S1) are in test_host_lists.py.

Themes that need a cluster are in tests/slurm (kills, arrays, two runs at once, requeue, slurmctld
down), those of checkpoints and signals in tests/distributed and tests/unit/trainer.
"""

import dataclasses
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from relax_hpc import slurm
from relax_hpc.control.identity import Identity, task_environment, visible_gpus
from relax_hpc.control.rpc import RpcServer, create_keys
from relax_hpc.errors import ConfigError, SlurmError
from relax_hpc.launcher import executor, session
from relax_hpc.launcher.allocation import slurm_allocation
from relax_hpc.launcher.handover import may_go_on
from relax_hpc.launcher.plan import build_plan
from relax_hpc.launcher.policy import RestartBudget
from relax_hpc.launcher.render import render_script
from relax_hpc.launcher.site import Site, load_site
from relax_hpc.launcher.slurm_steps import SlurmBackend, read_exit, srun_command
from relax_hpc.launcher.steps import StepLaunch
from relax_hpc.recovery.lifecycle import RunState, RunStatus
from relax_hpc.runfolder import RunFolder, open_run_folder
from relax_hpc.slurm import Fate, parse_job_id, parse_state
from tests.launcher_samples import HEADLINE, ROOT, config_of, single_headline, wait_for

PACKAGE = ROOT / "relax_hpc"


def sources(*folders: str) -> str:
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    wanted = (".py", ".sh", ".toml", "")
    return "\n".join(p.read_text(errors="replace") for p in files if p.suffix in wanted)


# --- 39, S2: states ------------------------------------------------------------------------------

STATES = {
    "BOOT_FAIL": Fate.RESUMABLE, "CANCELLED": Fate.CANCELLED, "COMPLETED": Fate.DONE,
    "CONFIGURING": Fate.RUNNING, "COMPLETING": Fate.RUNNING, "DEADLINE": Fate.CANCELLED,
    "FAILED": Fate.FAILED, "NODE_FAIL": Fate.RESUMABLE, "OUT_OF_MEMORY": Fate.FAILED,
    "PENDING": Fate.WAITING, "PREEMPTED": Fate.RESUMABLE, "RUNNING": Fate.RUNNING,
    "RESV_DEL_HOLD": Fate.WAITING, "REQUEUE_FED": Fate.WAITING, "REQUEUE_HOLD": Fate.WAITING,
    "REQUEUED": Fate.WAITING, "RESIZING": Fate.RUNNING, "REVOKED": Fate.CANCELLED,
    "SIGNALING": Fate.RUNNING, "SPECIAL_EXIT": Fate.WAITING, "STAGE_OUT": Fate.RUNNING,
    "STOPPED": Fate.RUNNING, "SUSPENDED": Fate.RUNNING, "TIMEOUT": Fate.RESUMABLE,
}  # fmt: skip


def test_all_24_states() -> None:
    assert len(STATES) == 24
    assert {name: parse_state(name)[1] for name in STATES} == STATES


@pytest.mark.parametrize("name", sorted(slurm.MAY_RETURN))
def test_a_preempted_job_is_waited_for_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Slurm requeues it a moment later; it was taken for complete."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(executor.time, "monotonic", lambda: clock.now)
    watcher = executor.RunWatcher()
    answers = [name]
    monkeypatch.setattr(watcher, "get_state", lambda job_id, mode: answers[-1])
    assert not watcher.is_done("x", mode="force")
    clock.now += executor.RETURN_TIMEOUT_S - 1
    assert not watcher.is_done("x", mode="force")
    answers.append("PENDING")
    assert not watcher.is_done("x", mode="force")
    clock.now += 2 * executor.RETURN_TIMEOUT_S
    answers.append(name)
    assert not watcher.is_done("x", mode="force")  # counted from its own preemption
    clock.now += executor.RETURN_TIMEOUT_S
    assert watcher.is_done("x", mode="force")


# --- 2, 5, 6, 25, 28, S9, S12: addresses, ports, folders -----------------------------------------


def test_a_host_name_that_means_loopback_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/etc/hosts says 127.0.1.1 for the own name."""
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    entries = [
        ("127.0.0.1", "lo"),
        ("127.0.1.1", "lo"),
        ("192.168.3.4", "eth0"),
        ("10.1.0.9", "ib0"),
    ]
    found = {
        name: [SimpleNamespace(family=socket.AF_INET, address=address)] for address, name in entries
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    variables = task_environment(run=RunFolder(tmp_path), role="dcs", attempt=1, incarnation=1)
    me = Identity.from_env({**variables, "SLURMD_NODENAME": "n03", "SLURM_PROCID": "0"})
    assert (me.node, me.bind_address()) == ("n03", "192.168.3.4")
    fabric = dataclasses.replace(me, address_prefix="10.1.")
    assert fabric.bind_address() == "10.1.0.9"


@pytest.mark.parametrize("job", [12345, 22345, 1012345])
def test_ports_do_not_follow_from_job_ids(tmp_path: Path, job: int) -> None:
    """Job ids 10^4 apart, 29500, 60000+id%5000: somebody else has all of these ports already."""
    formulas = {29500, 15000 + job % 10000, 60000 + job % 5000, 10000 + job % 20000}
    taken = []
    for port in formulas:
        other = socket.socket()
        try:
            other.bind(("127.0.0.1", port))
            other.listen()
        except OSError:
            other.close()
            continue
        taken.append(other)
    servers, addresses = [], []
    for name in (f"a-{job}", f"b-{job}"):
        folder = open_run_folder(tmp_path / name)
        create_keys(folder)
        me = Identity(run=folder, role="dcs", node="n1", address_prefix="127.")
        servers.append(RpcServer(folder, "control", me))
        servers[-1].start_thread()
    for server in servers:
        addresses.append(next(server_folder(server).glob("*.addr")).read_text())
    assert len(set(addresses)) == 2
    for server in servers:
        server.stop()
    for other in taken:
        other.close()


def server_folder(server: Any) -> Path:
    folder: Path = server._folder.control
    return folder


def test_no_fixed_port_and_no_place_of_another_launcher_reaches_a_step() -> None:
    user = {
        "MASTER_ADDR": "old-node", "MASTER_PORT": "29500", "RANK": "3", "LOCAL_RANK": "3",
        "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0", "ROLE_RANK": "3",
        "PATH": "/bin", "RANKING": "kept", "RELAX_RUN": "/other", "RELAX_LOG_LEVEL": "DEBUG",
    }  # fmt: skip
    base = session._step_base(user)
    assert set(base) == {"PATH", "RANKING", "RELAX_LOG_LEVEL", "HF_HUB_OFFLINE", "PYTHONUNBUFFERED"}
    assert not re.search(r"\b29500\b|\b23456\b", sources("relax_hpc", "recipes", "sbatch"))


def test_runs_share_no_folder_in_memory(tmp_path: Path) -> None:
    folders = [RunFolder(tmp_path / parent / "a-7") for parent in ("me", "you")]
    paths = {folder.shm(node) for folder in folders for node in ("n1", "n2")}
    assert len(paths) == 4 and all(str(os.getuid()) in path.name for path in paths)


# --- 9, 11, 12, S11: GPUs ------------------------------------------------------------------------

UUIDS = [f"GPU-{n:08x}-0000-0000-0000-000000000000" for n in range(8)]


@pytest.mark.parametrize("rank", range(8))
def test_one_visible_gpu_per_task_or_all_is_the_same_gpu(rank: int) -> None:
    everything = visible_gpus([rank], ",".join(UUIDS))
    bound = visible_gpus([rank], UUIDS[rank])
    assert everything == bound == [UUIDS[rank]]


@pytest.mark.parametrize(
    ("places", "visible", "mine"),
    [
        ([2], None, ["2"]),
        ([2], "", ["2"]),
        ([3], "0", ["0"]),  # a cgroup: the one device is index 0 ("invalid device ordinal")
        ([1], "4,5,6,7", ["5"]),  # half of a shared node, without cgroups
        ([0, 1, 2, 3], "4,5,6,7", ["4", "5", "6", "7"]),
        ([], "0,1", []),
        ([], None, []),
    ],
)
def test_places_count_in_what_the_step_sees(
    places: list[int], visible: str | None, mine: list[str]
) -> None:
    assert visible_gpus(places, visible) == mine


def test_a_task_that_sees_too_few_gpus_says_why() -> None:
    with pytest.raises(ConfigError, match="--gpus-per-task"):
        visible_gpus([0, 1, 2, 3], "0")
    with pytest.raises(ConfigError, match="owns number 7"):
        visible_gpus([7], "0,1")


def commands(folder: Path, site: Site) -> list[list[str]]:
    """The srun of every step of the headline run, het and single."""
    found = []
    for config in (config_of(HEADLINE), single_headline()):
        plan = build_plan(config, site)
        groups = [
            {"SLURM_JOB_ID": str(40 + n), "SLURM_JOB_NODELIST": f"n[{n}0-{n}{c.nodes - 1}]",
             "SLURM_JOB_CPUS_PER_NODE": "64"}
            for n, c in enumerate(plan.components)
        ]  # fmt: skip
        is_het = len(groups) > 1
        environ = dict(groups[0])
        if is_het:
            environ["SLURM_HET_SIZE"] = str(len(groups))
            for n, group in enumerate(groups):
                environ |= {f"{key}_HET_GROUP_{n}": value for key, value in group.items()}
        allocation = slurm_allocation(environ)
        for step in plan.steps:
            launch = StepLaunch(
                plan=step, nodes=allocation.node_names(step), run=RunFolder(folder), attempt=1,
                incarnation=1, address_prefix="", extra_environment={}, program=("python", "x"),
            )  # fmt: skip
            found.append(srun_command(launch, plan, site, allocation))
    return found


def test_gpus_are_asked_for_by_node_and_never_bound_to_tasks(tmp_path: Path) -> None:
    for name in ("local", "h800"):
        site = load_site(name)
        script = render_script(
            config_of(HEADLINE), build_plan(config_of(HEADLINE), site), site, ["r"], "r"
        )
        assert "gpus-per-task" not in script
        for command in commands(tmp_path, site):
            text = " ".join(command)
            assert "--gpus-per-task" not in text and "--gpu-bind=single" not in text
            assert "--gpu-bind=none" in text or "--gres=none" in text


# --- 4, 19, 20, 24, 30, 34, 44: what the code base must not do -----------------------------------


def test_nothing_is_ended_by_name_and_no_ray_no_torchrun() -> None:
    text = sources("relax_hpc", "recipes", "sbatch")
    assert not re.search(r"\bpkill\b|\bkillall\b|\bfuser -k\b", text)
    assert not re.search(r"^\s*(import|from) (ray|lmdb|sqlite3|shelve|dbm)\b", text, re.MULTILINE)
    assert "torch.distributed.run" not in text and not re.search(r"exec .*torchrun", text)


def test_every_recipe_waits_for_readiness_and_never_sleeps() -> None:
    for path in (ROOT / "recipes").glob("*.sh"):
        assert not re.search(r"\bsleep\b|srun|nodes_array|hostnames", path.read_text()), path


# --- 29, 42: het jobs ----------------------------------------------------------------------------


def test_group_numbers_follow_the_plan_in_script_and_steps(tmp_path: Path) -> None:
    config = config_of(HEADLINE, resources__dcs={"partition": "cpu"})
    plan = build_plan(config, Site(name="x"))
    blocks = render_script(config, plan, Site(name="x"), ["r"], "r").split("#SBATCH hetjob\n")
    partitions = [re.findall(r"--partition=(\S+)", block) for block in blocks]
    assert partitions == [[component.partition] for component in plan.components]
    for command in commands(tmp_path, Site(name="x")):
        numbers = [word for word in command if word.startswith("--het-group=")]
        assert len(numbers) in (0, command.count(":") + 1)


# --- 3, 31, 32, 34, 35, S3, S5: signals ----------------------------------------------------------


def test_only_the_supervisor_is_warned_and_never_by_usr1() -> None:
    """NCCL takes USR1; a step signal reaches children that have no handler."""
    for name in ("local", "h800"):
        site = load_site(name)
        for config in (config_of(HEADLINE), single_headline()):
            script = render_script(config, build_plan(config, site), site, ["r"], "r")
            (option,) = re.findall(r"--signal=(\S+)", script)
            assert option == f"B:USR2@{site.signal_lead_s}"
    assert "SIGUSR1" not in (PACKAGE / "launcher" / "supervisor.py").read_text()


def test_the_signal_reaches_the_supervisor_that_bash_became(tmp_path: Path) -> None:
    """`exec`: no shell, whose traps a foreground job would block, is before the supervisor."""
    config = config_of(HEADLINE)
    script = tmp_path / "r.sh"
    script.write_text(
        render_script(config, build_plan(config, Site(name="x")), Site(name="x"), ["r"], "r")
    )
    fake = tmp_path / "python"
    fake.write_text(
        f"#!{sys.executable}\nimport signal, sys, time\n"
        "signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))\n"
        "print('ready', flush=True)\ntime.sleep(60)\n"
    )
    fake.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "RELAX_PYTHON": str(fake)}
    with subprocess.Popen(
        ["bash", str(script)], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR2)
        assert process.wait(timeout=60) == 75


@pytest.mark.parametrize("time_min", [5, 9, 600])
def test_a_short_job_is_no_timed_out_job(time_min: int) -> None:
    """Jobs under ten minutes always looked timed out: what counts is a new checkpoint."""
    config = config_of(HEADLINE, resources__time_min=time_min)
    assert config.resources.time_min == time_min
    state = RunState(name="a", run="r", launcher="slurm", job_id="7", resumable_step=4)
    assert may_go_on(state, Site(name="x"), 5, "USR2")[0] is RunStatus.REQUEUED
    assert may_go_on(state, Site(name="x"), 4, "USR2")[0] is RunStatus.FAILED


# --- 36, S8: attempt budget and no-progress breaker ----------------------------------------------


def test_restarts_end_without_progress_and_begin_anew_with_it() -> None:
    budget = RestartBudget(3)
    assert [budget.failed(lived_s=1.0) is not None for _ in range(4)] == [True, True, True, False]
    budget = RestartBudget(3, progress=4)
    for step in (5, 6, 7, 8, 9, 10):
        assert budget.failed(lived_s=1.0, progress=step) is not None
    chain = RunState(name="a", run="r", launcher="slurm", job_id="7", attempt=20, resumable_step=1)
    assert may_go_on(chain, Site(name="x", max_attempts=20), 9, "USR2")[0] is RunStatus.FAILED


# --- 27, S6: job ids and arrays ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "request_form"),
    [
        ("123_[0-6:2%4]", "123_[0-6:2%4]"), ("123_4.0", "123_4"),
        ("123_[0-3,...]", "123_[0-3,...]"),
        ("123+0", "123"), ("123+1.batch", "123"), ("123_4", "123_4"), ("123.extern", "123"),
    ],
)  # fmt: skip
def test_ids_that_others_could_not_read(text: str, request_form: str) -> None:
    assert parse_job_id(text).request == request_form


@pytest.mark.parametrize(
    "text", ["1_[0-999999999]", "1_99999999", "9" * 5000, "1_[0-" + "9" * 5000 + "]"]
)
def test_huge_ids_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no Slurm job id") as caught:
        parse_job_id(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("raw", ["48", "49"])
def test_an_array_task_names_itself_and_never_the_array(raw: str) -> None:
    """The last task that starts has the array's number as its own job id."""
    environ = {
        "SLURM_JOB_ID": raw, "SLURM_ARRAY_JOB_ID": "48", "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": "4",
    }  # fmt: skip
    allocation = slurm_allocation(environ)
    assert (allocation.job_id, allocation.job_ids) == ("48_2", ("48_2",))


# --- 14, 13, 7: deadlines ------------------------------------------------------------------------


def test_every_wait_for_a_member_has_a_deadline() -> None:
    recovery = config_of(HEADLINE).recovery
    for limit in (
        recovery.start_timeout_s, recovery.heartbeat_timeout_s, recovery.progress_timeout_s
    ):  # fmt: skip
        assert 0 < limit <= 3600
    with pytest.raises(ConfigError, match="progress_timeout_s"):
        config_of(HEADLINE, recovery__progress_timeout_s=0.0)


# --- 45: why it died -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code", "cause"),
    [
        ("srun: error: gpu002: task 5: Exited with exit code 7\nsrun: error: gpu001: tasks 0-4: "
         "Terminated\n", 7, "rank 5 on gpu002 ended with exit code 7"),
        ("srun: error: gpu002: task 3: Out Of Memory\n", 137, "rank 3 on gpu002 ended by SIGKILL"),
        ("srun: error: gpu[1-2]: tasks 0-5,7: Killed\n", 137, "rank 0 on gpu[1-2] ended by SIG"),
        ("srun: error: n1: task 0: User defined signal 2\n", 140, "ended by SIGUSR2"),
        ("srun: error: n1: task 0: Segmentation fault (core dumped)\n", 139, "ended by SIGSEGV"),
    ],
)  # fmt: skip
def test_the_culprit_and_not_a_victim_is_named(
    tmp_path: Path, text: str, code: int, cause: str
) -> None:
    config = config_of(HEADLINE)
    step = next(s for s in build_plan(config, Site(name="x")).steps if s.role == "train")
    run = RunFolder(tmp_path)
    run.logs(1, "train").mkdir(parents=True)
    launch = StepLaunch(
        plan=step, nodes=(("gpu002",),), run=run, attempt=1, incarnation=1, address_prefix="",
        extra_environment={}, program=("x",),
    )  # fmt: skip
    launch.log("srun").write_text(text)
    ended = read_exit(launch, 143)
    assert ended.exit_code == code and cause in ended.cause


# --- 23, 24: site profiles; 38: in test_handover ---------------------------------------------


def test_a_container_without_an_image_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Image None: the program was parsed as the image."""
    (tmp_path / "sbatch").mkdir()
    monkeypatch.chdir(tmp_path)
    for text in ('kind = "pyxis"', 'kind = "apptainer"\nimage = ""'):
        (tmp_path / "sbatch" / "mine.toml").write_text(f"[container]\n{text}\n")
        with pytest.raises(ConfigError, match="image"):
            load_site("mine")


# --- 46, S16: slurmctld ----------------------------------------------------------------------


def test_a_silent_slurmctld_is_asked_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, asked=[])

    def ask(command: list[str]) -> str:
        clock.asked.append(clock.now)
        raise SlurmError("squeue: error: slurm_load_jobs: Unable to contact slurm controller")

    monkeypatch.setattr(slurm, "run_command", ask)
    monkeypatch.setattr(slurm.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(
        slurm.time, "sleep", lambda pause_s: setattr(clock, "now", clock.now + pause_s)
    )
    with pytest.raises(SlurmError, match="Unable to contact"):
        slurm.show_job("7")
    pauses = [b - a for a, b in itertools.pairwise(clock.asked)]
    assert pauses == sorted(pauses) and pauses[-1] >= 8 * pauses[0]
    assert len(clock.asked) <= 10 and clock.now <= slurm.ASK_PATIENCE_S


def test_one_run_is_one_srun_per_step() -> None:
    """Controller calls grow with roles and engines, never with nodes or ranks."""
    for nodes in (1, 8, 64):
        train = {"ranks": 8 * nodes, "nodes": nodes, "partition": "t"}
        config = config_of(HEADLINE, resources__train=train, rollout__groups_per_step=32 * nodes)
        assert len(build_plan(config, Site(name="x")).steps) == 2 + 4


def test_a_step_of_which_slurmctld_says_nothing_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slurmctld is down: a successor must not start beside tasks that may still live."""
    commands_folder = tmp_path / "bin"
    commands_folder.mkdir()
    silent = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    for name, body in (
        ("sbatch", "exit 0"),
        ("squeue", f"[ -e {tmp_path}/up ] || {{ echo {silent!r} >&2; exit 1; }}"),
        ("srun", f"while [ ! -e {tmp_path}/end ]; do sleep 0.05; done; exit 143"),
    ):
        (commands_folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands_folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands_folder}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setattr("relax_hpc.launcher.slurm_steps._LOOKUP_INTERVAL_S", 0.0)
    config = config_of(HEADLINE)
    plan = build_plan(config, Site(name="x"))
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": "8"}
    step = next(s for s in plan.steps if s.role == "train")
    run = RunFolder(tmp_path / "run")
    run.logs(1, "train").mkdir(parents=True)
    launch = StepLaunch(
        plan=step, nodes=(("n1",),), run=run, attempt=1, incarnation=1, address_prefix="",
        extra_environment={}, program=("x",),
    )  # fmt: skip
    backend = SlurmBackend(plan, Site(name="x"), slurm_allocation(environ), os.environ)
    handle = backend.start(launch)
    assert handle.poll() is None
    handle.terminate()  # nobody to ask: neither an error nor the end of srun
    (tmp_path / "end").touch()
    wait_for(lambda: handle._process.poll() is not None, "srun ends")
    assert [handle.poll() for _ in range(3)] == [None] * 3
    (tmp_path / "up").touch()
    ended = handle.poll()
    assert ended is not None and ended.exit_code == 143
