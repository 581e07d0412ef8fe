"""Weight versions on their way into an SGLang server: checked, written to shared memory, proven.

rollout step:  check names and shapes -> FOLDER/version-V.safetensors, FOLDER/request.json
each TP rank:  `relax_sglang.loader.pull` maps the file, loads it, writes FOLDER/report-RANK.json
rollout step:  compares the bit sums of the reports with those of what it sent
"""

import json
import os
import struct
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from relax_hpc.errors import EngineError
from relax_hpc.rollout.engine import WeightTensor
from relax_hpc.runfolder import write_atomic

_SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_BITS: dict[str, type[np.signedinteger[typing.Any]]] = {
    "float32": np.int32,
    "bfloat16": np.int16,
    "float16": np.int16,
}
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""SGLang's parameter -> the canonical tensors that it joins."""

Shapes = dict[str, tuple[int, ...]]


class BitSum(typing.NamedTuple):
    """Checksum that cutting and joining tensors keeps: elements, sum of bit patterns mod 2**64."""

    size: int
    total: int


def expected_shapes(model: Path) -> Shapes:
    """Return name -> shape of the canonical tensors of a model folder.

    Dense Qwen3, Qwen2 and Llama follow from config.json; others from the headers of the
    safetensors files.

    Raises:
        EngineError: neither is possible.
    """
    from relax_hpc.rollout.decoder import canonical_shapes, read_decoder_config

    try:
        return canonical_shapes(read_decoder_config(model))
    except EngineError as err:
        shapes = dict(_checkpoint_shapes(model))
        if not shapes:
            raise EngineError(
                f"model {model}: {err}; and it has no *.safetensors that list its tensors"
            ) from err
        if is_tied(model):
            shapes.pop("lm_head.weight", None)
        return shapes


def is_tied(model: Path) -> bool:
    """Whether the output projection is the embedding."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return bool(config.get("tie_word_embeddings", False))


def _checkpoint_shapes(model: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__" and "rotary_emb" not in name:
                yield name, tuple(entry["shape"])


def check_tensors(expected: Shapes, tensors: Mapping[str, WeightTensor], tied: bool) -> list[str]:
    """Check a version against the model before anything is touched; return the names to send.

    SGLang skips tensors with unknown names and answers "success", so this cannot be left to it.

    Raises:
        EngineError: names, shapes, dtypes or byte counts are not those of the model.
    """
    missing, unknown = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if tied:
        unknown -= {"lm_head.weight"}  # some exporters write the tied copy
    if missing or unknown:
        raise EngineError(
            f"weights refused: {len(missing)} tensors missing {sorted(missing)[:3]}, "
            f"{len(unknown)} unknown {sorted(unknown)[:3]}, expected {len(expected)}; "
            "trainer and engine must use the same model.path"
        )
    for name, shape in expected.items():
        _check_tensor(name, shape, tensors[name])
    return sorted(expected)


def _check_tensor(name: str, shape: tuple[int, ...], tensor: WeightTensor) -> None:
    if tensor.dtype not in _BITS or tuple(tensor.shape) != shape:
        raise EngineError(
            f"weights refused: {name} is {tensor.dtype} {tuple(tensor.shape)}, "
            f"expected {'/'.join(_BITS)} {shape}"
        )
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(_BITS[tensor.dtype]).itemsize
    if tensor.data.nbytes != size:
        raise EngineError(
            f"weights refused: {name} has {tensor.data.nbytes} bytes, expected {size}"
        )


def write_version(
    folder: Path, version: int, names: list[str], tensors: Mapping[str, WeightTensor]
) -> Path:
    """Write the safetensors file of a version and the request that names it.

    Raises:
        EngineError: no room in shared memory.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for old in folder.glob("report-*.json"):
        old.unlink()
    path = folder / f"version-{version}.safetensors"
    try:
        _write_safetensors(path, names, tensors)
    except OSError as err:
        path.unlink(missing_ok=True)
        raise EngineError(f"weights version {version} cannot be written to {path}: {err}") from err
    request = {"version": version, "file": path.name}
    write_atomic(folder / "request.json", json.dumps(request), mode=0o600)
    return path


def _write_safetensors(path: Path, names: list[str], tensors: Mapping[str, WeightTensor]) -> None:
    header, offset = {}, 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.data.nbytes
        dtype = _SAFETENSORS_DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        # a full tmpfs is an error here, and a SIGBUS in the reader without it
        os.posix_fallocate(file.fileno(), 0, 8 + len(text) + offset)
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            file.write(np.ascontiguousarray(tensors[name].data).data)


def bit_sums(
    names: list[str], tensors: Mapping[str, WeightTensor], dtype: str
) -> dict[str, BitSum]:
    """Return the checksums that the tensors have after a cast to the engine's dtype."""
    sums = {}
    for name in names:
        bits = _cast_bits(tensors[name], dtype)
        sums[name] = BitSum(bits.size, int(bits.sum(dtype=np.int64)) % 2**64)
    return sums


def _cast_bits(tensor: WeightTensor, dtype: str) -> np.ndarray:
    flat = np.ascontiguousarray(tensor.data).reshape(-1)
    if tensor.dtype == dtype:
        return flat.view(_BITS[dtype])
    if (tensor.dtype, dtype) == ("bfloat16", "float32"):
        return (flat.view(np.uint16).astype(np.uint32) << 16).view(np.int32)
    if (tensor.dtype, dtype) == ("float32", "bfloat16"):  # round to nearest, ties to even
        bits = flat.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.int16)
    raise EngineError(
        f"weights refused: {tensor.dtype} tensors for an engine with dtype {dtype}; "
        "set model.dtype to what the trainer publishes"
    )


def check_reports(folder: Path, version: int, num_ranks: int, sent: dict[str, BitSum]) -> int:
    """Check that every TP rank loaded the whole version, bit for bit.

    Returns:
        Number of the engine's parameters that were compared. Parameters that join tensors in a way
        that is not known here (experts) are left to the loader's own check for holes.

    Raises:
        EngineError: a rank did not report, reports a failure, or holds other bits than were sent.
    """
    reports = [_read_report(folder / f"report-{rank}.json", version) for rank in range(num_ranks)]
    compared = 0
    for name in reports[0]["parameters"]:
        parts = [sent[part] for part in _parts(name) if part in sent]
        if len(parts) != len(_parts(name)):
            continue
        held = [BitSum(*report["parameters"][name]) for report in reports]
        whole = BitSum(sum(h.size for h in held), sum(h.total for h in held) % 2**64)
        if not _matches(whole, parts, num_ranks):
            raise EngineError(
                f"weights version {version}: parameter {name} of the server does not hold what was "
                f"sent (bit sum {whole.total:016x} of {whole.size} elements in {num_ranks} ranks)"
            )
        compared += 1
    if compared == 0:
        raise EngineError(f"weights version {version}: no parameter of the server is known by name")
    return compared


def _read_report(path: Path, version: int) -> dict[str, typing.Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise EngineError(f"weights version {version}: a TP rank left no report: {err}") from err
    if report.get("error") or report["version"] != version:
        seen = report.get("error") or f"it loaded version {report['version']}"
        raise EngineError(f"weights version {version}: {path.stem}: {seen}")
    return typing.cast("dict[str, typing.Any]", report)


def _parts(parameter: str) -> list[str]:
    for fused, parts in _FUSED.items():
        if f".{fused}." in parameter:
            return [parameter.replace(f".{fused}.", f".{part}.") for part in parts]
    return [parameter]


def _matches(whole: BitSum, parts: list[BitSum], num_ranks: int) -> bool:
    """Whether the sum over all ranks is that of the parts: sharded, padded or replicated.

    Norms are whole in every rank; with fewer key/value heads than ranks, so are k and v (or a
    share of them). Padding with zeros adds nothing: embeddings, and on a CPU the heads of a model
    whose heads the ranks cannot share evenly.
    """
    for first, rest in ((1, 1), (num_ranks, num_ranks), *((1, n) for n in range(2, num_ranks + 1))):
        copies = [first] + [rest] * (len(parts) - 1)
        size = sum(n * part.size for n, part in zip(copies, parts, strict=True))
        total = sum(n * part.total for n, part in zip(copies, parts, strict=True)) % 2**64
        padded = first == rest == 1 and whole.size >= size
        if total == whole.total and (whole.size == size or padded):
            return True
    return False
