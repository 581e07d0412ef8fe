"""Ranks of one role find each other: rank 0 opens a store on a free port and publishes its address.

The key carries role and incarnation, so that a restarted role never meets its own past.
"""

import datetime
import logging
import typing

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from C++

from relax_hpc.control.identity import Identity
from relax_hpc.errors import ControlError
from relax_hpc.log import kv
from relax_hpc.trainer.cpu_device import is_cpu

_log = logging.getLogger(__name__)


class KeyValue(typing.Protocol):
    """The control plane's key-value store (control.registry.Membership)."""

    def publish(self, key: str, value: str) -> None:
        """Store a value."""
        ...

    def wait_for(self, key: str, timeout_s: float, why: str) -> str:
        """Wait until a key has a value."""
        ...


def join_process_group(
    identity: Identity, membership: KeyValue, *, start_timeout_s: float, collective_timeout_s: float
) -> None:
    """Initialise torch.distributed over all ranks of this role: gloo on CPUs, NCCL on GPUs.

    Args:
        identity: of this task.
        membership: joined already.
        start_timeout_s: for all ranks to appear.
        collective_timeout_s: after which a collective gives up.

    Raises:
        DeadlineError: rank 0 did not publish its address.
        ControlError: not all ranks appeared in time.
    """
    key = f"{identity.role}/{identity.incarnation}/store"
    timeout = datetime.timedelta(seconds=start_timeout_s)
    if identity.rank == 0:
        address = identity.bind_address()
        # Port 0: the kernel chooses; the store says which it got.
        store = TCPStore(
            address, 0, identity.world, is_master=True, timeout=timeout, wait_for_workers=False
        )
        membership.publish(key, f"{address}:{store.port}")
    else:
        why = f"rank {identity.rank} of {identity.role} looks for rank 0"
        address, _, port = membership.wait_for(key, start_timeout_s, why).rpartition(":")
        store = TCPStore(address, int(port), identity.world, is_master=False, timeout=timeout)
    _wait_for_ranks(store, identity, timeout)
    dist.init_process_group(
        "gloo" if is_cpu() else "nccl",
        store=store,
        rank=identity.rank,
        world_size=identity.world,
        timeout=datetime.timedelta(seconds=collective_timeout_s),
    )
    _log.info("ranks joined %s", kv(world=identity.world, store=f"{address}:{store.port}"))


def _wait_for_ranks(store: typing.Any, identity: Identity, timeout: datetime.timedelta) -> None:
    """Meet before the first collective, which would wait with the (long) collective time-out."""
    store.set(f"here/{identity.rank}", "1")
    missing = [f"here/{rank}" for rank in range(identity.world)]
    try:
        store.wait(missing, timeout)
    except dist.DistError as err:
        absent = [name.rpartition("/")[2] for name in missing if not store.check([name])]
        raise ControlError(
            f"role {identity.role}: ranks {', '.join(absent)} of {identity.world} did not join in "
            f"{timeout.total_seconds():g} s; look into their logs"
        ) from err
