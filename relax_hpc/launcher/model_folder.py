"""Checks of a Hugging Face model folder that need neither torch nor transformers.

What is wrong here would end every rollout and train rank some minutes after the start: so
`config.json` is read, the headers of all safetensors files are, and the tokenizer's files are
looked for. No weights are read.
"""

import json
from pathlib import Path
from typing import Any

from relax_hpc.errors import ConfigError
from relax_hpc.trainer.model_config import shape_from_tree

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""transformers can load a tokenizer from any of these."""
_INDEX = "model.safetensors.index.json"
_HEADER_LENGTH_BYTES = 8
"""A safetensors file is: header length (u64, little endian), header (JSON), data."""
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""


def check_model_folder(folder: Path) -> None:
    """Check that a folder holds a model that can be trained.

    Raises:
        ConfigError: what is missing, damaged or not supported, with the remedy.
    """
    try:
        _check(folder)
    except OSError as err:
        raise _fault(
            folder, f"{err.filename or folder} cannot be read ({err.strerror or err})"
        ) from err


def _fault(folder: Path, message: str) -> ConfigError:
    return ConfigError(
        f"model.path={str(folder)!r}: {message}; set model.path to a folder with config.json, "
        "*.safetensors and a tokenizer (tools/make_tiny_model OUT makes a small one)"
    )


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise _fault(folder, "no such folder")
    names = {path.name for path in folder.iterdir()}
    if "config.json" not in names:
        raise _fault(folder, "has no config.json")
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    if not weights:
        raise _fault(folder, "has no *.safetensors")
    _check_architecture(folder)
    for name in weights:
        _check_safetensors(folder, name)
    if _INDEX in names:
        _check_index(folder, set(weights))
    found = [name for name in _TOKENIZERS if name in names]
    if not found:
        raise _fault(folder, f"has no tokenizer (none of {', '.join(_TOKENIZERS)})")
    for name in (*found, "tokenizer_config.json"):
        if name.endswith(".json") and name in names:
            _read_object(folder, name)


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    try:
        tree = json.loads((folder / name).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as err:  # UnicodeDecodeError and JSONDecodeError
        raise _fault(folder, f"{name} is not JSON ({err})") from err
    if not isinstance(tree, dict):
        raise _fault(folder, f"{name} must hold a JSON object, is {type(tree).__name__}")
    return tree


def _check_architecture(folder: Path) -> None:
    tree = _read_object(folder, "config.json")
    try:
        shape_from_tree(tree, where=str(folder / "config.json"))
    except KeyError as err:
        raise _fault(folder, f"config.json has no {err}") from err
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as err:
        raise _fault(folder, f"config.json is damaged ({err})") from err


def _check_safetensors(folder: Path, name: str) -> None:
    path = folder / name
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
        rest = size - _HEADER_LENGTH_BYTES
        if rest < 2 or not 2 <= length <= min(rest, _MAX_HEADER_BYTES):
            raise _fault(folder, f"{name} ({size} bytes) is no safetensors file")
        header = file.read(length)
    try:
        tensors = json.loads(header)
        ends = [int(t["data_offsets"][1]) for n, t in tensors.items() if n != "__metadata__"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as err:
        raise _fault(folder, f"the header of {name} is damaged ({err})") from err
    wanted = _HEADER_LENGTH_BYTES + length + max(ends, default=0)
    if size != wanted:
        raise _fault(folder, f"{name} has {size} bytes, its header says {wanted}: copied in part?")


def _check_index(folder: Path, present: set[str]) -> None:
    tensors = _read_object(folder, _INDEX).get("weight_map")
    if not isinstance(tensors, dict):
        raise _fault(folder, f"{_INDEX} has no weight_map")
    missing = sorted({str(file) for file in tensors.values()} - present)
    if missing:
        raise _fault(folder, f"{_INDEX} names files that are not there: {', '.join(missing[:4])}")
