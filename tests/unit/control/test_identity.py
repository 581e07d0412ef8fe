"""Identity: what the launcher writes is what tasks read; bad values name themselves."""

from pathlib import Path

import pytest

from relax_hpc.control.identity import Identity, LocalPlace, task_environment
from relax_hpc.errors import ConfigError
from relax_hpc.runfolder import RunFolder


def test_round_trip_under_srun(tmp_path: Path) -> None:
    environment = task_environment(
        run=RunFolder(tmp_path), role="rollout", index=0, attempt=2, incarnation=5,
        address_prefix="10.1.", gpus=[(0, 1), (2, 3)],
    )  # fmt: skip
    slurm = {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "1",
        "SLURMD_NODENAME": "n03",
    }
    me = Identity.from_env({**slurm, **environment})
    assert (me.role, me.index, me.attempt, me.incarnation) == ("rollout", 0, 2, 5)
    assert (me.rank, me.world, me.local_rank, me.node, me.gpus) == (0, 2, 1, "n03", (2, 3))
    assert me.run.path == tmp_path and me.address_prefix == "10.1."


def test_round_trip_local_wins_over_slurm(tmp_path: Path) -> None:
    place = LocalPlace(rank=0, world=4, local_rank=0, node="laptop")
    environment = task_environment(
        run=RunFolder(tmp_path), role="train", attempt=1, incarnation=1, local=place
    )
    slurm = {"SLURM_PROCID": "7", "SLURM_NTASKS": "9", "SLURM_LOCALID": "3", "SLURMD_NODENAME": "x"}
    me = Identity.from_env({**slurm, **environment})
    assert (me.rank, me.world, me.local_rank, me.node, me.gpus) == (0, 4, 0, "laptop", ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RELAX_RUN": ""}, "RELAX_RUN is not set"),
        ({"RELAX_ROLE": ""}, "RELAX_ROLE is not set"),
        ({"RELAX_INDEX": "one"}, "RELAX_INDEX='one'"),
        ({"RELAX_RANK": "-1"}, "RELAX_RANK=-1"),
        ({"RELAX_GPUS": "0;x", "RELAX_LOCAL_RANK": "1"}, "RELAX_GPUS='0;x'"),
        ({"RELAX_GPUS": "0", "RELAX_LOCAL_RANK": "1"}, "no entry for local rank 1"),
    ],
)
def test_bad_environment_names_the_variable(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Identity.from_env({"RELAX_RUN": "/r", "RELAX_ROLE": "train", **change})


def test_bind_address(tmp_path: Path) -> None:
    def at(prefix: str) -> str:
        run = RunFolder(tmp_path)
        return Identity(run=run, role="dcs", node="n1", address_prefix=prefix).bind_address()

    assert at("127.") == "127.0.0.1"
    assert at("")
    with pytest.raises(ConfigError, match=r"starts with '203\.0\.113\.'"):
        at("203.0.113.")


def test_unknown_role_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="valid are dcs"):
        task_environment(run=RunFolder(tmp_path), role="trainer", attempt=1, incarnation=1)
