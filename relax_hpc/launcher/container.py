"""Containers that steps run in: pyxis with enroot (an srun plugin), or Apptainer (a program).

The supervisor stays outside: it needs srun, and images have no Slurm commands. It starts with the
few packages of the base install; the image holds torch, Megatron and the engines.
"""

import dataclasses
import enum
from collections.abc import Sequence
from pathlib import Path

from relax_hpc.errors import ConfigError


class ContainerKind(enum.StrEnum):
    """What starts the containers of a site."""

    PYXIS = "pyxis"
    """srun --container-image (NVIDIA pyxis and enroot)."""
    APPTAINER = "apptainer"
    """`apptainer exec` inside each task."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """Table `[container]` of a site profile."""

    kind: ContainerKind
    image: str
    """pyxis: a .sqsh file or `registry#image:tag`; Apptainer: a .sif file, a folder or `docker://`."""
    mounts: tuple[str, ...] = ()
    """`/host` or `/host:/inside`. Submit folder, run folder, model, data and /dev/shm are there
    without being named."""
    python: str = "python3"
    """Interpreter inside the image."""
    options: tuple[str, ...] = ()
    """More options: of srun (`--container-...`) for pyxis, of `apptainer exec` for Apptainer."""

    def __post_init__(self) -> None:
        # A missing image would make the next word, the program, the image.
        if not self.image or self.image.startswith("-") or self.image != self.image.strip():
            raise ConfigError(f"container.image={self.image!r}: name an image file or address")
        if not self.python or self.python != self.python.strip():
            raise ConfigError(f"container.python={self.python!r}: name the image's interpreter")
        for mount in self.mounts:
            if not all(part.startswith("/") for part in mount.split(":")[:2]) or "," in mount:
                raise ConfigError(
                    f"container.mounts: {mount!r}: write /HOST or /HOST:/INSIDE (absolute paths)"
                )
        for option in self.options:
            if not option.startswith("-") or "\n" in option:
                raise ConfigError(f"container.options: {option!r} is no option")


def mounts_of(container: Container, folders: Sequence[Path]) -> list[str]:
    """Return all mounts as `/host:/inside`.

    Args:
        container: with the site's own.
        folders: that the run reads and writes; each is seen inside under its own path. One that
            lies in another is seen with it.
    """
    found: list[Path] = []
    for folder in sorted({Path("/dev/shm"), *(folder.absolute() for folder in folders)}):
        if not any(folder.is_relative_to(other) for other in found):
            found.append(folder)
    own = [mount if ":" in mount else f"{mount}:{mount}" for mount in container.mounts]
    taken = {mount.split(":")[1] for mount in own}
    return [*own, *(f"{path}:{path}" for path in map(str, found) if path not in taken)]


def srun_container_options(container: Container | None, folders: Sequence[Path]) -> list[str]:
    """Return srun's options that put a step into its container; [] without pyxis.

    Args:
        container: the site's.
        folders: to mount, the working folder first.
    """
    if container is None or container.kind is not ContainerKind.PYXIS:
        return []
    mounts = mounts_of(container, folders)
    return [
        f"--container-image={container.image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={_workdir(folders)}",
        *container.options,
    ]


def container_program(
    container: Container | None,
    program: Sequence[str],
    folders: Sequence[Path],
    with_gpus: bool,
) -> tuple[str, ...]:
    """Return the argument list of a task.

    Args:
        container: the site's; None = the nodes as they are.
        program: an interpreter outside of containers, and its arguments.
        folders: to mount, the working folder first.
        with_gpus: the task uses GPUs.
    """
    if container is None:
        return tuple(program)
    inside = (container.python, *program[1:])
    if container.kind is ContainerKind.PYXIS:
        return inside
    binds = [word for mount in mounts_of(container, folders) for word in ("--bind", mount)]
    return (
        *("apptainer", "exec", *(("--nv",) if with_gpus else ()), *binds),
        *("--pwd", _workdir(folders), *container.options, container.image, *inside),
    )


def _workdir(folders: Sequence[Path]) -> str:
    return str(folders[0].absolute() if folders else Path.cwd())
