"""Steps in containers: what srun and the tasks are told."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from relax_hpc.errors import ConfigError
from relax_hpc.launcher.container import (
    Container,
    ContainerKind,
    container_program,
    mounts_of,
    srun_container_options,
)

FOLDERS = [Path("/home/me/relax"), Path("/home/me/relax/runs/a-1"), Path("/data/model")]
PYXIS = Container(
    kind=ContainerKind.PYXIS,
    image="/images/relax.sqsh",
    mounts=("/scratch", "/etc/site:/etc/here:ro"),
    options=("--no-container-mount-home",),
)
APPTAINER = Container(
    kind=ContainerKind.APPTAINER, image="relax.sif", python="python3.11", options=("--cleanenv",)
)
STEP = ("-m", "relax_hpc.steps.train")
HOST = ("/host/python", *STEP)


def test_pyxis_is_options_of_srun() -> None:
    assert srun_container_options(PYXIS, FOLDERS) == [
        "--container-image=/images/relax.sqsh",
        "--container-mounts=/scratch:/scratch,/etc/site:/etc/here:ro,/data/model:/data/model,"
        "/dev/shm:/dev/shm,/home/me/relax:/home/me/relax",
        "--container-workdir=/home/me/relax",
        "--no-container-mount-home",
    ]
    assert container_program(PYXIS, HOST, FOLDERS, True) == ("python3", *STEP)


def test_apptainer_is_a_program() -> None:
    assert srun_container_options(APPTAINER, FOLDERS) == []
    command = container_program(APPTAINER, HOST, FOLDERS, with_gpus=True)
    assert command == (
        *("apptainer", "exec", "--nv"),
        *("--bind", "/data/model:/data/model", "--bind", "/dev/shm:/dev/shm"),
        *("--bind", "/home/me/relax:/home/me/relax", "--pwd", "/home/me/relax"),
        *("--cleanenv", "relax.sif", "python3.11", *STEP),
    )
    assert "--nv" not in container_program(APPTAINER, HOST, FOLDERS, with_gpus=False)


def test_without_a_container_nothing_changes() -> None:
    assert srun_container_options(None, FOLDERS) == []
    assert container_program(None, HOST, FOLDERS, True) == HOST


def test_the_sites_mount_of_a_place_wins() -> None:
    container = Container(kind=ContainerKind.PYXIS, image="x", mounts=("/fast/model:/data/model",))
    assert mounts_of(container, FOLDERS)[0] == "/fast/model:/data/model"
    assert "/data/model:/data/model" not in mounts_of(container, FOLDERS)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"image": ""}, "container.image=''"),
        ({"image": "--nv"}, "name an image"),
        ({"image": " x"}, "name an image"),
        ({"image": "x", "python": ""}, "interpreter"),
        ({"image": "x", "mounts": ["data"]}, "absolute"),
        ({"image": "x", "mounts": ["/a,/b"]}, "absolute"),
        ({"image": "x", "options": ["nv"]}, "is no option"),
        ({"image": None}, "Expected `str`"),
        ({}, "missing required field `image`"),
        ({"image": "x", "kind": "docker"}, "Invalid enum value 'docker'"),
    ],
)
def test_a_container_that_cannot_be(keys: dict[str, Any], says: str) -> None:
    with pytest.raises((ConfigError, msgspec.ValidationError), match=says):
        msgspec.convert({"kind": "pyxis", **keys}, Container)
