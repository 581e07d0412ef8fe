"""Write the model as a Hugging Face folder: one safetensors file per pipeline stage, and an index.

The first tensor parallel rank of each stage receives the other ranks' boxes; all ranks know all
boxes from the parameters' shapes, so nothing but raw tensors is sent.
"""

import json
import shutil
import typing
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from relax_hpc.errors import CheckpointError
from relax_hpc.runfolder import write_atomic
from relax_hpc.trainer.hf_weights import Held, dtype_name

_INDEX = "model.safetensors.index.json"


def write_stage(by_tp_rank: typing.Sequence[list[Held]], dtype: torch.dtype, folder: Path) -> None:
    """Gather this pipeline stage's tensors on its first rank, which writes them.

    Called by all ranks of one replica. Args:
        by_tp_rank: boxes of each tensor parallel rank of this stage; views of the calling rank.
        dtype: of the file.
        folder: exists; gets `model-STAGE-of-STAGES.safetensors`.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    mine = dist.get_rank(group)
    tensors: dict[str, torch.Tensor] = {}
    for tp_rank, held in enumerate(by_tp_rank):
        for item in (item for item in held if not item.is_copy):
            if mine == tp_rank == 0:
                part = item.view.detach()
            elif mine == tp_rank:
                dist.send(item.view.detach().contiguous(), ranks[0], group=group)
                continue
            elif mine == 0:
                part = torch.empty_like(item.view, memory_format=torch.contiguous_format)
                dist.recv(part, ranks[tp_rank], group=group)
            else:
                continue
            _place(tensors, item, part.to(device="cpu", dtype=dtype))
    if mine == 0:
        _write(tensors, folder)


def _place(tensors: dict[str, torch.Tensor], item: Held, part: torch.Tensor) -> None:
    """Put a box into its tensor, which grows to hold it (boxes come in order of tp rank)."""
    box = item.box
    whole = tensors.get(box.name)
    size = box.stop if whole is None else tuple(map(max, box.stop, whole.shape))
    if whole is None or tuple(whole.shape) != size:
        grown = torch.zeros(size, dtype=part.dtype)
        if whole is not None:
            grown[tuple(slice(0, n) for n in whole.shape)] = whole
        tensors[box.name] = whole = grown
    whole[box.slices] = part.reshape(box.shape)


def _write(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    stage = parallel_state.get_pipeline_model_parallel_rank() + 1
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    path = folder / f"model-{stage:05d}-of-{stages:05d}.safetensors"
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(path)


def write_index(folder: Path, source: Path, dtype: torch.dtype) -> None:
    """Write the index and copy configuration and tokenizer. One rank, after all stages wrote."""
    from safetensors import safe_open

    weight_map: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            weight_map |= dict.fromkeys(file.keys(), path.name)
    if not weight_map:
        raise CheckpointError(f"HF export {folder}: no stage wrote a *.safetensors file")
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    for path in source.iterdir():
        if path.is_file() and ".safetensors" not in path.name and path.suffix != ".bin":
            shutil.copyfile(path, folder / path.name)
    tree = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for key in {"dtype", "torch_dtype"} & tree.keys():
        tree[key] = dtype_name(dtype)
    write_atomic(folder / "config.json", json.dumps(tree, indent=2) + "\n")
    write_atomic(folder / _INDEX, json.dumps(index, indent=2) + "\n")
