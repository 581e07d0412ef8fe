"""Runs to plan, render and start in the launcher's tests; the stub program's place."""

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_hpc.config import Config, config_from_tree

ROOT = Path(__file__).parents[1]
STUB = ROOT / "tests" / "stub_step.py"

SMALL: dict[str, Any] = {
    "run": {"name": "stub", "train_steps": 6},
    "model": {"path": "model"},
    "data": {"train": "train.jsonl"},
    "rollout": {
        "groups_per_step": 4,
        "group_size": 2,
        "num_engines": 2,
        "max_response_tokens": 8,
    },
    "train": {"save_interval": 2, "tp": 2},
    "resources": {"launcher": "local", "train": {"ranks": 2}, "rollout": {"ranks": 2}},
    "recovery": {"heartbeat_timeout_s": 6.0, "start_timeout_s": 60.0},
}

# The headline run: 16 GPUs on two nodes, as a het job 8 : 8, in one partition 4 : 12.
HEADLINE: dict[str, Any] = {
    "run": {"name": "headline", "train_steps": 2},
    "model": {"path": "model"},
    "data": {"train": "train.jsonl"},
    "rollout": {
        "groups_per_step": 32,
        "group_size": 8,
        "num_engines": 4,
        "engine_tp": 2,
        "max_response_tokens": 8192,
    },
    "train": {"tp": 2, "sequence_parallel": True, "chunks_per_step": 8},
    "resources": {
        "gpus_per_node": 8,
        "train": {"ranks": 8, "partition": "train"},
        "rollout": {"ranks": 8, "partition": "rollout"},
    },
}


def config_of(tree: dict[str, Any], **changes: Any) -> Config:
    """Build a configuration; `resources__layout="single"` changes one key."""
    changed = copy.deepcopy(tree)
    for path, value in changes.items():
        *sections, key = path.split("__")
        node = changed
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    return config_from_tree(changed, "test")


def single_headline() -> Config:
    return config_of(
        HEADLINE,
        resources__layout="single",
        resources__nodes=2,
        resources__partition="all",
        resources__train={"ranks": 4},
        resources__rollout={"ranks": 12},
        rollout__num_engines=6,
    )


MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "rms_norm_eps": 1e-6,
}


def safetensors_bytes(data: bytes = bytes(8), says_bytes: int = 8) -> bytes:
    """Make a safetensors file with one tensor."""
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, says_bytes]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + data


def write_inputs(folder: Path) -> None:
    """Make a model folder and a data set that preflight accepts."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    (folder / "model" / "model.safetensors").write_bytes(safetensors_bytes())
    (folder / "model" / "tokenizer.json").write_text("{}")
    row = {"prompt": [{"role": "user", "content": "1+1="}], "label": "2"}
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")


def write_recipe(folder: Path, tree: dict[str, Any], **changes: Any) -> Path:
    """Write a recipe with its inputs into a folder."""
    write_inputs(folder)
    config_of(tree, **changes)
    changed = copy.deepcopy(tree)
    for path, value in changes.items():
        *sections, key = path.split("__")
        node = changed
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    path = folder / "recipe.toml"
    path.write_text(_toml(changed))
    return path


def _toml(tree: dict[str, Any], prefix: str = "") -> str:
    plain = [f"{key} = {json.dumps(v)}" for key, v in tree.items() if not isinstance(v, dict)]
    lines = [f"[{prefix}]", *plain] if prefix else plain
    for key, value in tree.items():
        if isinstance(value, dict):
            lines.append(_toml(value, f"{prefix}.{key}" if prefix else key))
    return "\n".join(lines) + "\n"


def relax(*arguments: str, cwd: Path, timeout_s: float = 120, **environment: str) -> Any:
    """Run `relax-hpc ...` in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "relax_hpc.cli", *arguments],
        cwd=cwd,
        env=environment_of(**environment),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def environment_of(**more: str) -> dict[str, str]:
    """Environment of a user who has the checkout on PYTHONPATH."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def wait_for(what: Callable[[], Any], why: str, timeout_s: float = 60) -> Any:
    """Wait until `what()` is true; its value."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        value = what()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"not in {timeout_s} s: {why}")
