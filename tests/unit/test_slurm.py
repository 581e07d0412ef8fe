"""Host lists, job ids, states, and the commands against recorded answers of fake executables."""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc import slurm
from relax_hpc.errors import ConfigError, RelaxError, SlurmError
from relax_hpc.slurm import Fate, compress_hostlist, expand_hostlist, parse_job_id, parse_state

# --- host lists: answers of scontrol 22.05.8 ---------------------------------------------

EXPANSIONS = {
    "gpu[001-003,007],login1": "gpu001 gpu002 gpu003 gpu007 login1",
    "rack[1-2]n[01-04]": "rack1n01 rack1n02 rack1n03 rack1n04 rack2n01 rack2n02 rack2n03 rack2n04",
    "n[1-2]m[3-4]k[5-6]": "n1m3k5 n1m3k6 n2m3k5 n2m3k6 n1m4k5 n1m4k6 n2m4k5 n2m4k6",
    "a[1-2]b[3-4]c[5-6]d[7-8]": (
        "a1b3c5d7 a1b3c5d8 a2b3c5d7 a2b3c5d8 a1b4c5d7 a1b4c5d8 a2b4c5d7 a2b4c5d8 "
        "a1b3c6d7 a1b3c6d8 a2b3c6d7 a2b3c6d8 a1b4c6d7 a1b4c6d8 a2b4c6d7 a2b4c6d8"
    ),
    "n[1-3,5,07]": "n1 n2 n3 n5 n07",
    "n[001-10]": "n001 n002 n003 n004 n005 n006 n007 n008 n009 n010",
    "n[9-0011]": "n9 n10 n11",
    "n[00-100]": " ".join([*(f"n{k:02d}" for k in range(100)), "n100"]),
    "n1,n1,n[1-2]": "n1 n1 n1 n2",
    "[1-3]": "1 2 3",
    "n[1-2][3-4]": "n13 n14 n23 n24",
    " n1, n2": "n1 n2",
    "n1,,n2": "n1 n2",
    "n[1-2],": "n1 n2",
    "a-[1-2]-b[3-4]": "a-1-b3 a-1-b4 a-2-b3 a-2-b4",
    "": "",
    # reports of parsers that got these wrong
    "nodeA,nodeB[001,003],nodeC": "nodeA nodeB001 nodeB003 nodeC",
    "host-[001-002]": "host-001 host-002",
    "nodes[006,011]": "nodes006 nodes011",
    "rack0_blade[08-10]": "rack0_blade08 rack0_blade09 rack0_blade10",
    "rack_1,a.b,n": "rack_1 a.b n",
    "a[01-03,7],b": "a01 a02 a03 a7 b",
}
NEWER = {  # valid from Slurm 23.11 on
    "n[01-03]-ib": "n01-ib n02-ib n03-ib",
    "dgx-a[1-2].c.l": "dgx-a1.c.l dgx-a2.c.l",
    "a[0-1]b[0-1]c": "a0b0c a0b1c a1b0c a1b1c",
}
MALFORMED = (
    "n[3-1]", "n[]", "n[a-b]", "n[-3]", "n[1,]", "n[1", "n]", "n[1]]", "n[[1]]", "n[+1]", "n[ 1-2]",
    "a b", "n[1-2-3]", "n[1-999999999]", "n[1-1000]m[1-1000]", "n[1-200000],m[1-200000]",
)  # fmt: skip


@pytest.mark.parametrize("text", [*EXPANSIONS, *NEWER])
def test_expands(text: str) -> None:
    assert expand_hostlist(text) == {**EXPANSIONS, **NEWER}[text].split()


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_host_lists_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="host list"):
        expand_hostlist(text)


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs Slurm's scontrol as oracle")
@pytest.mark.parametrize("text", EXPANSIONS)
def test_expands_like_scontrol(text: str, tmp_path: Path) -> None:
    done = _scontrol(tmp_path, "hostnames", text)
    assert done.stdout.split() == expand_hostlist(text)


COMPRESSIONS = {
    "gpu3,gpu1,gpu2": "gpu[3,1-2]",
    "n9,n10": "n[9-10]",
    "n09,n10": "n[09-10]",
    "n9,n010": "n[9,010]",
    "a1b1,a1b2,a2b1": "a1b[1-2],a2b1",
    "n1,n1,n2": "n[1,1-2]",
    "1,2,3": "[1-3]",
    "n01-ib,n02-ib": "n01-ib,n02-ib",
    "n1,n2,m1,n3": "n[1-2],m1,n3",
    "n001,n2,n3": "n[001,2-3]",
    "n99,n100,n101": "n[99-101]",
    "n099,n100": "n[099-100]",
    "n1,m,n2": "n1,m,n2",
    "x": "x",
}


@pytest.mark.parametrize("text", COMPRESSIONS)
def test_compresses(text: str) -> None:
    assert compress_hostlist(text.split(",")) == COMPRESSIONS[text]


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs Slurm's scontrol as oracle")
@pytest.mark.parametrize("text", COMPRESSIONS)
def test_compresses_like_scontrol(text: str, tmp_path: Path) -> None:
    assert _scontrol(tmp_path, "hostlist", text).stdout.strip() == COMPRESSIONS[text]


def _scontrol(folder: Path, what: str, text: str) -> subprocess.CompletedProcess[str]:
    conf = folder / "slurm.conf"  # host lists need no cluster, but scontrol wants a file
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n1\n")
    return subprocess.run(
        ["scontrol", "show", what, text],
        env={**os.environ, "SLURM_CONF": str(conf)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )


def test_compress_refuses_what_is_no_host() -> None:
    for host in ("", "n[1-2]", "a,b", "a b"):
        with pytest.raises(ConfigError, match="host name"):
            compress_hostlist([host])


@given(st.lists(st.from_regex(r"[a-z]{0,3}-?[0-9]{0,4}", fullmatch=True).filter(bool)))
def test_expand_undoes_compress(hosts: list[str]) -> None:
    assert expand_hostlist(compress_hostlist(hosts)) == hosts


@given(st.text(alphabet="n0123456789[],- ", max_size=20))
def test_expand_never_fails_in_another_way(text: str) -> None:
    try:
        hosts = expand_hostlist(text)
    except ConfigError:
        return
    assert all(host and not set("[], ") & set(host) for host in hosts)


# --- job ids -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "request_form", "tasks"),
    [
        ("123", "123", None),
        ("123_4", "123_4", [4]),
        ("123_[0-6:2%4]", "123_[0-6:2%4]", [0, 2, 4, 6]),
        ("123_[0,3-5]", "123_[0,3-5]", [0, 3, 4, 5]),
        ("123_[0-3,...]", "123_[0-3,...]", None),
        ("123_[7%1]", "123_[7%1]", [7]),
        ("123_*", "123_*", None),
        ("123+0", "123", None),
        ("123+1", "123", None),
        ("123.0", "123", None),
        ("123.batch", "123", None),
        ("123.extern", "123", None),
        ("123_4.0", "123_4", [4]),
        ("123_4.batch", "123_4", [4]),
        ("123+1.0", "123", None),
    ],
)
def test_job_ids(text: str, request_form: str, tasks: list[int] | None) -> None:
    parsed = parse_job_id(text)
    assert parsed.job == 123
    assert str(parsed) == text
    assert parsed.request == request_form
    assert parsed.array_tasks == tasks


def test_job_id_of_sbatch_parsable() -> None:
    assert str(parse_job_id("123;cluster2\n")) == "123"


@pytest.mark.parametrize(
    "text",
    ["", "abc", "12a", "123_", "123_[]", "123_[a]", "123_[1-]", "123_[1:0]", "123+", "123.x", "-1",
     "123_[0-6:0]", "123_[%4]", "123_4+1", "1 2", "123_[1,,2]"],
)  # fmt: skip
def test_what_is_no_job_id(text: str) -> None:
    with pytest.raises(ConfigError, match="job id"):
        parse_job_id(text)


# --- states ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "fate"),
    [
        ("COMPLETED", "COMPLETED", Fate.DONE),
        ("CANCELLED by 1000", "CANCELLED", Fate.CANCELLED),
        ("CANCELLED+", "CANCELLED", Fate.CANCELLED),
        ("OUT_OF_ME+", "OUT_OF_MEMORY", Fate.FAILED),
        ("TIMEOUT", "TIMEOUT", Fate.RESUMABLE),
        ("PREEMPTED", "PREEMPTED", Fate.RESUMABLE),
        ("NODE_FAIL", "NODE_FAIL", Fate.RESUMABLE),
        ("DEADLINE", "DEADLINE", Fate.CANCELLED),
        ("CG", "COMPLETING", Fate.RUNNING),
        ("COMPLETING", "COMPLETING", Fate.RUNNING),
        ("REQUEUED", "REQUEUED", Fate.WAITING),
        ("FAILED,REQUEUED", "REQUEUED", Fate.WAITING),
        ("PENDING|SPECIAL_EXIT", "PENDING", Fate.WAITING),
        ("running", "RUNNING", Fate.RUNNING),
    ],
)
def test_states(text: str, name: str, fate: Fate) -> None:
    assert parse_state(text) == (name, fate)


MANUAL = (
    "BOOT_FAIL CANCELLED COMPLETED CONFIGURING COMPLETING DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY "
    "PENDING PREEMPTED RUNNING RESV_DEL_HOLD REQUEUE_FED REQUEUE_HOLD REQUEUED RESIZING REVOKED "
    "SIGNALING SPECIAL_EXIT STAGE_OUT STOPPED SUSPENDED TIMEOUT LAUNCH_FAILED RECONFIG_FAIL "
    "EXPEDITING POWER_UP_NODE"
)


def test_every_state_of_the_manual_is_mapped(caplog: pytest.LogCaptureFixture) -> None:
    for name in MANUAL.split():
        assert parse_state(name)[0] == name
    assert not caplog.records


@pytest.mark.parametrize("text", ["BRAND_NEW", "", "???"])
def test_an_unknown_state_is_resumable_with_a_warning(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse_state(text)[1] is Fate.RESUMABLE
    assert "unknown Slurm job state" in caplog.text


# --- commands against recorded answers ---------------------------------------------------

Fake = Callable[..., None]

JOB = (
    "JobId={raw} {ids}JobName=a JobState=FAILED b UserId=root(0) GroupId=root(0) MCS_label=N/A "
    "Account=(null) QOS=(null) JobState={state} Reason={reason} Dependency=(null) Requeue=1 "
    "Restarts=2 BatchFlag=1 Reboot=0 ExitCode={exit} DerivedExitCode=7:0 NodeList={nodes} "
    "Command=/home/x y/run.sh JobState=NO WorkDir=/home/x\n"
)
NO_ACCOUNTING = "Slurm accounting storage is disabled"
NO_JOB = "slurm_load_jobs error: Invalid job id specified"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put executables with recorded answers on PATH; `calls` in the folder holds what was asked."""
    folder = tmp_path / "fake bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setattr(slurm, "ASK_PATIENCE_S", 3.0)

    def make(name: str, out: str = "", err: str = "", code: int = 0, script: str = "") -> None:
        path = folder / name
        body = script or f"sys.stdout.write({out!r}); sys.stderr.write({err!r}); sys.exit({code})"
        log = f"open({str(tmp_path / 'calls')!r}, 'a').write(repr(sys.argv[1:]) + '\\n')"
        path.write_text(f"#!{sys.executable}\nimport sys, os\n{log}\n{body}\n")
        path.chmod(0o755)

    make("sbatch", out="17\n")
    return make


def test_state_from_sacct(fake: Fake) -> None:
    fake("sacct", out="17|17|CANCELLED by 1000|0:15|0:0|n[01-02]\n")
    state = slurm.job_state("17")
    assert (state.name, state.fate, state.source) == ("CANCELLED", Fate.CANCELLED, "sacct")
    assert (state.exit_code, state.signal, state.nodes) == (0, 15, "n[01-02]")
    assert state.is_over


def test_het_state_from_sacct_is_the_leaders(fake: Fake) -> None:
    fake("sacct", out="17+0|17|RUNNING|0:0|0:0|n01\n17+1|18|TIMEOUT|0:0|0:0|n02\n")
    state = slurm.job_state("17")
    assert state.name == "RUNNING" and not state.is_over
    assert state.components == (("17+0", "RUNNING"), ("17+1", "TIMEOUT"))
    assert slurm.job_state("17+1").name == "TIMEOUT"
    assert slurm.job_state("18").name == "TIMEOUT"


def test_state_of_an_array_is_that_of_its_liveliest_task(fake: Fake) -> None:
    fake("sacct", out="17_0|18|FAILED|1:0|0:0|n1\n17_[1-3%2]|17|PENDING|0:0|0:0|None assigned\n")
    assert slurm.job_state("17").name == "PENDING"
    assert slurm.job_state("17_0").name == "FAILED"
    assert slurm.job_state("17_2").nodes == ""


def test_without_accounting_scontrol_answers(fake: Fake) -> None:
    fake("sacct", err=NO_ACCOUNTING, code=1)
    line = JOB.format(raw=17, ids="", state="NODE_FAIL", reason="None", exit="1:0", nodes="n01")
    fake("scontrol", out=line)
    state = slurm.job_state("17")
    assert (state.name, state.fate) == ("NODE_FAIL", Fate.RESUMABLE)
    assert (state.source, state.restarts, state.derived_exit_code) == ("scontrol", 2, 7)
    assert state.reason == ""


def test_scontrol_het_lines(fake: Fake) -> None:
    fake("sacct", err=NO_ACCOUNTING, code=1)
    common = {"exit": "0:0", "nodes": "n01", "reason": "None"}
    lines = [
        JOB.format(raw=17, ids="HetJobId=17 HetJobOffset=0 ", state="COMPLETED", **common),
        JOB.format(raw=18, ids="HetJobId=17 HetJobOffset=1 ", state="RUNNING", **common),
    ]
    fake("scontrol", out="".join(lines))
    assert slurm.job_state("17").name == "COMPLETED"
    assert slurm.job_state("17").components == (("17+0", "COMPLETED"), ("17+1", "RUNNING"))


def test_a_forgotten_job_is_found_in_the_completion_log(fake: Fake, tmp_path: Path) -> None:
    log = tmp_path / "jobcomp.log"
    record = (
        "JobId={} UserId=root(0) GroupId=root(0) Name={} JobState={} Partition=all TimeLimit=9 "
        "NodeList=n01 WorkDir=/a b Cluster=unknown DerivedExitCode=1:0 ExitCode=3:0 \n"
    )
    log.write_text(
        record.format(17, "first run", "NODE_FAIL")
        + record.format(17, "x JobState=COMPLETED Partition=y", "FAILED")
        + record.format(171, "other", "COMPLETED")
    )
    fake("sacct", err=NO_ACCOUNTING, code=1)
    config = f"JobCompLoc = {log}\nJobCompType = jobcomp/filetxt\n"
    fake("squeue", err=NO_JOB, code=1)
    fake(
        "scontrol",
        script=(
            f"if sys.argv[1:] == ['show', 'config']: print({config!r}); sys.exit(0)\n"
            f"print({NO_JOB!r}, file=sys.stderr); sys.exit(1)"
        ),
    )
    state = slurm.job_state("17")
    assert (state.name, state.source, state.exit_code) == ("FAILED", "jobcomp", 3)


def test_a_job_that_nobody_knows(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    fake("sacct", err=NO_ACCOUNTING, code=1)
    fake("squeue", err=NO_JOB, code=1)
    script = (
        f"if 'config' in sys.argv: sys.exit(0)\nprint({NO_JOB!r}, file=sys.stderr); sys.exit(1)"
    )
    fake("scontrol", script=script)
    state = slurm.job_state("17")
    assert (state.name, state.fate) == ("UNKNOWN", Fate.RESUMABLE)
    assert "no source of Slurm knows" in caplog.text


SILENCE = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


def test_questions_wait_for_a_restarted_slurmctld(fake: Fake, tmp_path: Path) -> None:
    fake("sacct", err=NO_ACCOUNTING, code=1)
    line = JOB.format(raw=17, ids="", state="RUNNING", reason="None", exit="0:0", nodes="n01")
    marker = tmp_path / "second"
    fake(
        "scontrol",
        script=(
            f"if not os.path.exists({str(marker)!r}):\n"
            f"    open({str(marker)!r}, 'w'); print({SILENCE!r}, file=sys.stderr); sys.exit(1)\n"
            f"print({line!r}, end='')"
        ),
    )
    assert slurm.job_state("17").name == "RUNNING"


def test_a_silent_slurmctld_is_an_error_and_no_state(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "ASK_PATIENCE_S", 0.0)
    fake("sacct", err=NO_ACCOUNTING, code=1)
    fake("scontrol", err=SILENCE, code=1)
    with pytest.raises(SlurmError, match="Unable to contact"):
        slurm.job_state("17")


def test_submit(fake: Fake, tmp_path: Path) -> None:
    fake("sbatch", out="sbatch: note\n42;cluster\n")
    script = tmp_path / "a 'b' c.sh"
    script.write_text("#!/bin/bash\n")
    assert slurm.submit(script, ["--time=5"]) == "42"
    asked = (tmp_path / "calls").read_text()
    assert asked == repr(["--parsable", "--time=5", str(script)]) + "\n"


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("Batch job submission failed: Invalid partition name specified", "sinfo"),
        ("Batch job submission failed: Invalid account or account/partition", "resources.account"),
        ("Invalid generic resource (gres) specification", "GRES"),
        ("Requested node configuration is not available", "no node has"),
    ],
)
def test_submit_errors_carry_the_remedy(fake: Fake, message: str, remedy: str) -> None:
    fake("sbatch", err=f"sbatch: error: {message}\n", code=1)
    with pytest.raises(SlurmError, match=remedy):
        slurm.submit(Path("job.sh"))


def test_garbage_from_sbatch_is_an_error(fake: Fake) -> None:
    for answer in ("", "no id\n", "\x00\xff"):
        fake("sbatch", out=answer)
        with pytest.raises(SlurmError, match="instead of a job id"):
            slurm.submit(Path("job.sh"))


def test_a_command_that_hangs_ends_at_its_deadline(fake: Fake) -> None:
    fake("sbatch", script="import time; time.sleep(60)")
    with pytest.raises(SlurmError, match="no answer in"):
        slurm.run_command(["sbatch"], timeout_s=0.3)


def test_no_slurm_is_a_usage_error_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for call in (
        lambda: slurm.job_state("1"),
        lambda: slurm.submit(Path("x")),
        slurm.require_slurm,
    ):
        with pytest.raises(ConfigError, match="no Slurm on this machine: sbatch not found") as info:
            call()
        assert info.value.exit_code == 2


def test_a_missing_slurm_conf_is_said_at_once(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    with pytest.raises(ConfigError, match=r"SLURM_CONF=/nowhere/slurm\.conf does not exist"):
        slurm.job_state("1")


def test_partitions(fake: Fake) -> None:
    out = "PartitionName=a Default=YES Nodes=n1 State=UP X=1\nPartitionName=b Nodes=n2 State=DOWN\n"
    fake("scontrol", out=out)
    assert slurm.list_partitions() == {"a": "UP", "b": "DOWN"}
    slurm.require_partitions(["a", ""])
    with pytest.raises(ConfigError, match="'nope' does not exist on this cluster; valid: a, b"):
        slurm.require_partitions(["a,nope"])
    with pytest.raises(ConfigError, match="'b' is DOWN"):
        slurm.require_partitions(["b"])


def test_requeue_excludes_and_starts_at_once(fake: Fake, tmp_path: Path) -> None:
    fake("scontrol")
    slurm.requeue("17+0", exclude=["n01", "n02"])
    asked = (tmp_path / "calls").read_text().splitlines()
    assert asked == [
        "['requeuehold', '17']",
        "['--oneliner', '--details', 'show', 'job', '17']",
        "['update', 'JobId=17', 'ExcNodeList=n01,n02']",
        "['release', '17']",
        "['update', 'JobId=17', 'StartTime=now']",
    ]


def test_requeue_that_the_site_forbids(fake: Fake) -> None:
    fake("scontrol", err="Requested operation is presently disabled for job 17", code=1)
    with pytest.raises(SlurmError, match="--no-requeue"):
        slurm.requeue("17")


def test_cancel_of_a_job_that_is_over_is_harmless(fake: Fake) -> None:
    fake(
        "scancel",
        err="scancel: error: Kill job error on job id 17: Invalid job id specified",
        code=1,
    )
    slurm.cancel("17")
    fake(
        "scancel",
        err="scancel: error: Kill job error on job id 17: Access/permission denied",
        code=1,
    )
    with pytest.raises(RelaxError, match="another user"):
        slurm.cancel("17")


# --- environments ------------------------------------------------------------------------

INSIDE = {
    "PATH": "/bin", "HOME": "/root", "SLURM_CONF": "/c", "SLURM_JOB_ID": "5",
    "SLURM_HOSTFILE": "/h", "SLURM_NNODES": "2",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_CPU_BIND_LIST": "0x1", "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4", "SLURM_CPUS_PER_TASK": "2", "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "n[01-02]", "SLURM_NTASKS_HET_GROUP_1": "8", "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_1": "6", "SLURM_EXPORT_ENV": "NONE", "SBATCH_PARTITION": "x",
    "SRUN_CPUS_PER_TASK": "2", "PMI_RANK": "0", "PMIX_RANK": "0", "SLURM_PROCID": "3",
    "SLURM_RESTART_COUNT": "1", "SLURM_GPUS_PER_NODE": "8", "SLURMD_NODENAME": "n01",
    "SLURM_STEP_ID": "1", "RELAX_RUN": "/r",
}  # fmt: skip


def test_nested_submission_inherits_nothing_of_the_job() -> None:
    clean = slurm.submission_environment(INSIDE)
    assert clean == {"PATH": "/bin", "HOME": "/root", "SLURM_CONF": "/c", "RELAX_RUN": "/r"}


def test_steps_keep_the_allocation_and_no_options() -> None:
    clean = slurm.step_environment(INSIDE)
    kept = {
        "PATH", "HOME", "SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_HET_SIZE",
        "SLURM_NTASKS_HET_GROUP_1", "SLURM_JOB_ID_HET_GROUP_1", "SLURM_RESTART_COUNT", "RELAX_RUN",
        "SBATCH_PARTITION",
    }  # fmt: skip
    assert set(clean) == kept
