"""`relax-hpc preflight` and `doctor` on a real cluster: het groups, MPI, planted faults."""

import copy
import ctypes.util
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.launcher import preflight_step
from relax_hpc.launcher.check_list import Finding
from relax_hpc.launcher.node_checks import NodeNeeds
from relax_hpc.launcher.node_survey import Limits
from relax_hpc.launcher.preflight_step import NodeGroup, PreflightPlan
from relax_hpc.launcher.site import load_site
from tests.launcher_samples import ROOT, SMALL, relax, write_recipe
from tests.slurm.conftest import Cluster

HET: dict[str, Any] = copy.deepcopy(SMALL)
HET["transfer"] = {"arena_mb": 64}
HET["resources"] = {
    "launcher": "slurm",
    "train": {"ranks": 2, "partition": "train"},
    "rollout": {"ranks": 2, "nodes": 2, "partition": "rollout"},
    "dcs": {"partition": "dcs"},
}


@pytest.fixture
def mpi_library(tmp_path: Path) -> Path:
    """A folder in which mpi4py finds MPICH: Debian has no libmpi.so.12, the name of its ABI."""
    library = ctypes.util.find_library("mpich")
    assert library, "tools/slurm_cluster install brings mpich"
    system = next(Path("/usr/lib").glob(f"*/{library}"))
    folder = tmp_path / "mpi"
    folder.mkdir()
    (folder / "libmpi.so.12").symlink_to(system)
    return folder


def test_mpi_spans_two_het_groups(
    slurm_cluster: Cluster, tmp_path: Path, mpi_library: Path
) -> None:
    """Inside of a job, over its components; the rank map of one gather is Slurm's."""
    recipe = write_recipe(tmp_path, HET)
    out = tmp_path / "out.json"
    script = tmp_path / "job.sh"
    script.write_text(
        textwrap.dedent(f"""\
        #!/bin/bash
        #SBATCH --partition=dcs --nodes=1 --output={tmp_path}/job.out
        #SBATCH hetjob
        #SBATCH --partition=train --nodes=1
        #SBATCH hetjob
        #SBATCH --partition=rollout --nodes=2
        export PYTHONPATH={ROOT} LD_LIBRARY_PATH={mpi_library} MPI4PY_MPIABI=mpich
        cd {tmp_path}
        {sys.executable} -m relax_hpc.cli preflight {recipe} --json > {out}
        """)
    )
    # The exit code is 1 where a busy machine made one of its four nodes look slow.
    job_id = slurm_cluster.run("sbatch", "--parsable", str(script)).strip()
    slurm_cluster.wait_for(job_id, lambda state: state.is_over, timeout_s=120)
    said = (tmp_path / "job.out").read_text()
    outcome = json.loads(out.read_text())
    assert outcome["nodes"] == ["n04", "n01", "n02", "n03"], said
    assert outcome["mpi"] == "pmi2", said
    assert outcome["allreduce_ms"] > 0
    found = {finding["check"] for finding in outcome["findings"]}
    assert not found & {"mpi", "silent-node", "unreachable-node", "run-folder", "model-folder"}
    assert outcome["took_s"] < 60
    assert not list((tmp_path / "runs").glob(".preflight-*"))


def test_planted_faults_are_named_without_mpi(slurm_cluster: Cluster, tmp_path: Path) -> None:
    """A slow node, a dead one, and a model that no node can read; by hand, outside of a job."""
    names = ("n01", "n02", "n03", "n04")
    group = NodeGroup(
        options=("--partition=all", f"--nodelist={','.join(names)}"), num_nodes=4, nodes=names
    )
    plan = PreflightPlan(
        groups=(group,),
        site=load_site("local"),
        needs=NodeNeeds(),
        folder=tmp_path,
        model=str(tmp_path / "no model"),
        mpi="none",
        queue_s=60.0,
        limits=Limits(start_s=40.0, pairs_s=50.0),
        step_program=str(Path(__file__).with_name("preflight_faults.py")),
    )
    environ = {**slurm_cluster.environment, "PYTHONPATH": str(ROOT)}
    outcome = preflight_step.run(plan, environ)
    found: dict[str, Finding] = {finding.check: finding for finding in outcome.findings}
    assert outcome.exclude == ("n03", "n04")
    assert found["slow-node"].node == "n03"
    assert "latency" in found["slow-node"].what
    assert (found["silent-node"].node, found["model-folder"].node) == ("n04", "")
    assert found["model-folder"].what.startswith("3 of 4 nodes")
    assert outcome.mpi.startswith("not used")
    assert not outcome.is_good
    # doctor remembers them
    recipe = write_recipe(tmp_path, HET, run__folder=str(tmp_path))
    _, findings = doctor(tmp_path, str(recipe))
    assert {f.node for f in findings if f.check == "slow-node"} == {"n03", "n04"}
    assert "exclude: n[03-04]" in list(preflight_step.lines(outcome))


def doctor(place: Path, *arguments: str) -> tuple[int, list[Finding]]:
    done = relax("doctor", *arguments, "--json", cwd=place)
    assert done.stdout, done.stderr
    return done.returncode, [Finding(**one) for one in json.loads(done.stdout)["findings"]]


def test_doctor_finds_faults_of_the_cluster(slurm_cluster: Cluster, tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path, HET))
    code, findings = doctor(tmp_path, recipe)
    assert code == 0, findings
    estimate = next(f for f in findings if f.check == "start-estimate")
    assert estimate.what.startswith("would start at ")
    scontrol = ("scontrol", "update")
    slurm_cluster.run(*scontrol, "NodeName=n03", "State=DRAIN", "Reason=bad cable")
    slurm_cluster.run(*scontrol, "NodeName=n02", "State=DOWN", "Reason=dead")
    slurm_cluster.run(*scontrol, "PartitionName=train", "MaxTime=10")
    try:
        code, findings = doctor(
            tmp_path, recipe,
            "--set", "resources.dcs.partition=nowhere", "--set", "resources.gpus_per_node=4",
        )  # fmt: skip
    finally:
        slurm_cluster.run(*scontrol, "NodeName=n[02-03]", "State=RESUME")
        slurm_cluster.run(*scontrol, "PartitionName=train", "MaxTime=UNLIMITED")
    said = {finding.check: finding.what for finding in findings}
    assert code == 1
    assert "n03 DRAIN (bad cable" in said["drained-node"]
    assert "n02 DOWN (dead" in said["down-node"]
    assert "time_min=60, partition 'train' allows 10" in said["time-limit"]
    assert "'nowhere' does not exist" in said["partition"]
    assert "too-few-nodes" in said
    assert "invalid partition" in said["start-estimate"]


def test_doctor_finds_a_gres_that_the_nodes_lack(slurm_cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "sbatch").mkdir()
    (tmp_path / "sbatch" / "odd.toml").write_text(
        'gres = "gpu:h800"\nsrun_options = ["--gpus-per-task=1"]\ndirectives = ["--no-requeue"]\n'
    )
    recipe = write_recipe(tmp_path, HET, resources__site="odd", resources__gpus_per_node=2)
    code, findings = doctor(tmp_path, str(recipe))
    errors = {finding.check for finding in findings if finding.severity == "error"}
    assert code == 1
    assert {"gres", "gpus-per-task", "requeue", "start-estimate"} <= errors


def test_nodes_that_do_not_exist_are_refused_at_once(
    slurm_cluster: Cluster, tmp_path: Path
) -> None:
    done = relax("preflight", "--nodes", "n99", "--mpi", "none", cwd=tmp_path)
    assert done.returncode == 1
    assert "Invalid node name" in done.stderr
    assert "Traceback" not in done.stderr
