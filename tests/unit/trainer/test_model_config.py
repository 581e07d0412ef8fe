"""Reading config.json: both spellings of transformers 4 and 5, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.errors import ConfigError
from relax_hpc.trainer.hf_weights import (
    canonical_specs,
    check_parallel,
    open_hf_folder,
    padded_vocab_size,
)
from relax_hpc.trainer.model_config import read_model_shape

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return folder


def test_spellings_of_rope(tmp_path: Path) -> None:
    assert read_model_shape(write(tmp_path)).rope_theta == 5000.0
    new = {"rope_type": "default", "rope_theta": 1e6}
    assert read_model_shape(write(tmp_path, rope_parameters=new)).rope_theta == 1e6
    scaled = read_model_shape(write(tmp_path, rope_scaling=LLAMA3_ROPE))
    assert (scaled.rope_theta, scaled.rope_scaling_factor) == (5000.0, 8.0)


def test_defaults(tmp_path: Path) -> None:
    shape = read_model_shape(write(tmp_path))
    assert (shape.head_dim, shape.heads_per_group, shape.tied_embeddings) == (16, 2, False)
    assert read_model_shape(write(tmp_path, head_dim=24)).head_dim == 24
    assert read_model_shape(write(tmp_path, num_key_value_heads=None)).num_kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "mamba"}, "supported: qwen3, qwen2, llama"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "RoPE"),
        ({"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 2.0}}, "RoPE"),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_model_shape(write(tmp_path, **changes))


def test_missing_or_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        read_model_shape(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model\.path"):
        read_model_shape(tmp_path)


@pytest.mark.parametrize("data", [b"[]", b"{nope", b"\xff\xfe", b'{"model_type": "qwen3"}'])
def test_garbage_is_one_sentence(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ConfigError, match=r"model\.path=.*config\.json"):
        read_model_shape(tmp_path)


@pytest.mark.parametrize("data", [b"", b"garbage", b"\x10\0\0\0\0\0\0\0{nope"])
def test_damaged_safetensors_are_one_sentence(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with (
        pytest.raises(ConfigError, match=r"model\.path=.*model\.safetensors cannot be read"),
        open_hf_folder(tmp_path),
    ):
        pass


def test_parallel_sizes(tmp_path: Path) -> None:
    shape = read_model_shape(write(tmp_path))
    check_parallel(shape, 2, 2)
    for tp, pp, says in ((4, 1, "num_key_value_heads=2"), (1, 3, "2 layers")):
        with pytest.raises(ConfigError, match=says):
            check_parallel(shape, tp, pp)
    assert [padded_vocab_size(shape, tp) for tp in (1, 2, 4)] == [101, 102, 104]


def test_specs_name_tied_embeddings_once(tmp_path: Path) -> None:
    untied = canonical_specs(read_model_shape(write(tmp_path)), "float32")
    tied = canonical_specs(read_model_shape(write(tmp_path, tie_word_embeddings=True)), "float32")
    assert {s.name for s in untied} - {s.name for s in tied} == {"lm_head.weight"}
