import pytest

from relax_hpc.errors import ConfigError, SlurmError
from relax_hpc.launcher.allocation import array_task, check_allocation, slurm_allocation
from relax_hpc.launcher.plan import build_plan
from relax_hpc.launcher.site import Site
from tests.launcher_samples import HEADLINE, config_of

# Recorded in a batch script of Slurm 22.05; the variables without suffix describe component 0.
HET = {
    "SLURM_JOB_ID": "42",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST": "n04",
    "SLURM_JOB_CPUS_PER_NODE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "42",
    "SLURM_JOB_ID_HET_GROUP_1": "43",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n04",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[02-03]",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "2",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "12(x1),8",
    "SLURM_JOB_PARTITION_HET_GROUP_0": "dcs",
    "SLURM_JOB_PARTITION_HET_GROUP_1": "rollout",
}
PLAIN = {
    "SLURM_JOB_ID": "50",
    "SLURM_JOB_NODELIST": "gpu[1-2]",
    "SLURM_JOB_CPUS_PER_NODE": "64(x2)",
    "SLURM_JOB_PARTITION": "all",
}


def test_het_job() -> None:
    allocation = slurm_allocation(HET)
    assert allocation.is_het
    assert allocation.job_ids == ("42", "43")
    assert allocation.job_id == "42"
    rollout = allocation.groups[1]
    assert (rollout.nodes, rollout.cpus_per_node, rollout.partition) == (
        ("n02", "n03"),
        8,
        "rollout",
    )


def test_plain_job_and_array_task() -> None:
    assert slurm_allocation(PLAIN).groups[0].nodes == ("gpu1", "gpu2")
    array = {**PLAIN, "SLURM_ARRAY_JOB_ID": "48", "SLURM_ARRAY_TASK_ID": "2"}
    allocation = slurm_allocation(array)
    assert (allocation.job_id, allocation.job_ids) == ("48_2", ("48_2",))
    assert (
        array_task(array),
        array_task(PLAIN),
        array_task({**array, "SLURM_ARRAY_TASK_ID": "0"}),
    ) == (2, None, 0)


def test_outside_of_a_job_the_remedy_is_named() -> None:
    with pytest.raises(ConfigError, match="launcher=local"):
        slurm_allocation({})


def test_a_missing_variable_is_named() -> None:
    broken = {k: v for k, v in HET.items() if k != "SLURM_JOB_NODELIST_HET_GROUP_1"}
    with pytest.raises(SlurmError, match="SLURM_JOB_NODELIST_HET_GROUP_1 is not set in job 42"):
        slurm_allocation(broken)


def test_script_and_recipe_must_agree() -> None:
    plan = build_plan(config_of(HEADLINE), Site(name="test"))
    with pytest.raises(ConfigError, match=r"needs components of \[1, 1\] nodes but job 42 has"):
        check_allocation(plan, slurm_allocation(HET))
