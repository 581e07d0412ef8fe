"""Loads a whole weight version in every tensor parallel rank: SGLang's custom weight loader.

SGLang calls `pull(model, [])` in each rank (`--custom-weight-loader`); nothing but file names
crosses the wire. The version is one safetensors file in shared memory; every rank maps it, and
the model's own `load_weights` copies what belongs to the rank.

That SGLang answers "success" proves little (a tensor with an unknown name is skipped), so each
rank proves that the load was whole: all parameters are NaN before it, none may be after it; and it
reports the bit sum of each parameter, which the caller compares with what was sent.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch

_BITS = {2: torch.int16, 4: torch.int32}


def pull(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Load the version that `request.json` names; this rank's report tells the caller how it went.

    A failure goes into the report: an exception here would end SGLang's scheduler process.
    """
    folder = Path(os.environ["RELAX_SGLANG_WEIGHTS"])
    report: dict[str, Any] = {}
    try:
        request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
        report["version"] = request["version"]
        report["parameters"] = load_whole(model, folder / request["file"])
    except Exception as err:  # noqa: BLE001  # boundary: foreign models raise anything
        report["error"] = f"{type(err).__name__}: {err}"
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    temporary = folder / f".report-{rank}"
    temporary.write_text(json.dumps(report), encoding="utf-8")
    temporary.replace(folder / f"report-{rank}.json")


def load_whole(model: Any, file: Path) -> dict[str, list[int]]:
    """Load a safetensors file and check that every element of every parameter was written.

    Args:
        model: SGLang's module: has `named_parameters` and `load_weights`.
        file: the whole version under canonical names.

    Returns:
        The bit sum of each parameter.

    Raises:
        RuntimeError: the version left parameters unwritten; the model is unusable then.
    """
    from safetensors import safe_open

    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(float("nan"))
        with safe_open(file, framework="pt") as tensors:
            names = tensors.keys()
            model.load_weights((name, tensors.get_tensor(name)) for name in names)
        holes = [name for name, value in parameters.items() if bool(torch.isnan(value).any())]
    if holes:
        raise RuntimeError(f"{file.name} left {len(holes)} parameters unwritten: {holes[:3]}")
    return {name: bit_sum(value) for name, value in parameters.items()}


def bit_sum(tensor: torch.Tensor) -> list[int]:
    """Return [elements, sum of the elements' bit patterns as signed integers, modulo 2**64].

    The sum does not depend on the order, so cutting and joining tensors keeps it.
    """
    bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()])
    return [tensor.numel(), int(bits.sum(dtype=torch.int64)) % 2**64]
