"""tools/slurm_cluster and relax_hpc.slurm against the real thing: real daemons, real kills."""

import contextlib
import hashlib
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_hpc import slurm
from relax_hpc.errors import ConfigError, SlurmError
from relax_hpc.slurm import Fate
from relax_hpc.topology.fabric import parse_addresses, parse_topology

TOOL = Path(__file__).parents[2] / "tools" / "slurm_cluster"
Maker = Callable[..., "object"]


def tool(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def processes_that_mention(text: str) -> list[str]:
    """Live processes with the text in their environment or command line, other than this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            dead = entry.joinpath("stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            said = entry.joinpath("environ").read_bytes() + entry.joinpath("cmdline").read_bytes()
            if not dead and text.encode() in said:
                found.append(entry.joinpath("cmdline").read_bytes().decode(errors="replace"))
    return found


def wait_for_command(text: str) -> None:
    """RUNNING comes before the batch script has started."""
    deadline = time.monotonic() + 30
    while not processes_that_mention(text):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def wait_until_saved(cluster, job: str) -> None:
    """slurmctld writes its state some seconds late; a job killed with it before that is unknown."""
    now, file = time.time(), cluster.state / "ctld" / "job_state"
    cluster.run("scontrol", "update", f"JobId={job}", "Comment=changed")
    deadline = time.monotonic() + 30
    while file.stat().st_mtime < now:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


# --- the tool ----------------------------------------------------------------------------------


def test_default_shape(slurm_cluster) -> None:
    assert set(slurm.list_partitions()) == {"all", "train", "rollout", "dcs", "low", "high"}
    out = slurm_cluster.run("sinfo", "--noheader", "--format=%R %N")
    nodes = dict(line.split() for line in out.splitlines())
    assert nodes["train"] == "n01" and nodes["rollout"] == "n[02-03]" and nodes["dcs"] == "n04"
    assert nodes["all"] == "n[01-04]"


def test_it_listens_on_the_loopback_only(slurm_cluster) -> None:
    conf = slurm_cluster.conf.read_text()
    ports = {int(port) for port in re.findall(r"Port=(\d+)", conf)}
    assert len(ports) == 5 and all(listening(port) for port in ports)
    table = "\n".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    for port in ports:
        addresses = set(re.findall(rf"^\s*\d+: (\S+):{port:04X} \S+ 0A", table, re.MULTILINE))
        assert addresses == {"0100007F"}  # 127.0.0.1, little-endian hex


def test_tree_and_gpus_reach_the_task(slurm_cluster) -> None:
    command = "echo $SLURM_TOPOLOGY_ADDR $CUDA_VISIBLE_DEVICES $SLURMD_NODENAME"
    out = slurm_cluster.run("srun", "-N4", "-n4", "-l", "--gpus-per-node=2", "bash", "-c", command)
    assert sorted(line.split(": ")[1] for line in out.splitlines()) == [
        "spine1.leaf1.n01 0,1 n01",
        "spine1.leaf1.n02 0,1 n02",
        "spine1.leaf2.n03 0,1 n03",
        "spine1.leaf2.n04 0,1 n04",
    ]


def test_all_that_tells_the_topology_tells_the_same(slurm_cluster) -> None:
    shown = parse_topology(slurm_cluster.run("scontrol", "show", "topology"))
    written = parse_topology((slurm_cluster.state / "topology.conf").read_text())
    command = "echo $SLURMD_NODENAME $SLURM_TOPOLOGY_ADDR $SLURM_TOPOLOGY_ADDR_PATTERN"
    told = slurm_cluster.run("srun", "-N4", "-n4", "bash", "-c", command)
    seen = parse_addresses({node: (a, p) for node, a, p in map(str.split, told.splitlines())})
    assert shown.paths == written.paths == seen.paths
    assert shown.paths["n03"] == ("leaf2", "spine1")


def test_second_up_is_harmless(slurm_cluster) -> None:
    before = [slurm_cluster.pid(name) for name in ("munged", "slurmctld", "slurmd.n03")]
    done = tool("up", "--state", str(slurm_cluster.state))
    assert done.returncode == 0
    assert done.stdout == f"export SLURM_CONF={slurm_cluster.conf}\n"
    assert before == [slurm_cluster.pid(name) for name in ("munged", "slurmctld", "slurmd.n03")]


def test_another_shape_is_refused(slurm_cluster) -> None:
    done = tool("up", "--state", str(slurm_cluster.state), "--nodes", "2")
    assert done.returncode == 2 and "other options; take it down first" in done.stderr


def test_up_repairs_what_died(cluster: Maker) -> None:
    mine = cluster("--nodes", "2")
    job = mine.submit("sleep 300", "--nodelist=n01")
    mine.wait_for(job, lambda state: state.name == "RUNNING")
    wait_until_saved(mine, job)
    for name in ("slurmctld", "slurmd.n02", "munged"):
        os.kill(mine.pid(name), signal.SIGKILL)
    assert tool("status", "--state", str(mine.state)).returncode == 1
    assert tool("up", "--state", str(mine.state)).returncode == 0
    assert tool("status", "--state", str(mine.state)).returncode == 0
    # The job on the untouched node went on; the new slurmctld knows it.
    assert slurm.job_state(job).name == "RUNNING"
    assert mine.run("srun", "--nodelist=n02", "-N1", "echo", "fine") == "fine\n"


def test_down_leaves_nothing(cluster: Maker) -> None:
    mine = cluster("--nodes", "2", "--set", "KillWait=2")
    ports = [int(port) for port in re.findall(r"Port=(\d+)", mine.conf.read_text())]
    stubborn = "trap '' TERM; setsid sleep 1234 & trap '' TERM; sleep 1235; sleep 1236"
    job = mine.submit(stubborn, "-N2")
    mine.wait_for(job, lambda state: state.name == "RUNNING")
    assert tool("down", "--state", str(mine.state)).returncode == 0
    assert not mine.state.exists()
    assert processes_that_mention(str(mine.state)) == []
    assert not any(listening(port) for port in ports)
    again = tool("down", "--state", str(mine.state))
    assert again.returncode == 0 and "nothing to take down" in again.stderr


def test_down_after_all_daemons_were_killed(cluster: Maker) -> None:
    mine = cluster("--nodes", "1")
    job = mine.submit("sleep 1237")
    mine.wait_for(job, lambda state: state.name == "RUNNING")
    wait_for_command("sleep\0001237")
    for name in ("slurmctld", "slurmd.n01", "munged"):
        os.kill(mine.pid(name), signal.SIGKILL)
    assert processes_that_mention(str(mine.state)) != []  # slurmstepd and sleep live on
    assert tool("down", "--state", str(mine.state)).returncode == 0
    assert processes_that_mention(str(mine.state)) == []


def test_a_users_shell_is_not_taken_for_the_clusters(cluster: Maker) -> None:
    mine = cluster("--nodes", "1")
    shell = subprocess.Popen(["sleep", "60"], env={**os.environ, "SLURM_CONF": str(mine.conf)})
    try:
        assert tool("down", "--state", str(mine.state)).returncode == 0
        assert shell.poll() is None
    finally:
        shell.kill()
        shell.wait()


def test_two_clusters_stand_side_by_side(slurm_cluster, cluster: Maker) -> None:
    other = cluster("--nodes", "1", "--partitions", "small=n01:MaxTime=5")
    assert set(slurm.list_partitions()) == {"small"}
    assert other.run("sinfo", "-h", "-o", "%R %l") == "small 5:00\n"
    assert "train" in slurm_cluster.run("sinfo", "-h", "-o", "%R")
    # another key: the first cluster's daemons do not believe the second one's users
    mixed = re.sub(
        r"AuthInfo=.*",
        re.search(r"AuthInfo=.*", other.conf.read_text())[0],
        slurm_cluster.conf.read_text(),
    )
    (other.state / "mixed.conf").write_text(mixed)
    done = subprocess.run(
        ["squeue"],
        env={**other.environment, "SLURM_CONF": str(other.state / "mixed.conf")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--partitions", "x"), "NAME=NODES"),
        (("--partitions", "x=n01 y=n09"), "Invalid node names in partition y"),
        (("--tree", "0"), "--tree '0'"),
        (("--nodes", "0"), "--nodes must be 1 or more"),
        (("--set", "Nonsense=1"), "Nonsense"),
        (("--set", "novalue"), "write KEY=VALUE"),
        (("--state", "/tmp/a b"), "takes no blanks"),
        (("--state", "/proc/nope"), "--state /proc/nope: "),
        (("--state", "/dev/null/x"), "--state /dev/null/x: "),
    ],
)
def test_bad_options_are_one_sentence(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    state = tmp_path / "bad"
    done = tool("up", "--state", str(state), *arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert tool("down", "--state", str(state)).returncode == 0
    assert processes_that_mention(str(state)) == []


def test_a_folder_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    for command in ("up", "down"):
        done = tool(command, "--state", str(tmp_path))
        assert done.returncode == 2 and "holds 'thesis.tex'" in done.stderr
    assert (tmp_path / "thesis.tex").read_text() == "x"


def test_missing_packages_are_said_to_an_ordinary_user(tmp_path: Path) -> None:
    local = str(TOOL.parent)
    code = (
        f"import sys, os; sys.path.insert(0, {local!r})\n"
        "from local_slurm import packages\n"
        "os.getuid = lambda: 1000\n"
        "packages.require_commands(('no-such-command',), ('some-package',))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (
        "no-such-command not found; install them: sudo apt-get install some-package" in done.stderr
    )


def test_long_state_folder(tmp_path: Path) -> None:
    state = tmp_path / ("long" * 20) / "cluster"
    assert tool("up", "--state", str(state), "--nodes", "1").returncode == 0
    environment = {**os.environ, "SLURM_CONF": str(state / "slurm.conf")}
    out = subprocess.run(
        ["srun", "echo", "fine"], env=environment, capture_output=True, timeout=60, check=True
    )
    assert out.stdout == b"fine\n"
    assert tool("down", "--state", str(state)).returncode == 0
    digest = hashlib.sha256(str(state).encode()).hexdigest()[:10]
    assert not Path(f"/tmp/relax-cluster-{os.getuid()}-{digest}").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="root is needed to become somebody else")
def test_an_ordinary_user_can_run_it() -> None:
    nobody = pwd.getpwnam("nobody")
    home = Path("/var/tmp") / f"relax-test-{os.getpid()}"
    home.mkdir()
    try:
        os.chown(home, nobody.pw_uid, nobody.pw_gid)
        # The project may lie where this user cannot read.
        shutil.copytree(TOOL.parent / "local_slurm", home / "tools" / "local_slurm")
        shutil.copy(TOOL, home / "tools" / "slurm_cluster")
        script = (
            'eval "$(python3 tools/slurm_cluster up --nodes 2 --gpus-per-node 1)" && '
            "srun -N2 --gpus-per-node=1 bash -c 'echo $(id -un) $CUDA_VISIBLE_DEVICES'; "
            "python3 tools/slurm_cluster down && ls -A .cache/relax_hpc"
        )
        become = ["setpriv", "--reuid=nobody", f"--regid={nobody.pw_gid}", "--clear-groups"]
        clean = ["env", "-i", f"HOME={home}", "PATH=/usr/bin:/bin"]
        done = subprocess.run(
            [*become, *clean, "bash", "-c", script],
            cwd=home,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.stdout == "nobody 0\nnobody 0\n", done.stderr
        assert processes_that_mention(str(home)) == []
    finally:
        shutil.rmtree(home)


# --- relax_hpc.slurm on the real cluster -------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "options", "name", "fate", "code"),
    [
        ("true", (), "COMPLETED", Fate.DONE, 0),
        ("exit 3", (), "FAILED", Fate.FAILED, 3),
        ("srun bash -c 'exit 5'; exit 0", (), "COMPLETED", Fate.DONE, 0),
    ],
)
def test_end_states(slurm_cluster, script, options, name, fate, code) -> None:
    job = slurm_cluster.submit(script, *options)
    state = slurm_cluster.wait_for(job, lambda s: s.is_over)
    assert (state.name, state.fate, state.exit_code) == (name, fate, code)
    if "srun" in script:
        assert state.derived_exit_code == 5
    log = slurm_cluster.state / "log" / "jobcomp.log"
    deadline = time.monotonic() + 20
    while f"JobId={job} " not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    for source in (slurm._state_from_scontrol, slurm._state_from_squeue, slurm._state_from_jobcomp):
        seen = source(slurm.parse_job_id(job))
        assert seen is not None and seen.name == name, source


def test_het_job(slurm_cluster) -> None:
    script = slurm_cluster.state / "het.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH -p train -N1 -o /dev/null\n#SBATCH hetjob\n"
        "#SBATCH -p rollout -N2\nsleep 300\n"
    )
    job = slurm.submit(script)
    state = slurm_cluster.wait_for(job, lambda s: s.name == "RUNNING")
    assert [name for _, name in state.components] == ["RUNNING", "RUNNING"]
    assert slurm.job_state(f"{job}+1").nodes == "n[02-03]"
    assert slurm.expand_hostlist(slurm.job_state(f"{job}+1").nodes) == ["n02", "n03"]
    raw = slurm.show_job(job)[1]["JobId"]
    assert slurm.job_state(raw).name == "RUNNING"
    slurm.cancel(job)
    state = slurm_cluster.wait_for(job, lambda s: s.is_over)
    assert state.fate is Fate.CANCELLED
    slurm.cancel(job)


def test_requeue_starts_at_once_and_elsewhere(slurm_cluster) -> None:
    """121 s without StartTime=now; the deadline of the wait is the check."""
    job = slurm_cluster.submit("sleep 300", "-p", "rollout", "--nodelist=n02")
    slurm_cluster.wait_for(job, lambda s: s.name == "RUNNING")
    slurm.requeue(job)
    state = slurm_cluster.wait_for(job, lambda s: s.name == "RUNNING" and s.restarts == 1)
    assert state.nodes == "n02"
    free = slurm_cluster.submit("sleep 300", "-p", "rollout")
    state = slurm_cluster.wait_for(free, lambda s: s.name == "RUNNING")
    slurm.requeue(free, exclude=[state.nodes])
    moved = slurm_cluster.wait_for(free, lambda s: s.name == "RUNNING" and s.restarts == 1)
    assert {state.nodes, moved.nodes} == {"n02", "n03"}


def test_requeue_that_was_forbidden(slurm_cluster) -> None:
    job = slurm_cluster.submit("sleep 300", "--no-requeue")
    slurm_cluster.wait_for(job, lambda s: s.name == "RUNNING")
    with pytest.raises(SlurmError, match="--no-requeue"):
        slurm.requeue(job)


def test_array_tasks(slurm_cluster) -> None:
    job = slurm_cluster.submit("exit $SLURM_ARRAY_TASK_ID", "--array=0-2%1")
    assert not slurm.job_state(job).is_over
    state = slurm_cluster.wait_for(f"{job}_2", lambda s: s.is_over)
    assert (state.name, state.exit_code) == ("FAILED", 2)
    assert slurm.job_state(f"{job}_0").name == "COMPLETED"
    assert slurm_cluster.wait_for(job, lambda s: s.is_over).name == "FAILED"


def test_preemption_requeues_the_low_job(slurm_cluster) -> None:
    low = slurm_cluster.submit("sleep 300", "-p", "low", "-N4", "--exclusive")
    slurm_cluster.wait_for(low, lambda s: s.name == "RUNNING")
    high = slurm_cluster.submit("sleep 300", "-p", "high", "-N1", "--exclusive")
    slurm_cluster.wait_for(high, lambda s: s.name == "RUNNING")
    state = slurm_cluster.wait_for(low, lambda s: s.fate is Fate.WAITING)
    assert not state.is_over and state.restarts == 1


def test_node_failure_is_resumable(cluster: Maker) -> None:
    mine = cluster("--nodes", "2", "--set", "SlurmdTimeout=5")
    job = mine.submit("sleep 1238", "--nodelist=n02", "--no-requeue")
    wait_for_command("sleep\0001238")
    os.kill(mine.pid("slurmd.n02"), signal.SIGKILL)
    state = mine.wait_for(job, lambda s: s.is_over, timeout_s=120)
    assert (state.name, state.fate) == ("NODE_FAIL", Fate.RESUMABLE)


def test_time_limit_is_resumable(slurm_cluster) -> None:
    job = slurm_cluster.submit("sleep 300", "--time=1")
    slurm_cluster.wait_for(job, lambda s: s.name == "RUNNING")
    # A limit that is over already: the check comes every few seconds, a minute would be the least.
    slurm_cluster.run("scontrol", "update", f"JobId={job}", "EndTime=now")
    state = slurm_cluster.wait_for(job, lambda s: s.is_over, timeout_s=120)
    assert (state.name, state.fate) == ("TIMEOUT", Fate.RESUMABLE)


@pytest.mark.skipif(
    os.getuid() != 0 and shutil.which("slurmdbd", path="/usr/sbin:/usr/bin") is None,
    reason="needs slurmdbd and mariadb, which only root can install",
)
def test_accounting(cluster: Maker) -> None:
    mine = cluster("--nodes", "1", "--accounting")
    job = mine.submit("srun bash -c 'exit 5'; exit 4")
    # slurmdbd learns of the end a moment after slurmctld, which answers until then
    state = mine.wait_for(job, lambda s: s.is_over and s.source == "sacct")
    assert (state.name, state.exit_code) == ("FAILED", 4)
    assert state.derived_exit_code == 5
    os.kill(mine.pid("slurmdbd"), signal.SIGKILL)
    os.kill(mine.pid("mariadbd"), signal.SIGKILL)
    assert tool("up", "--state", str(mine.state)).returncode == 0
    assert slurm.job_state(job).source == "sacct"


def test_a_job_that_slurmctld_forgot(cluster: Maker) -> None:
    mine = cluster("--nodes", "1", "--set", "MinJobAge=2")
    job = mine.submit("exit 4")
    mine.wait_for(job, lambda s: s.source == "jobcomp" and s.exit_code == 4, timeout_s=120)


def test_partitions_are_checked_before_submission(slurm_cluster) -> None:
    slurm.require_partitions(["train", "rollout", ""])
    with pytest.raises(ConfigError, match="'nope' does not exist on this cluster; valid: all, dcs"):
        slurm.require_partitions(["nope"])


def test_an_impossible_request_is_refused_by_sbatch(slurm_cluster, tmp_path: Path) -> None:
    script = tmp_path / "x.sh"
    script.write_text("#!/bin/bash\n")
    with pytest.raises(SlurmError, match=r"no node has|more nodes"):
        slurm.submit(script, ["--nodes=100"])
    with pytest.raises(SlurmError, match="sinfo"):
        slurm.submit(script, ["--partition=nope"])


def test_nested_submission(slurm_cluster, tmp_path: Path) -> None:
    """sbatch inside a step: the inner job gets nothing of the outer one's shape."""
    inner, out = tmp_path / "inner.sh", tmp_path / "out"
    inner.write_text(f"#!/bin/bash\necho $SLURM_NTASKS $SLURM_JOB_NUM_NODES $RELAX_X > {out}\n")
    code = (
        "import pathlib; from relax_hpc import slurm; "
        f"slurm.submit(pathlib.Path({str(inner)!r}), ['-n1', '-N1', '-o', '/dev/null'])"
    )
    root = TOOL.parents[1]
    hosts = tmp_path / "hosts"
    hosts.write_text("n02\nn02\nn03\n")
    environment = f"RELAX_X=kept SLURM_HOSTFILE={hosts} PYTHONPATH={root}"
    slurm_cluster.submit(f'{environment} srun -n1 {sys.executable} -c "{code}"', "-N2", "-n4")
    deadline = time.monotonic() + 60
    while not (out.exists() and out.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.3)
    assert out.read_text() == "1 1 kept\n"


def test_slurmctld_down_for_a_while(cluster: Maker) -> None:
    """Questions wait; the job goes on."""
    mine = cluster("--nodes", "1")
    job = mine.submit("sleep 300")
    mine.wait_for(job, lambda s: s.name == "RUNNING")
    wait_until_saved(mine, job)
    os.kill(mine.pid("slurmctld"), signal.SIGKILL)
    repair = subprocess.Popen(
        ["bash", "-c", f"sleep 2; exec {sys.executable} {TOOL} up --state {mine.state}"],
        stdout=subprocess.DEVNULL,
    )
    assert slurm.job_state(job).name == "RUNNING"
    assert repair.wait(timeout=120) == 0
