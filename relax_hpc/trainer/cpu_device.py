"""Let megatron-core run on a machine without CUDA: its tensors go to the CPU, its NCCL to gloo.

megatron-core names the device "cuda" in some hundred places. `install()` must run before the first
`import megatron`; it does nothing where a GPU is visible, so GPU runs see the real functions.
What it changes, and why each is needed (megatron-core 0.16.1 to 0.19.2, torch 2.13):
- a TorchFunctionMode sends device="cuda" to the CPU and drops pinned memory;
- `Tensor.type()` answers "torch.cuda.FloatTensor": the optimizers compare these strings;
- torch.cuda streams, events and RNG functions become stand-ins that do nothing;
- `all_to_all_single` accepts split sizes as tensors, which gloo does not.
The mode is thread local: run megatron only in the thread that called `install()`.
"""

import contextlib
import os
import sys
import typing

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_installed = False


def is_cpu() -> bool:
    """True if the trainer runs on CPUs: no GPU is visible to this process."""
    return not torch.cuda.is_available()


def install() -> None:
    """Install the stand-ins once; no-op where a GPU is visible. Not undone in this process."""
    global _installed
    if _installed or not is_cpu():
        return
    _installed = True
    # A loopback interface exists everywhere; multi-node CPU runs set GLOO_SOCKET_IFNAME themselves.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # flash_mla (a dependency of sglang) raises OSError(libcuda.so.1) at import, which megatron does
    # not catch; None makes it an ImportError, which it does.
    sys.modules.setdefault("flash_mla", typing.cast("typing.Any", None))
    _replace_cuda_functions()
    _accept_tensor_split_sizes()
    mode: typing.Any = _CudaToCpu()
    mode.__enter__()


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _CudaToCpu(TorchFunctionMode):
    """Rewrite the device arguments of every torch function."""

    def __torch_function__(
        self,
        func: typing.Any,
        types: typing.Any,
        args: tuple[typing.Any, ...] = (),
        kwargs: dict[str, typing.Any] | None = None,
    ) -> typing.Any:
        del types
        if kwargs:
            device = kwargs.get("device")
            if _is_cuda(device) or type(device) is int:
                kwargs["device"] = _CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        special = _SPECIAL.get(func)
        if special is not None:
            return special(args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _same_tensor(args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]) -> typing.Any:
    del kwargs
    return args[0]


def _to(args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]) -> typing.Any:
    if len(args) > 1 and (_is_cuda(args[1]) or type(args[1]) is int):
        args = (args[0], _CPU, *args[2:])
    return torch.Tensor.to(*args, **kwargs)


def _type(args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]) -> typing.Any:
    answer = torch.Tensor.type(*args, **kwargs)
    return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer


_SPECIAL: dict[typing.Any, typing.Callable[..., typing.Any]] = {
    torch.Tensor.cuda: _same_tensor,
    torch.Tensor.pin_memory: _same_tensor,
    torch.Tensor.to: _to,
    torch.Tensor.type: _type,
}


class _NoEvent:
    """Stands for torch.cuda.Event and Stream: the CPU runs everything in order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        del args, kwargs

    def __getattr__(self, name: str) -> typing.Callable[..., typing.Any]:
        known = {"record", "wait", "synchronize", "wait_stream", "wait_event", "record_event"}
        if name not in known:
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def query(self) -> bool:
        """Done: nothing runs in the background."""
        return True

    def elapsed_time(self, end: object) -> float:
        """Return 0 ms: CUDA timers are not used on CPUs."""
        del end
        return 0.0


def _new_nothing() -> typing.Callable[..., None]:
    # A function object of its own per name: torch._dynamo refuses one object under two names.
    def nothing(*args: object, **kwargs: object) -> None:
        del args, kwargs

    return nothing


def _new_stream() -> typing.Callable[..., _NoEvent]:
    def stream(*args: object, **kwargs: object) -> _NoEvent:
        return _NoEvent(*args, **kwargs)

    return stream


def _get_rng_state(*args: object) -> torch.Tensor:
    del args
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: object) -> None:
    del args
    torch.set_rng_state(state)


def _replace_cuda_functions() -> None:
    cuda: typing.Any = torch.cuda
    for name in ("synchronize", "empty_cache", "set_device", "manual_seed"):
        setattr(cuda, name, _new_nothing())
    cuda.current_device = lambda: _CPU
    cuda.Stream = cuda.Event = _NoEvent
    cuda.current_stream, cuda.default_stream = _new_stream(), _new_stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.get_rng_state, cuda.set_rng_state = _get_rng_state, _set_rng_state
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _new_nothing(), _new_nothing()


def _accept_tensor_split_sizes() -> None:
    original = dist.all_to_all_single

    def as_list(sizes: typing.Any) -> typing.Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002, torch's own name
        output_split_sizes: typing.Any = None,
        input_split_sizes: typing.Any = None,
        *args: typing.Any,
        **kwargs: typing.Any,
    ) -> typing.Any:
        """Take the split sizes as tensors or lists."""
        out_sizes, in_sizes = as_list(output_split_sizes), as_list(input_split_sizes)
        return original(output, input, out_sizes, in_sizes, *args, **kwargs)

    dist.all_to_all_single = all_to_all_single
