"""The megatron model equals transformers: logits, published boxes and export, for any TP x PP."""

import dataclasses
import json
import typing
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from relax_hpc.dcs.layout import Box, TensorSpec, check_coverage
from tests.distributed.launch import run_distributed
from tests.distributed.tiny_models import VOCAB, make_config, make_model, make_rows

LAYOUTS = [(1, 1, False), (2, 1, False), (2, 1, True), (1, 2, False), (2, 2, False), (2, 2, True)]
MODELS = [("qwen3", True), ("qwen3", False), ("llama", True), ("llama", False), ("qwen2", True)]


def _build(folder: str, tp: int, pp: int, sp: bool, is_training: bool = False) -> typing.Any:
    from megatron.core import parallel_state

    from relax_hpc.trainer.build import build_backend

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    ranks = torch.distributed.get_world_size()
    config = make_config(
        Path(folder),
        train={"tp": tp, "pp": pp, "sequence_parallel": sp},
        resources={"train": {"ranks": ranks}},
    )
    return build_backend(config, config.train, is_training)


def _logits(backend: typing.Any, rows: list[typing.Any]) -> dict[int, torch.Tensor]:
    """Whole-vocabulary logits [L, V] of every row, packed; on the ranks of the last stage."""
    from megatron.core import parallel_state

    from relax_hpc.trainer.micro_batch import build_micro_batch, cut_rows

    group = parallel_state.get_tensor_model_parallel_group()
    cut = cut_rows([row.num_tokens for row in rows], 40)
    args = ({}, (), backend.align, backend.device)
    batches = [build_micro_batch(rows, indices, *args) for indices in cut]

    def compute(batch: typing.Any, logits: torch.Tensor) -> typing.Any:
        parts = [torch.empty_like(logits) for _ in range(group.size())]
        torch.distributed.all_gather(parts, logits.contiguous(), group=group)
        return logits.sum(), torch.cat(parts, -1)[0, :, :VOCAB]

    with torch.no_grad():
        outs = backend._run_schedule(backend._model, batches, compute, forward_only=True)
    found = {}
    for batch, out in zip(batches, outs, strict=bool(outs)):
        for span in batch.spans:
            row = rows[span.row]
            start = span.start - row.num_prompt_tokens + 1
            found[span.row] = out[start : start + row.num_tokens]
    return found


def parity(root: str) -> dict[str, float]:
    """Largest logit difference to transformers for every model and layout (4 ranks)."""
    worst = {}
    rows = make_rows(3, groups=3, max_tokens=20)
    for kind, tied in MODELS:
        folder = Path(root) / f"{kind}-{tied}"
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            wanted = [
                reference(torch.tensor(row.fields["tokens"].astype(np.int64))[None]).logits[0]
                for row in rows
            ]
        for tp, pp, sp in LAYOUTS:
            logits = _logits(_build(str(folder), tp, pp, sp), rows)
            differences = [(logits[i] - wanted[i]).abs().max().item() for i in logits]
            worst[f"{kind} tied={tied} tp={tp} pp={pp} sp={sp}"] = max(differences, default=0.0)
    return worst


def test_logits_equal_transformers(tmp_path: Path) -> None:
    for kind, tied in MODELS:
        make_model(tmp_path / f"{kind}-{tied}", kind, tied)
    results = run_distributed(parity, 4, str(tmp_path))
    for name in results[0]:
        differences = [result[name] for result in results]
        assert max(differences) > 0, f"{name}: nothing was compared"
        assert max(differences) < 1e-4, f"{name}: {differences}"


def pieces(folder: str, export: str) -> list[typing.Any]:
    """For TP 2 x PP 2: this rank's boxes with their bytes as hex; also exports."""
    backend = _build(folder, 2, 2, False, is_training=True)
    backend.export_hf(Path(export), Path(folder))
    place = dataclasses.asdict(backend.place)
    specs = [(s.name, s.dtype, s.shape) for s in backend.specs()]
    found = [(b.name, b.start, b.stop, dtype, data.tobytes().hex()) for b, dtype, data in backend.pieces()]
    return [place, specs, found]


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", False), ("llama", True)])
def test_pieces_cover_the_model_once_and_export_loads(
    tmp_path: Path, kind: str, tied: bool
) -> None:
    model = make_model(tmp_path / "model", kind, tied)
    (tmp_path / "export").mkdir()
    results = run_distributed(pieces, 4, str(tmp_path / "model"), str(tmp_path / "export"))
    specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in results[0][1]]
    boxes: dict[int, list[Box]] = {}
    tensors = {spec.name: np.full(spec.shape, np.nan, np.float32) for spec in specs}
    for place, _specs, found in results:
        assert place["shards_per_replica"] == 4
        boxes[place["shard_rank"]] = []
        for name, start, stop, dtype, data in found:
            box = Box(name, tuple(start), tuple(stop))
            boxes[place["shard_rank"]].append(box)
            assert dtype == "float32"
            values = np.frombuffer(bytes.fromhex(data), np.float32)
            tensors[name][box.slices] = values.reshape(box.shape)
    check_coverage(specs, boxes)
    wanted = dict(model.named_parameters())
    assert tensors.keys() == wanted.keys()  # parameters name tied embeddings once
    for name, parameter in wanted.items():
        assert np.array_equal(tensors[name], parameter.detach().numpy()), name
    _check_export(tmp_path / "export", model)


def _check_export(folder: Path, model: transformers.PreTrainedModel) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2  # one file per pipeline stage
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
