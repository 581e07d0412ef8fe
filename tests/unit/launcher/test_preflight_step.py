"""The srun of a preflight, its target, and what is told of nodes that said nothing."""

import dataclasses
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_hpc.errors import ConfigError, SlurmError
from relax_hpc.launcher import preflight_step, preflight_target, session
from relax_hpc.launcher.allocation import Allocation, Group
from relax_hpc.launcher.check_list import Finding, Severity, found
from relax_hpc.launcher.node_checks import NodeNeeds
from relax_hpc.launcher.node_scores import Tolerance
from relax_hpc.launcher.node_survey import Limits, NodeSurvey
from relax_hpc.launcher.plan import build_plan
from relax_hpc.launcher.preflight_step import NodeGroup, Outcome, PreflightPlan
from relax_hpc.launcher.preflight_target import Target
from relax_hpc.launcher.site import Site
from tests.launcher_samples import HEADLINE, SMALL, config_of, relax

SITE = Site(name="centre", gres="gpu:h800", srun_options=("--constraint=h800",))


def plan_of(*groups: NodeGroup) -> PreflightPlan:
    return PreflightPlan(groups=groups, site=SITE, needs=NodeNeeds(), folder=Path("/runs"))


def outcome(*findings: Finding) -> Outcome:
    return Outcome(
        nodes=("n1", "n2"), findings=findings, took_s=2.0, mpi="pmi2", latency_us=5.0,
        gbytes_per_s=11.0, allreduce_ms=0.5,
    )  # fmt: skip


def test_srun_has_a_section_per_component() -> None:
    allocation = Allocation(
        job_id="7", is_het=True,
        groups=(
            Group(job_id="7", partition="a", nodes=("n1",), cpus_per_node=4),
            Group(job_id="8", partition="b", nodes=("n2", "n3"), cpus_per_node=96),
        ),
    )  # fmt: skip
    plan = build_plan(config_of(HEADLINE, resources__rollout={"ranks": 8, "nodes": 1}), SITE)
    groups = preflight_target.groups_of(allocation, plan, {})
    command = preflight_step.srun_command(plan_of(*groups), "pmi2")
    cut = command.index(":")
    first, second = command[:cut], command[cut:]
    assert {"--het-group=0", "--nodelist=n1", "--mpi=pmi2", "--gres=gpu:h800:8"} <= set(first)
    assert {"--het-group=1", "--nodelist=n2,n3", "--ntasks=2", "--cpus-per-task=96"} <= set(second)
    assert "--constraint=h800" in first
    assert not any("per-task=" in word and "gpu" in word for word in command)


def test_a_recipe_asks_for_its_own_partitions() -> None:
    config = config_of(HEADLINE, resources__account="acc", resources__qos="q")
    target = Target(config=config, plan=build_plan(config, SITE), site=SITE)
    first, second = preflight_target._by_hand(target)
    assert {"--partition=train", "--account=acc", "--qos=q"} <= set(first.options)
    assert "--partition=rollout" in second.options
    by_name = preflight_target._by_hand(
        Target(config=None, plan=None, site=SITE, nodes="n[1-3]", partition="p")
    )
    assert by_name[0].nodes == ("n1", "n2", "n3")
    with pytest.raises(ConfigError, match="give a recipe, or nodes"):
        preflight_target._by_hand(Target(config=None, plan=None, site=SITE))


def test_silent_nodes_are_named_with_their_last_words() -> None:
    plan = plan_of(NodeGroup(options=(), num_nodes=4, nodes=("n1", "n2", "n3", "n4")))
    said = "srun: error: x\npreflight n2: RUN/secret cannot be read\n"
    silent = {f.node: f.what for f in preflight_step._silent(plan, {0: "n1", 3: "n4"}, said)}
    assert silent == {"n2": "RUN/secret cannot be read", "n3": "its task did not report"}
    unknown = plan_of(NodeGroup(options=(), num_nodes=3))
    (one,) = preflight_step._silent(unknown, {0: "n1", 1: "n2"}, "srun: error: lost")
    assert (one.node, one.what) == ("", "1 nodes did not report: srun: error: lost")


def test_srun_tells_whose_task_ended() -> None:
    said = "srun: error: n04: task 3: Killed\nsrun: error: n[07-08]: tasks 6-7: Exited with exit "
    assert preflight_step.lost_nodes(said) == {"n04", "n07", "n08"}
    assert preflight_step.lost_nodes("srun: error: Unable to create step") == set()


def test_only_errors_of_a_node_leave_it_out() -> None:
    told = outcome(
        found("slow-node", Severity.ERROR, "1 GB/s", "n2"),
        found("open-files", Severity.WARNING, "1024", "n1"),
        found("memlock", Severity.ERROR, "2 of 2 nodes"),
    )
    assert told.exclude == ("n2",)
    assert not told.is_good
    tree = told.to_dict()
    assert (tree["exclude"], tree["ok"]) == ("n2", False)
    assert list(preflight_step.lines(told))[-1] == "exclude: n2"


def test_a_run_with_preflight_ends_before_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by default; with it a faulty node ends the attempt with the nodes to leave out."""
    asked: list[Any] = []

    def answer(target: Target, environ: Any) -> Outcome:
        asked.append(target)
        return outcome(found("slow-node", Severity.ERROR, "1 GB/s", "n2"))

    monkeypatch.setattr(session, "test_nodes", answer)

    def preflight(**changes: Any) -> None:
        config = config_of(SMALL, **changes)
        given: Any = SimpleNamespace(config=config, plan=None, site=SITE)
        session._preflight(given, {})

    preflight(resources__launcher="slurm")
    preflight(resources__preflight=True)  # launcher = local has no nodes
    assert asked == []
    with pytest.raises(SlurmError, match=r"slow-node: n2 1 GB/s; sbatch --exclude=n2"):
        preflight(resources__launcher="slurm", resources__preflight=True)


def test_the_command_wants_nodes(tmp_path: Path) -> None:
    done = relax("preflight", cwd=tmp_path, SLURM_CONF="", SLURM_JOB_ID="")
    assert done.returncode == 2
    assert "Slurm" in done.stderr


def test_a_step_that_hangs_is_ended_by_the_clock(tmp_path: Path) -> None:
    """After the first report, and before it: nobody reported in time."""
    limits = Limits(start_s=0.1, pairs_s=0.1, total_s=0.2)
    plan = dataclasses.replace(plan_of(NodeGroup(options=(), num_nodes=1)), limits=limits)
    (tmp_path / "log").touch()
    for first_s in (None, time.monotonic()):
        survey = NodeSurvey(1, limits, Tolerance(), use_mpi=False)
        survey.first_s = first_s
        process = subprocess.Popen(["sleep", "1000"])
        preflight_step._await(process, plan, survey, tmp_path / "log")
        assert process.returncode == -signal.SIGTERM
