"""All that depends on the version of megatron-core (0.16 to 0.19) or works around a defect of it.

Each patch names the defect. They matter only without Transformer Engine and Apex, where megatron
falls back to torch's AdamW; with either installed the optimizer keeps its own `step`.
"""

import queue
import typing
import warnings

import torch


def import_megatron() -> None:
    """Import megatron-core with the CPU stand-ins in place and patch it. Safe to call twice."""
    from relax_hpc.trainer import cpu_device

    cpu_device.install()
    # One warning per absent optional package (Apex, Transformer Engine) and rank says nothing new.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    # DistributedOptimizer asks shards of parameters (no leaves) for their .grad, and means it.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    import megatron.core.transformer.moe.moe_utils as moe_utils

    from relax_hpc.trainer.packed_attention import install_packed_rope

    if not hasattr(moe_utils, "te_general_gemm"):
        # 0.16.1 without Transformer Engine: NameError in RouterGatingLinearFunction
        moe_utils.te_general_gemm = None
    install_packed_rope()
    _patch_distributed_optimizer()
    _save_without_helper_process()


def _save_without_helper_process() -> None:
    """Give the checkpoint writer a plain queue instead of that of a `spawn` manager process.

    The manager is for asynchronous saves; it outlives its parent when that is killed (and ends only
    at interpreter exit), a stray process per rank. A save that is waited for needs none.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()


def _patch_distributed_optimizer() -> None:
    from megatron.core.optimizer import distrib_optimizer

    optimizer: typing.Any = distrib_optimizer.DistributedOptimizer
    if getattr(optimizer, "_relax_patched", False):
        return
    optimizer._relax_patched = True
    set_states, load_state_dict = (
        optimizer._set_main_param_and_optimizer_states,
        optimizer.load_state_dict,
    )

    def set_with_step(
        self: typing.Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]
    ) -> None:
        # The checkpoint keeps one `step` for all; torch's state has it per parameter: KeyError.
        group, order = self.model_param_group_index_map[model_param]
        parameter = self.optimizer.param_groups[group]["params"][order]
        step = self.optimizer.state[parameter].get("step")
        if step is not None and "step" not in tensors:
            tensors = {**tensors, "step": step}
        set_states(self, model_param, tensors)

    def load_with_own_steps(self: typing.Any, state_dict: dict[str, typing.Any]) -> None:
        # Loading gives all parameters the *same* step tensor: AdamW would add N per step, and
        # train on with wrong bias corrections without a word.
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].detach().clone()

    optimizer._set_main_param_and_optimizer_states = set_with_step
    optimizer.load_state_dict = load_with_own_steps


def materialise_adam_state(optimizer: typing.Any) -> None:
    """Give a fresh torch AdamW its (zero) state, which `sharded_state_dict` asserts to be there."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if not isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
            continue  # Transformer Engine or Apex, or a rank without parameters
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            if not inner.state[parameter]:
                inner.state[parameter].update(
                    step=torch.tensor(0.0),
                    exp_avg=torch.zeros_like(parameter.data),
                    exp_avg_sq=torch.zeros_like(parameter.data),
                )


def set_learning_rate(optimizer: typing.Any, lr: float, weight_decay: float) -> None:
    """Set both for the next step, as megatron's scheduler does: wd_mult = 0 on norms and biases."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)
