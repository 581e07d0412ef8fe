"""Which device a task computes on; decided before torch is imported. No torch here."""

import os
from collections.abc import Sequence

from relax_hpc.control.identity import Identity
from relax_hpc.errors import ConfigError

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def choose_device(identity: Identity) -> None:
    """Show this task its GPUs only, or none at all.

    Each rank owns one GPU and sees it as device 0. A CPU run hides GPUs that the machine has, so
    that `torch.cuda.is_available()` means: this task was given one.
    """
    mine = visible_gpus(identity.gpus, os.environ.get(_VISIBLE))
    os.environ[_VISIBLE] = ",".join(mine)
    # megatron orders communication and compute of TP through one hardware queue.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not identity.gpus and identity.address_prefix.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def visible_gpus(places: Sequence[int], visible: str | None) -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES must say for the GPUs of this task.

    A node that is shared with other jobs shows this job `4,5,6,7`, or UUIDs: places count in that
    list. Where a site binds each task to one GPU, that one is the task's, whatever its place.

    Args:
        places: of the task's GPUs, among those that the step sees on the node.
        visible: CUDA_VISIBLE_DEVICES as Slurm set it; None = all GPUs of the node.

    Raises:
        ConfigError: the task sees fewer GPUs than it owns.
    """
    seen = [name.strip() for name in visible.split(",") if name.strip()] if visible else []
    if not seen:
        return [str(place) for place in places]
    if len(seen) == 1 and len(places) == 1:
        return seen
    if any(place >= len(seen) for place in places):
        raise ConfigError(
            f"{_VISIBLE}={visible} shows this task {len(seen)} GPUs and it owns number "
            f"{', '.join(map(str, places))} of its node: tasks must see all GPUs of the step; ask "
            "for GPUs per node and leave --gpus-per-task and --gpu-bind out of the site profile"
        )
    return [seen[place] for place in places]
