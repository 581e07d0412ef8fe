"""Which device a task computes on; decided before torch is imported. No torch here."""

import os

from relax_hpc.control.identity import VISIBLE_GPUS, Identity, visible_gpus


def choose_device(identity: Identity) -> None:
    """Show this task its GPUs only, or none at all.

    Each rank owns one GPU and sees it as device 0. A CPU run hides GPUs that the machine has, so
    that `torch.cuda.is_available()` means: this task was given one.
    """
    mine = visible_gpus(identity.gpus, os.environ.get(VISIBLE_GPUS))
    os.environ[VISIBLE_GPUS] = ",".join(mine)
    # megatron orders communication and compute of TP through one hardware queue.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not identity.gpus and identity.address_prefix.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
