"""Sharded save and load of model and optimizer by megatron's `torch_dist` format.

Loads at other parallel sizes than it was saved at. Files only: naming, verification and retention
are `recovery.checkpoint`'s.
"""

import typing
from pathlib import Path

from megatron.core import dist_checkpointing, parallel_state

from relax_hpc.trainer.megatron_compat import materialise_adam_state


def save(folder: Path, model: typing.Any, optimizer: typing.Any) -> None:
    """Write all ranks' shards into an existing, empty folder. Collective."""
    dist_checkpointing.save(_state(model, optimizer, is_loading=False), str(folder))


def load(folder: Path, model: typing.Any, optimizer: typing.Any) -> None:
    """Read model and optimizer in place; weights and optimizer state are bit-equal. Collective."""
    materialise_adam_state(optimizer)
    state = dist_checkpointing.load(_state(model, optimizer, is_loading=True), str(folder))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def _state(model: typing.Any, optimizer: typing.Any, is_loading: bool) -> dict[str, typing.Any]:
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        # Reshardable to any TP x PP x DP; through gloo, so that no GPU holds a gathered copy.
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    sharded = model.sharded_state_dict(metadata=metadata)
    state = optimizer.sharded_state_dict(sharded, is_loading=is_loading, metadata=metadata)
    return {"model": sharded, "optimizer": state}
