"""What is wrong with a run's folder, inputs and sizes, before it is queued.

`gather` looks at files; the checks are pure functions over what it found.
"""

import contextlib
import dataclasses
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from relax_hpc.config import Config, LauncherKind, RdmaUse
from relax_hpc.errors import RelaxError
from relax_hpc.launcher import preflight
from relax_hpc.launcher.check_list import Finding, Severity, found
from relax_hpc.launcher.memory_fit import (
    engine_memory,
    num_parameters,
    train_memory,
    type_bytes,
)
from relax_hpc.launcher.node_checks import NodeNeeds
from relax_hpc.launcher.plan import Plan
from relax_hpc.launcher.site import Site
from relax_hpc.topology.node_facts import folder_fault
from relax_hpc.trainer.model_config import ModelShape, read_model_shape

LOCAL_TYPES = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlay", "f2fs", "squashfs"}
)
"""File systems that one machine mounts. NFS exports of them show as nfs on the others."""
_FULL = 0.9
_MIN_INODES = 10_000
_MARGIN_BYTES = 1 << 30
"""For logs, metrics and journals."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FolderFacts:
    """Where runs are to be written."""

    path: str
    """The nearest folder that exists."""
    fault: str = ""
    file_system: str = ""
    """Type of the mount, e.g. lustre."""
    free_bytes: int = 0
    free_files: int | None = None
    """None: the file system does not say."""
    clock_offset_s: float = 0.0
    """This machine's clock minus the file server's."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """A run that was not started yet."""

    config: Config
    site: Site
    plan: Plan
    folder: FolderFacts
    model_fault: str = ""
    input_faults: tuple[str, ...] = ()
    shape: ModelShape | None = None
    """None: the model cannot be read."""
    one_host: bool = False
    """All nodes of the cluster are this machine: any folder is shared."""


def gather(config: Config, site: Site, plan: Plan, *, one_host: bool = False) -> RunFacts:
    """Look at the folder and the inputs of a run (a resolved configuration)."""
    model_fault = ""
    try:
        preflight.check_model(config)
    except RelaxError as err:
        model_fault = str(err)
    return RunFacts(
        config=config,
        site=site,
        plan=plan,
        folder=look_at(Path(config.run.folder)),
        model_fault=model_fault,
        input_faults=tuple(f for f in preflight.missing_inputs(config) if f != model_fault),
        shape=shape_of(config),
        one_host=one_host,
    )


def shape_of(config: Config) -> ModelShape | None:
    """Read the model's shape; None if it cannot be read (`gather` says why)."""
    with contextlib.suppress(RelaxError):
        return read_model_shape(Path(config.model.path))
    return None


def look_at(folder: Path) -> FolderFacts:
    """Look at a folder, or at the nearest one above it that exists."""
    place = folder.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    fault = folder_fault(place)
    try:
        usage = os.statvfs(place)
    except OSError as err:
        return FolderFacts(path=str(place), fault=fault or str(err))
    return FolderFacts(
        path=str(place),
        fault=fault,
        file_system=mount_type(place, _mounts()),
        free_bytes=usage.f_bavail * usage.f_frsize,
        free_files=usage.f_favail if usage.f_files else None,
        clock_offset_s=0.0 if fault else _clock_offset(place),
    )


def _mounts() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    return ""


def mount_type(folder: Path, mounts: str) -> str:
    """Return the type of the file system that holds a folder, from /proc/self/mounts."""
    best, kind = "", ""
    for line in mounts.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), words[1])
        if folder.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, words[2]
    return kind


def _clock_offset(folder: Path) -> float:
    """Compare this clock with the file server's, which sets the time of a new file."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        before = time.time()
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
        changed = os.fstat(file.fileno()).st_mtime
        after = time.time()
        if not before - 0.1 <= changed <= after + 0.1:
            return (before + after) / 2 - changed
    return 0.0


def node_needs(config: Config, site: Site, plan: Plan, shape: ModelShape | None) -> NodeNeeds:
    """Work out what a run needs of every node, for the fullest one."""
    transfer = config.transfer
    engines: dict[tuple[int, int], int] = {}
    for step in plan.steps:
        for part in step.parts if step.role == "rollout" else ():
            for node in part.nodes:
                engines[part.component, node] = engines.get((part.component, node), 0) + 1
    producers = max(engines.values(), default=1)
    weights = num_parameters(shape) * type_bytes(config) if shape else 0
    weights //= max(1, config.resources.train.nodes)
    wanted = (transfer.node_shm_mb or producers * transfer.arena_mb) * 2**20
    return NodeNeeds(
        shm_least_bytes=producers * transfer.extent_mb * 2**20 + weights,
        shm_wanted_bytes=wanted + 2 * weights,  # the version in use and the next one
        gpus=max((component.gpus_per_node for component in plan.components), default=0),
        forces_rdma=transfer.rdma is RdmaUse.FORCE,
        ports=tuple(fixed_ports(config.rollout.sglang_args, site.environment)),
    )


def fixed_ports(
    arguments: Mapping[str, object], environment: Mapping[str, str]
) -> Iterator[tuple[str, int]]:
    """Yield (key, port) of ports that a recipe or a site profile sets."""
    for key, value in arguments.items():
        if key.endswith("port") and str(value).isdigit():
            yield f"rollout.sglang_args.{key}", int(str(value))
    for key, text in environment.items():
        if key.endswith("PORT") and text.isdigit():
            yield f"environment.{key}", int(text)


def run_folder(facts: RunFacts) -> Iterator[Finding]:
    """Judge whether runs can be written."""
    if facts.folder.fault:
        yield found("run-folder", Severity.ERROR, facts.folder.fault)


def shared_folder(facts: RunFacts) -> Iterator[Finding]:
    """Judge whether other nodes can see the folder."""
    nodes = sum(component.nodes for component in facts.plan.components)
    is_alone = nodes < 2 or facts.one_host or facts.config.resources.launcher is LauncherKind.LOCAL
    if not is_alone and facts.folder.file_system in LOCAL_TYPES:
        what = f"{facts.folder.path} is {facts.folder.file_system}, the run has {nodes} nodes"
        yield found("shared-folder", Severity.ERROR, what)


def job_memory(facts: RunFacts) -> Iterator[Finding]:
    """Compare the job's memory with the queue: shared memory counts as memory of the job."""
    asked = facts.config.resources.mem_per_node_gb
    needs = node_needs(facts.config, facts.site, facts.plan, facts.shape)
    if asked and asked * 2**30 < needs.shm_wanted_bytes:
        severity = Severity.WARNING
        if asked * 2**30 < needs.shm_least_bytes:
            severity = Severity.ERROR
        what = f"resources.mem_per_node_gb={asked} is to hold /dev/shm too, which may take"
        yield found("job-memory", severity, f"{what} {needs.shm_wanted_bytes / 2**30:.1f} GiB")


def clock_skew(facts: RunFacts) -> Iterator[Finding]:
    """Compare with the file server."""
    skew = facts.folder.clock_offset_s
    if abs(skew) >= 2:
        severity = Severity.ERROR if abs(skew) >= 60 else Severity.WARNING
        way = "ahead of" if skew > 0 else "behind"
        what = f"this machine is {abs(skew):.1f} s {way} the file server of {facts.folder.path}"
        yield found("clock-skew", severity, what)


def checkpoint_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes of one checkpoint: fp32 master weights and two moments, and the exported weights."""
    return num_parameters(shape) * (12 + 2 * type_bytes(config))


def disk_space(facts: RunFacts) -> Iterator[Finding]:
    """Compare the room with the checkpoints that are kept, and the one that is being written."""
    free = facts.folder.free_bytes
    if facts.shape is not None and not facts.folder.fault:
        one = checkpoint_bytes(facts.config, facts.shape)
        needed = (facts.config.train.keep_checkpoints + 1) * one + _MARGIN_BYTES
        if free < needed:
            severity = Severity.ERROR if free < one + _MARGIN_BYTES else Severity.WARNING
            what = f"{free / 1e9:.1f} GB free in {facts.folder.path}, checkpoints take"
            yield found("disk-space", severity, f"{what} {needed / 1e9:.1f} GB")
    files = facts.folder.free_files
    if files is not None and files < _MIN_INODES:
        what = f"only {files} more files can be made in {facts.folder.path}"
        yield found("disk-space", Severity.ERROR, what)


def inputs(facts: RunFacts) -> Iterator[Finding]:
    """Pass on what is wrong with model, data and reward."""
    if facts.model_fault:
        yield found("model-folder", Severity.ERROR, facts.model_fault)
    for fault in facts.input_faults:
        yield found("inputs", Severity.ERROR, fault)


def _gpu_gb(facts: RunFacts) -> float:
    return facts.site.gpu_memory_gb if facts.config.resources.gpus_per_node else 0.0


def fits_training(facts: RunFacts) -> Iterator[Finding]:
    """Compare the train step with a GPU's memory."""
    gpu_gb = _gpu_gb(facts)
    if not gpu_gb or facts.shape is None:
        return
    memory = train_memory(facts.config, facts.shape)
    what = (
        f"{memory.total_gb:.0f} GB of {gpu_gb:g} (state {memory.state_gb:.0f}, activations "
        f"{memory.activations_gb:.0f})"
    )
    if memory.total_gb > gpu_gb:
        yield found("train-memory", Severity.ERROR, f"estimate {what}")
    elif memory.total_gb > _FULL * gpu_gb:
        yield found("train-memory", Severity.WARNING, f"estimate {what}")


def fits_engines(facts: RunFacts) -> Iterator[Finding]:
    """Compare weights and KV cache of an engine with a GPU's memory."""
    gpu_gb = _gpu_gb(facts)
    if not gpu_gb or facts.shape is None:
        return
    memory = engine_memory(facts.config, facts.shape, gpu_gb)
    left = max(0.0, memory.cache_gb)
    what = (
        f"weights {memory.weights_gb:.1f} GB a GPU, {left:.1f} left for the KV cache, one sample "
        f"of full length takes {memory.sample_gb:.2f}"
    )
    if memory.samples < 1:
        yield found("kv-memory", Severity.ERROR, what)
    elif memory.samples < facts.config.rollout.group_size:
        yield found("kv-memory", Severity.WARNING, f"{what}: less than a group at a time")


RunCheck = Callable[[RunFacts], Iterator[Finding]]

RUN_CHECKS: tuple[RunCheck, ...] = (
    run_folder, shared_folder, job_memory, clock_skew, disk_space, inputs, fits_training,
    fits_engines,
)  # fmt: skip


def check_run(facts: RunFacts) -> list[Finding]:
    """Run all checks of a run."""
    return [finding for check in RUN_CHECKS for finding in check(facts)]
