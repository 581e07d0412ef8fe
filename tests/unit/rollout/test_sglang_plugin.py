"""What runs inside SGLang's processes, tried without SGLang: hash, seeds, loader, stand-ins."""

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from relax_hpc.rollout.sglang_process import PLUGIN

FOLDER = PLUGIN / "path"
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def plugin_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in [n for n in sys.modules if n.split(".")[0] == "relax_sglang"]:
        del sys.modules[name]


def murmur3(data: bytes) -> int:
    """Oracle: MurmurHash3_x86_32 of Austin Appleby's reference, seed 0, whole blocks only."""
    mask, state = 0xFFFFFFFF, 0
    for (block,) in struct.iter_unpack("<I", data):
        block = block * 0xCC9E2D51 & mask
        block = (block << 15 | block >> 17) & mask
        state ^= block * 0x1B873593 & mask
        state = (state << 13 | state >> 19) & mask
        state = (state * 5 + 0xE6546B64) & mask
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & mask
    state = (state ^ state >> 13) * 0xC2B2AE35 & mask
    return state ^ state >> 16


def test_oracle_knows_the_published_value() -> None:
    assert murmur3(b"test") == 0xBA6BD213


@pytest.mark.parametrize("dtype", [torch.uint64, torch.int64])
def test_murmur_hash(dtype: torch.dtype) -> None:
    from relax_sglang.kernels import murmur_hash32

    seeds, positions, columns = [0, 7, 2**32 + 5, 2**63 - 1], [0, 9, 20000, 2**31 - 1], [0, 1, 9999]
    got = murmur_hash32(
        torch.tensor(seeds, dtype=torch.int64).to(dtype),
        torch.tensor(positions),
        torch.tensor(columns),
    )
    assert got.dtype is torch.uint32
    expected = [
        [murmur3(struct.pack("<QII", seed, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert got.tolist() == expected


def test_keep_top_keeps_token_order() -> None:
    from relax_sglang.seeds import keep_top

    row = [0.1, 0.4, 0.2, 0.3]
    probs = torch.tensor([row] * 4)
    got = keep_top(probs, torch.tensor([4, 2, 4, 1]), torch.tensor([1.0, 1.0, 0.6, 1.0]))
    cut = [row, [0, 0.4, 0, 0.3], [0, 0.4, 0, 0.3], [0, 0.4, 0, 0]]
    torch.testing.assert_close(got, torch.tensor(cut))


def test_top_p_of_one_keeps_the_whole_tail() -> None:
    """A float32 cumulative sum exceeds 1 here and there; the tail must survive it."""
    from relax_sglang.seeds import keep_top

    probs = torch.softmax(torch.randn(64, 5000, generator=torch.Generator().manual_seed(0)), -1)
    got = keep_top(probs, torch.full((64,), 5000), torch.ones(64))
    assert torch.equal(got, probs)


def test_seeds_reach_the_batch() -> None:
    from relax_sglang import seeds

    def build(cls: type, batch: Any, vocab_size: int) -> Any:
        return SimpleNamespace(sampling_seed=batch.given)

    requests = [
        SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=s)) for s in (5, None)
    ]
    batch = SimpleNamespace(reqs=requests, device="cpu", given=None)
    assert seeds._with_seeds(build)(object, batch, 9).sampling_seed.tolist() == [5, 0]
    batch.given = torch.tensor([1, 2])
    assert seeds._with_seeds(build)(object, batch, 9).sampling_seed.tolist() == [1, 2]


class Model(torch.nn.Module):
    """Loads like SGLang's models: skips names that it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(2, 3))
        self.b = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))

    def load_weights(self, weights: Any) -> None:
        own = dict(self.named_parameters())
        for name, value in weights:
            if name in own:
                own[name].data.copy_(value)


@pytest.mark.parametrize("case", ["whole", "hole", "no file"])
def test_loader_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    from relax_sglang import loader

    values = {"a": torch.randn(2, 3), "b": torch.randn(4).bfloat16(), "unknown": torch.ones(1)}
    if case == "hole":
        del values["b"]
    save_file(values, tmp_path / "v.safetensors")
    file = "none" if case == "no file" else "v.safetensors"
    (tmp_path / "request.json").write_text(json.dumps({"version": 4, "file": file}))
    monkeypatch.setenv("RELAX_SGLANG_WEIGHTS", str(tmp_path))
    loader.pull(Model(), [])
    report = json.loads((tmp_path / "report-0.json").read_text())
    assert report["version"] == 4
    if case == "whole":
        assert report["parameters"]["a"][0] == 6
        bits = sum(values["b"].view(torch.int16).tolist()) % 2**64
        assert report["parameters"]["b"] == [4, bits]
    else:
        expected = "1 parameters unwritten: ['b']" if case == "hole" else "No such file"
        assert expected in report["error"]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith("RELAX_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=base | {"PYTHONPATH": str(FOLDER)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def engine_environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "key").write_text("-s3cret_key\n")
    return {
        "RELAX_SGLANG": "1",
        "RELAX_SGLANG_DEVICE": "cpu",
        "RELAX_SGLANG_KEY_FILE": str(tmp_path / "key"),
    }


STAND_INS = """
import triton, triton.language as tl, triton.language.extra.cuda as cuda
from sgl_kernel.anything import some_kernel
@triton.jit
def f(x: tl.constexpr): return x + 1
@triton.autotune(configs=[triton.Config({}, num_warps=4)], key=["n"])
@triton.jit
def g(x): return x
assert f(1) == 2 and g(3) == 3 and triton.cdiv(7, 2) == 4 and triton.next_power_of_2(5) == 8
assert list(triton.anything) == [] and "x" not in triton.anything
class C(triton.runtime.JITFunction): pass
try: some_kernel(1)
except NotImplementedError as err: print(err)
"""


def test_stand_ins(engine_environment: dict[str, str]) -> None:
    done = python(STAND_INS, **engine_environment)
    assert done.returncode == 0, done.stderr
    assert "sgl_kernel.anything.some_kernel" in done.stdout


@pytest.mark.parametrize("changes", [{"RELAX_SGLANG": ""}, {"RELAX_SGLANG_DEVICE": "cuda"}])
def test_no_stand_ins_outside_a_run_or_on_a_gpu(
    engine_environment: dict[str, str], changes: dict[str, str]
) -> None:
    code = "import sys; print([f for f in sys.meta_path if 'relax_sglang' in type(f).__module__])"
    assert python(code, **engine_environment | changes).stdout.strip() == "[]"


def test_entry_points_are_found_through_the_path() -> None:
    code = (
        "from importlib.metadata import entry_points as e\n"
        "print([p.value for g in ('plugins', 'platforms') for p in e(group='sglang.srt.' + g)])"
    )
    found = python(code).stdout
    assert "relax_sglang.plugin:load" in found
    assert "relax_sglang.plugin:activate" in found


def test_hooks_do_nothing_outside_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from relax_sglang import plugin

    monkeypatch.delenv("RELAX_SGLANG", raising=False)
    assert plugin.load() is None
    assert plugin.activate() is None
    monkeypatch.setenv("RELAX_SGLANG", "1")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "")
    if not torch.cuda.is_available():
        assert plugin.activate() == "sglang.srt.platforms.cpu.CpuSRTPlatform"


def test_key_is_redacted_in_the_log(engine_environment: dict[str, str]) -> None:
    code = (
        "import logging; logging.basicConfig()\n"
        "logging.warning('a -s3cret_key b'); logging.error('%s|%d', ['-s3cret_key'], 3)\n"
        "logging.warning('%s is %s', 'plain', 1)"
    )
    lines = python(code, **engine_environment).stderr
    assert "s3cret" not in lines
    assert "a *** b" in lines and "['***']|3" in lines and "plain is 1" in lines


def test_a_process_whose_parent_is_gone_ends(engine_environment: dict[str, str]) -> None:
    code = "from relax_sglang import process; process.die_with_parent({}); print('alive')"
    gone = python(code.format(1), **engine_environment)
    assert (gone.returncode, gone.stdout) == (-signal.SIGKILL, "")
    kept = python(code.format(os.getpid()), **engine_environment)
    assert kept.stdout.strip() == "alive"
