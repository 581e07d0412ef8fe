"""Weight versions for SGLang: checks before, checksums after; numpy and plain loops as oracles."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from relax_hpc.errors import EngineError
from relax_hpc.rollout import sglang_weights
from relax_hpc.rollout.sglang_weights import BitSum
from tests.conformance import engines
from tests.conformance.engines import Tensor


def tensor(values: torch.Tensor) -> Tensor:
    name = str(values.dtype).removeprefix("torch.")
    return Tensor(name, tuple(values.shape), values.contiguous().view(-1).view(torch.uint8).numpy())


def plain_sum(values: torch.Tensor) -> BitSum:
    """Oracle: Python integers, one element after the other."""
    bits = values.contiguous().view(-1).view({4: torch.int32, 2: torch.int16}[values.itemsize])
    return BitSum(values.numel(), sum(bits.tolist()) % 2**64)


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_bit_sums_after_a_cast(sent: torch.dtype, held: torch.dtype) -> None:
    values = (torch.randn(7, 5, generator=torch.Generator().manual_seed(1)) * 100).to(sent)
    values[0, 0], values[0, 1] = 0.0, -0.0
    name = str(held).removeprefix("torch.")
    got = sglang_weights.bit_sums(["w"], {"w": tensor(values)}, name)
    assert got == {"w": plain_sum(values.to(held))}


def test_a_cast_that_is_not_known_is_refused() -> None:
    with pytest.raises(EngineError, match=r"model\.dtype"):
        sglang_weights.bit_sums(["w"], {"w": tensor(torch.ones(2).half())}, "float32")


def test_written_version_is_read_by_safetensors(tmp_path: Path) -> None:
    values = {"a": torch.randn(3, 4), "b.c": torch.randn(5).bfloat16(), "s": torch.randn(2, 1, 2)}
    tensors = {name: tensor(value) for name, value in values.items()}
    folder = tmp_path / "new folder"
    (folder).mkdir()
    (folder / "report-0.json").write_text("{}")
    path = sglang_weights.write_version(folder, 12, sorted(tensors), tensors)
    loaded = load_file(path)
    assert loaded.keys() == values.keys()
    assert all(torch.equal(loaded[name], values[name]) for name in values)
    assert json.loads((folder / "request.json").read_text()) == {"version": 12, "file": path.name}
    assert not list(folder.glob("report-*"))


def test_no_room_is_an_error_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sglang_weights.os, "posix_fallocate", full)
    with pytest.raises(EngineError, match="No space left"):
        sglang_weights.write_version(tmp_path, 1, ["a"], {"a": tensor(torch.ones(2))})
    assert not list(tmp_path.glob("*.safetensors"))


def reports(folder: Path, ranks: list[dict[str, torch.Tensor]], **changes: Any) -> None:
    for rank, parameters in enumerate(ranks):
        sums = {name: list(plain_sum(value)) for name, value in parameters.items()}
        report = {"version": 3, "parameters": sums} | changes
        (folder / f"report-{rank}.json").write_text(json.dumps(report))


def fused_model(ranks: int) -> tuple[dict[str, BitSum], list[dict[str, torch.Tensor]]]:
    """Canonical sums, and what each rank of an engine holds: q is cut, k and v are whole."""
    make = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(n, 6, generator=make) for n in (8, 2, 2))
    embed, norm = torch.randn(10, 6, generator=make), torch.randn(6, generator=make)
    prefix = "model.layers.0.self_attn"
    sent = {
        f"{prefix}.q_proj.weight": plain_sum(q),
        f"{prefix}.k_proj.weight": plain_sum(k),
        f"{prefix}.v_proj.weight": plain_sum(v),
        "model.embed_tokens.weight": plain_sum(embed),
        "model.norm.weight": plain_sum(norm),
    }
    padded = torch.cat([embed, torch.zeros(6, 6)])
    held = [
        {
            f"{prefix}.qkv_proj.weight": torch.cat([q.chunk(ranks)[rank], k, v]),
            "model.embed_tokens.weight": padded.chunk(ranks)[rank],
            "model.norm.weight": norm,
            "model.layers.0.experts.w13_weight": torch.ones(3),  # not known by name: left alone
        }
        for rank in range(ranks)
    ]
    return sent, held


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_reports_of_a_whole_version(tmp_path: Path, ranks: int) -> None:
    sent, held = fused_model(ranks)
    reports(tmp_path, held)
    assert sglang_weights.check_reports(tmp_path, 3, ranks, sent) == 3


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "name", ["self_attn.qkv_proj.weight", "embed_tokens.weight", "norm.weight"]
)
def test_one_changed_bit_is_seen(tmp_path: Path, ranks: int, name: str) -> None:
    sent, held = fused_model(ranks)
    key = next(k for k in held[-1] if k.endswith(name))
    held[-1][key] = held[-1][key].clone()
    held[-1][key].view(torch.int32).view(-1)[1] ^= 1
    reports(tmp_path, held)
    with pytest.raises(EngineError, match=key.replace(".", r"\.")):
        sglang_weights.check_reports(tmp_path, 3, ranks, sent)


def test_reports_that_are_missing_failed_or_old(tmp_path: Path) -> None:
    sent, held = fused_model(2)
    reports(tmp_path, held[:1])
    with pytest.raises(EngineError, match="left no report"):
        sglang_weights.check_reports(tmp_path, 3, 2, sent)
    reports(tmp_path, held, error="RuntimeError: left 2 parameters unwritten")
    with pytest.raises(EngineError, match="left 2 parameters"):
        sglang_weights.check_reports(tmp_path, 3, 2, sent)
    reports(tmp_path, held, version=2)
    with pytest.raises(EngineError, match="loaded version 2"):
        sglang_weights.check_reports(tmp_path, 3, 2, sent)
    reports(tmp_path, [{"x.weight": torch.ones(2)}] * 2)
    with pytest.raises(EngineError, match="no parameter"):
        sglang_weights.check_reports(tmp_path, 3, 2, sent)


def test_expected_shapes_of_dense_and_of_unknown_models(tmp_path: Path) -> None:
    dense = engines.make_model(tmp_path / "dense")
    names = load_file(dense / "model.safetensors")
    expected = {name: tuple(value.shape) for name, value in names.items()}
    assert sglang_weights.expected_shapes(dense) == expected
    assert sglang_weights.is_tied(dense)
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps(config | {"model_type": "other"}))
    assert sglang_weights.expected_shapes(dense) == expected  # from the checkpoint's headers
    (dense / "model.safetensors").unlink()
    with pytest.raises(EngineError, match=r"no \*\.safetensors"):
        sglang_weights.expected_shapes(dense)


def test_versions_that_the_model_cannot_have() -> None:
    good = {"a": tensor(torch.ones(2, 3)), "b": tensor(torch.ones(4))}
    shapes = {"a": (2, 3), "b": (4,)}
    tied = good | {"lm_head.weight": tensor(torch.ones(2, 3))}
    assert sglang_weights.check_tensors(shapes, good, tied=False) == ["a", "b"]
    assert sglang_weights.check_tensors(shapes, tied, tied=True) == ["a", "b"]
    bad = [
        {"a": good["a"]},
        tied,
        good | {"b": dataclasses.replace(good["b"], shape=(2, 2))},
        good | {"b": dataclasses.replace(good["b"], dtype="int7")},
        good | {"b": dataclasses.replace(good["b"], data=np.zeros(15, np.uint8))},
    ]
    for tensors in bad:
        with pytest.raises(EngineError, match="refused"):
            sglang_weights.check_tensors(shapes, tensors, tied=False)
