"""The megatron model equals transformers: logits, published boxes and export, for any TP x PP."""

import json
import typing
from pathlib import Path

import numpy as np
import pytest
import torch

from relax_hpc.config import TrainConfig
from relax_hpc.dcs.layout import Box, TensorSpec, check_coverage
from relax_hpc.trainer.hf_weights import open_hf_folder
from relax_hpc.trainer.megatron_compat import import_megatron
from relax_hpc.trainer.model_config import read_model_shape
from tests.distributed.launch import run_distributed
from tests.distributed.tiny_models import VOCAB, make_model, make_rows

pytestmark = pytest.mark.distributed
LAYOUTS = [(1, 1, False), (2, 1, False), (2, 1, True), (1, 2, False), (2, 2, False), (2, 2, True)]
MODELS = ["qwen3-tied", "qwen3-untied", "llama-tied", "llama-untied", "qwen2-tied"]
EXPORTED = ["qwen3-untied", "llama-tied"]
PUBLISHED = [(2, 2), (2, 1), (1, 2), (1, 1)]
"""TP x PP; 4 ranks, so 1, 2, 2 and 4 replicas share what they publish."""


class Layout:
    """One TP x PP of all ranks; models are built on the same process groups."""

    def __init__(self, tp: int, pp: int, sp: bool) -> None:
        from megatron.core import parallel_state

        from relax_hpc.trainer import megatron

        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        self.train = TrainConfig(tp=tp, pp=pp, sequence_parallel=sp)
        megatron.initialize_parallel(self.train, timeout_min=2, seed=0)
        self.groups, self.place = megatron.make_control_groups()

    def backend(self, folder: Path) -> typing.Any:
        from relax_hpc.trainer import megatron

        shape = read_model_shape(folder)
        args = (shape, self.train, torch.float32, self.groups, self.place)
        backend = megatron.MegatronBackend(*args)
        with open_hf_folder(folder) as read:
            backend.load_tensors(read)
        return backend


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


def parity_and_pieces(root: str) -> typing.Any:
    """Four ranks: logits of every model and layout, export at TP 2 x PP 2, boxes also with DP."""
    import_megatron()
    found: dict[str, typing.Any] = {"parity": _parity(Path(root))}
    for model in EXPORTED:
        found[model] = [_pieces(Path(root), model, *layout) for layout in PUBLISHED]
    return found


def _parity(root: Path) -> dict[str, tuple[int, float]]:
    """Rows and largest logit difference to transformers; 0 rows but on ranks of the last stage."""
    rows = make_rows(3, groups=3, max_tokens=20)
    wanted = {model: torch.load(root / model / "logits.pt") for model in MODELS}
    worst = {}
    for tp, pp, sp in LAYOUTS:
        layout = Layout(tp, pp, sp)
        for model in MODELS:
            logits = _logits(layout.backend(root / model), rows)
            differences = [(logits[i] - wanted[model][i]).abs().max().item() for i in logits]
            seen = (len(differences), max(differences, default=0.0))
            worst[f"{model} tp={tp} pp={pp} sp={sp}"] = seen
    return worst


def _pieces(root: Path, model: str, tp: int, pp: int) -> typing.Any:
    """This rank's boxes with their bytes as hex; also exports, if all ranks are one replica."""
    backend = Layout(tp, pp, False).backend(root / model)
    backend.prepare_training()  # moves the parameters into megatron's buffers
    if tp * pp == 4:
        backend.export_hf(root / f"{model}-export", root / model)
    specs = [(s.name, s.dtype, s.shape) for s in backend.specs()]
    found = [
        (box.name, box.start, box.stop, dtype, data.tobytes().hex())
        for box, dtype, data in backend.pieces()
    ]
    return [backend.place.weight_shard, specs, found]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and the logits that transformers computes for each row alone, unpacked."""
    folder = tmp_path_factory.mktemp("parity")
    rows = make_rows(3, groups=3, max_tokens=20)
    tokens = [torch.tensor(row.fields["tokens"].astype(np.int64)) for row in rows]
    for name in MODELS:
        kind, _, tie = name.partition("-")
        model = make_model(folder / name, kind, tied=tie == "tied")
        with torch.no_grad():
            logits = [model(t[None]).logits[0] for t in tokens]
        torch.save(logits, folder / name / "logits.pt")
        (folder / f"{name}-export").mkdir()
    return folder


@pytest.fixture(scope="module")
def results(root: Path) -> list[typing.Any]:
    return run_distributed(parity_and_pieces, 4, str(root))


def test_logits_equal_transformers(results: list[typing.Any]) -> None:
    for name in results[0]["parity"]:
        rows, differences = zip(*(result["parity"][name] for result in results), strict=True)
        assert max(rows) == 12, f"{name}: only {rows} rows were compared"
        assert max(differences) < 1e-4, f"{name}: {differences}"


@pytest.mark.parametrize("layout", range(len(PUBLISHED)), ids=lambda i: str(PUBLISHED[i]))
@pytest.mark.parametrize("name", EXPORTED)
def test_pieces_cover_the_model_once(
    root: Path, results: list[typing.Any], name: str, layout: int
) -> None:
    by_rank = [result[name][layout] for result in results]
    specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in by_rank[0][1]]
    boxes: dict[int, list[Box]] = {}
    tensors = {spec.name: np.full(spec.shape, np.nan, np.float32) for spec in specs}
    for shard, _specs, found in by_rank:
        boxes[shard] = []
        for tensor, start, stop, dtype, data in found:
            box = Box(tensor, tuple(start), tuple(stop))
            boxes[shard].append(box)
            assert dtype == "float32"
            values = np.frombuffer(bytes.fromhex(data), np.float32)
            tensors[tensor][box.slices] = values.reshape(box.shape)
    assert sorted(boxes) == [0, 1, 2, 3] and all(boxes.values())
    check_coverage(specs, boxes)
    wanted = dict(_load(root / name).named_parameters())
    assert tensors.keys() == wanted.keys()  # parameters name tied embeddings once
    for tensor, parameter in wanted.items():
        assert np.array_equal(tensors[tensor], parameter.detach().numpy()), tensor


@pytest.mark.usefixtures("results")
@pytest.mark.parametrize("name", EXPORTED)
def test_export_loads_in_transformers(root: Path, name: str) -> None:
    folder = root / f"{name}-export"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2  # one file per pipeline stage
    loaded, model = _load(folder), _load(root / name)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def _load(folder: Path) -> typing.Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
