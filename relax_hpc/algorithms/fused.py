"""Functions of tensors that are one kernel on a GPU: torch.compile there, plain torch elsewhere."""

import functools
import typing
from collections.abc import Callable

import torch

Parameters = typing.ParamSpec("Parameters")


def fused(function: Callable[Parameters, torch.Tensor]) -> Callable[Parameters, torch.Tensor]:
    """Compile `function` when its first argument is on a GPU; shapes may differ from call to call.

    Not on CPUs: there the compiler needs a C++ compiler at run time and tens of seconds, and the
    models are small. On GPUs Triton, which comes with torch, does the work.
    """
    compiled: typing.Any = None

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> torch.Tensor:
        nonlocal compiled
        first = args[0]
        if not (isinstance(first, torch.Tensor) and first.is_cuda):
            return function(*args, **kwargs)
        if compiled is None:
            compiled = torch.compile(function, dynamic=True)
        return typing.cast("torch.Tensor", compiled(*args, **kwargs))

    return call
