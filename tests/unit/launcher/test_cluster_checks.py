"""Slurm's words are read, and each fault that is planted in them is found, and no other."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from relax_hpc.launcher import cluster_facts
from relax_hpc.launcher.check_list import Severity
from relax_hpc.launcher.cluster_checks import RunAsk, check_cluster
from relax_hpc.launcher.cluster_facts import ClusterFacts, Qos
from relax_hpc.launcher.plan import build_plan
from relax_hpc.launcher.site import Site
from tests.launcher_samples import HEADLINE, config_of

CONFIG = """\
Configuration data as of 2026-11-30T12:06:53
AccountingStorageType   = accounting_storage/none
JobContainerType        = job_container/none
MaxJobCount             = 10000
SchedulerParameters     = sched_interval=2,bf_interval=2
SchedulerType           = sched/backfill
TaskProlog              = (null)
"""
PARTITION = (
    "PartitionName={name} AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL "
    "Default=NO QoS=N/A DefaultTime=NONE MaxNodes=UNLIMITED MaxTime=2-00:00:00 MinNodes=0 "
    "Nodes={nodes} PreemptMode=REQUEUE State=UP TotalCPUs=96 TotalNodes=2\n"
)
PARTITIONS = PARTITION.format(name="train", nodes="g[01-02]") + PARTITION.format(
    name="rollout", nodes="g[03-04]"
)
NODE = (  # 24.05 prints blanks in OS and Reason, and sockets in Gres
    "NodeName={name} Arch=x86_64 CoresPerSocket=48 CPUAlloc=0 CPUEfctv=94 CPUTot=96 CPULoad=0.11 "
    "AvailableFeatures=(null) Gres=gpu:h800:8(S:0-1) NodeAddr={name} NodeHostName={name} "
    "Version=24.05.4 OS=Linux 5.14.0-427 #1 SMP PREEMPT_DYNAMIC Fri RealMemory=1031000 AllocMem=0 "
    "FreeMem=900000 Sockets=2 State=IDLE ThreadsPerCore=1 Partitions={partition} "
    "BootTime=2026-11-30T11:17:58 CfgTRES=cpu=94,mem=1031000M,billing=94,gres/gpu=8\n"
)
NODES = "".join(
    NODE.format(name=f"g0{n}", partition="train" if n < 3 else "rollout") for n in range(1, 5)
)
SITE = Site(name="centre", gres="gpu:h800", directives=("--exclusive",))


def facts_of(
    *, config: str = CONFIG, partitions: str = PARTITIONS, nodes: str = NODES, **more: Any
) -> ClusterFacts:
    values: dict[str, Any] = {
        "version": (24, 5),
        "settings": cluster_facts.parse_settings(config),
        "partitions": cluster_facts.parse_partitions(partitions),
        "nodes": cluster_facts.parse_nodes(nodes),
        "qos": None,
    }
    return ClusterFacts(**{**values, **more})


def ask_of(site: Site = SITE, environ: Mapping[str, str] | None = None, **changes: Any) -> RunAsk:
    config = config_of(HEADLINE, **{"train__chunks_per_step": 1, **changes})
    plan = build_plan(config, site)
    return RunAsk(config=config, site=site, plan=plan, environ=environ or {})


def errors(facts: ClusterFacts, run: RunAsk | None) -> dict[str, str]:
    """Name -> all that is said, of errors and warnings."""
    said: dict[str, str] = {}
    for one in check_cluster(facts, run):
        if one.severity is not Severity.INFO:
            said[one.check] = f"{said.get(one.check, '')}{one.what}\n"
    return said


def test_nothing_is_found_on_a_good_cluster() -> None:
    assert errors(facts_of(), ask_of()) == {}
    assert errors(facts_of(), None) == {}


def test_slurm_words_are_read() -> None:
    facts = facts_of()
    assert [node.name for node in facts.nodes_of("train")] == ["g01", "g02"]
    node = facts.nodes[0]
    assert (node.cpus, node.memory_mb, node.load) == (94, 1031000, 0.11)
    assert node.gres == {"gpu": 8, "gpu:h800": 8}
    assert facts.partitions["train"].max_time_min == 2880
    assert facts.settings["taskprolog"] == ""


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("UNLIMITED", None), ("", None), ("30", 30), ("30:00", 30), ("01:30:00", 90),
        ("1-00", 1440), ("1-12:30:00", 2190), ("00:00:30", 0.5),
    ],
)  # fmt: skip
def test_time_limits(text: str, minutes: float | None) -> None:
    assert cluster_facts.parse_minutes(text) == minutes


@pytest.mark.parametrize(
    ("text", "states"),
    [
        ("IDLE", {"IDLE"}),
        ("IDLE+DRAIN", {"IDLE", "DRAIN"}),
        ("DOWN*+DRAIN", {"DOWN", "NOT_RESPONDING", "DRAIN"}),
        ("MIXED-", {"MIXED", "PLANNED"}),
        ("IDLE~", {"IDLE", "POWERED_DOWN"}),
    ],
)
def test_states(text: str, states: set[str]) -> None:
    assert cluster_facts.parse_states(text) == states


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("(null)", {}),
        ("gpu:2", {"gpu": 2}),
        ("gpu", {"gpu": 1}),
        ("gpu:h800:8(S:0-1)", {"gpu": 8, "gpu:h800": 8}),
        ("gpu:a100:2(S:0,1),gpu:h800:4,nvme:1", {
            "gpu": 6, "gpu:a100": 2, "gpu:h800": 4, "nvme": 1}),
    ],
)  # fmt: skip
def test_gres(text: str, counts: dict[str, int]) -> None:
    assert cluster_facts.parse_gres(text) == counts


def down(state: str, reason: str = "") -> str:
    text = NODES.replace("State=IDLE", f"State={state}", 1)
    return text.replace(" BootTime", f" Reason={reason} [root@now] BootTime", 1)


QOS = {
    "normal": Qos(name="normal", max_wall_min=60, max_submit=None),
    "few": Qos(name="few", max_wall_min=None, max_submit=5),
}


@pytest.mark.parametrize(
    ("facts", "ask", "name", "says"),
    [
        ({"version": (21, 8)}, {}, "slurm-version", "21.08, older"),
        ({"version": (26, 5)}, {}, "slurm-version", "26.05, newer"),
        ({}, {"resources__train": {"ranks": 8, "partition": "gpu"}}, "partition",
         "train: 'gpu' does not exist; there are train, rollout"),
        ({}, {"resources__train": {"ranks": 8}}, "partition", "names no partition"),
        ({"partitions": PARTITIONS.replace("State=UP", "State=DOWN", 1)}, {}, "partition",
         "'train' is DOWN"),
        ({}, {"resources__time_min": 2881}, "time-limit", "time_min=2881, partition 'train'"),
        ({"qos": QOS}, {"resources__qos": "gold"}, "qos", "'gold' does not exist"),
        ({"qos": QOS}, {"resources__qos": "normal", "resources__time_min": 61}, "qos",
         "time_min=61, QOS 'normal' allows 60"),
        ({"partitions": PARTITIONS.replace("AllowQos=ALL", "AllowQos=a,b", 1)},
         {"resources__qos": "c"}, "qos", "'train' refuses QOS 'c'"),
        ({"partitions": PARTITIONS.replace("QoS=N/A", "QoS=normal", 1), "qos": QOS},
         {"resources__time_min": 90}, "qos", "QOS 'normal' allows 60"),
        ({"partitions": PARTITIONS.replace("AllowAccounts=ALL", "AllowAccounts=x", 1)},
         {"resources__account": "y"}, "account", "'train' refuses 'y'"),
        ({"nodes": down("DOWN*", "Not responding")}, {}, "down-node",
         "g01 DOWN+NOT_RESPONDING (Not responding [root@now])"),
        ({"nodes": down("IDLE+DRAIN", "bad GPU")}, {}, "drained-node", "g01 DRAIN (bad GPU"),
        ({"nodes": NODES.replace("CPULoad=0.11", "CPULoad=60.5", 1)}, {}, "busy-node",
         "g01 is idle for Slurm with a load of 60.5"),
        ({}, {"resources__train": {"ranks": 24, "nodes": 3, "partition": "train"}},
         "too-few-nodes", "2 nodes of 'train' fit, 2 work, 3 needed"),
        ({"partitions": PARTITIONS.replace("MaxNodes=UNLIMITED", "MaxNodes=1", 1)},
         {"resources__train": {"ranks": 16, "nodes": 2, "partition": "train"}},
         "too-few-nodes", "allows 1 nodes a job, 2 asked"),
        ({}, {"resources__mem_per_node_gb": 2000}, "too-few-nodes", "0 nodes of 'train' fit"),
        ({"nodes": NODES.replace("gpu:h800", "gpu:a100")}, {}, "gres",
         "gpu:h800:8 in partition 'train': its nodes have gpu, gpu:a100, at most 0"),
        ({"nodes": NODES.replace("gpu:h800:8(S:0-1)", "(null)")}, {}, "gres", "have none"),
        ({}, {"site": dataclasses.replace(SITE, srun_options=("--gpus-per-task=1",))},
         "gpus-per-task", "srun_options --gpus-per-task=1"),
        ({}, {"environ": {"SBATCH_GPUS_PER_TASK": "1"}}, "gpus-per-task",
         "SBATCH_GPUS_PER_TASK=1"),
        ({}, {"site": dataclasses.replace(SITE, directives=("--no-requeue",))}, "requeue",
         "directives have --no-requeue"),
        ({"partitions": PARTITIONS.replace("PreemptMode=REQUEUE", "PreemptMode=CANCEL", 1)}, {},
         "requeue", "PreemptMode=CANCEL"),
        ({"config": CONFIG.replace("sched/backfill", "sched/builtin")}, {}, "het-jobs",
         "sched/builtin"),
        ({"config": CONFIG.replace("bf_interval=2", "disable_hetjob_steps")}, {}, "het-jobs",
         "disable_hetjob_steps"),
        ({"config": CONFIG.replace("job_container/none", "job_container/tmpfs"),
          "nodes": NODES.replace("Partitions=rollout", "Partitions=train,rollout")},
         {"site": dataclasses.replace(SITE, directives=())}, "job-container", "may share a node"),
        ({"num_jobs": 9999}, {}, "max-jobs", "MaxJobCount=10000, 9999 jobs"),
        ({"qos": QOS, "num_own_jobs": 4}, {"resources__qos": "few"}, "max-jobs",
         "QOS 'few' allows 5 jobs, you have 4"),
        ({"start_refused": "allocation failure: Invalid account"}, {}, "start-estimate",
         "Invalid account"),
    ],
)  # fmt: skip
def test_each_planted_fault_is_found(
    facts: dict[str, Any], ask: dict[str, Any], name: str, says: str
) -> None:
    found = errors(facts_of(**facts), ask_of(**ask))
    assert name in found, found
    assert says in found[name]
    also = {"gres": {"too-few-nodes"}, "partition": set()}.get(name, set())
    assert set(found) <= {name, *also, "too-few-nodes"}, found


def test_nodes_that_are_down_may_come_back_but_too_small_ones_never_grow() -> None:
    wide = ask_of(resources__train={"ranks": 16, "nodes": 2, "partition": "train"})
    kinds = {one.check: one.severity for one in check_cluster(facts_of(nodes=down("DOWN*")), wide)}
    assert kinds["too-few-nodes"] is Severity.WARNING
    small = NODES.replace("gpu:h800:8", "gpu:h800:4", 1)
    kinds = {one.check: one.severity for one in check_cluster(facts_of(nodes=small), wide)}
    assert kinds["too-few-nodes"] is Severity.ERROR


def test_a_site_without_requeue_is_told_what_that_means() -> None:
    (info,) = check_cluster(facts_of(), ask_of(dataclasses.replace(SITE, requeue=False)))
    assert (info.check, info.severity) == ("requeue", Severity.INFO)


def test_the_start_estimate_is_passed_on() -> None:
    (info,) = check_cluster(facts_of(start_estimate="would start at noon"), ask_of())
    assert (info.check, info.severity) == ("start-estimate", Severity.INFO)


def test_components_that_take_from_one_partition_are_added_up() -> None:
    both = ask_of(
        resources__train={"ranks": 16, "nodes": 2, "partition": "train"},
        resources__rollout={"ranks": 8, "partition": "train"},
    )
    assert "3 needed" in errors(facts_of(), both)["too-few-nodes"]


def test_nodes_of_one_host_share_its_load() -> None:
    nodes = NODES.replace("CPULoad=0.11", "CPULoad=99").replace("NodeHostName=g0", "NodeHostName=h")
    one_host = "".join(
        line.replace(f"NodeHostName=h{n}", "NodeHostName=h")
        for n, line in enumerate(nodes.splitlines(keepends=True), 1)
    )
    assert "busy-node" in errors(facts_of(nodes=nodes), None)
    assert errors(facts_of(nodes=one_host), None) == {}


def test_qos_rows() -> None:
    text = "normal|1-00:00:00|\nlong||10\n"
    assert cluster_facts.parse_qos(text) == {
        "normal": Qos(name="normal", max_wall_min=1440, max_submit=None),
        "long": Qos(name="long", max_wall_min=None, max_submit=10),
    }
