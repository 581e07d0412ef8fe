"""Tiny models in Hugging Face format with non-trivial norms, and rows to train them on."""

import typing
from pathlib import Path

import numpy as np
import torch

from relax_hpc.config import Config, config_from_tree
from relax_hpc.records import FinishReason, Row

VOCAB = 101  # odd: tensor parallelism has to pad it


def make_model(folder: Path, kind: str = "qwen3", tied: bool = True) -> typing.Any:
    """Write a 4-layer model (head_dim != hidden / heads for Qwen3) and return it."""
    import transformers  # slow to import, and the ranks do not need it

    options = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": tied,
    }
    configs = {
        "qwen3": lambda: transformers.Qwen3Config(head_dim=24, **options),
        "qwen2": lambda: transformers.Qwen2Config(**options),
        "llama": lambda: transformers.LlamaConfig(**options),
    }
    generator = torch.Generator().manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(configs[kind]()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if "embed" in name else 0.5 if name.endswith("bias") else 0.08
            parameter.normal_(0, spread, generator=generator)
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
    model.save_pretrained(folder)
    return model


def make_rows(seed: int, groups: int, group_size: int = 4, max_tokens: int = 12) -> list[Row]:
    """Random groups: prompts and responses of 1 .. max_tokens tokens, some of them masked."""
    generator = np.random.default_rng(seed)
    rows = []
    for group in range(groups):
        num_prompt = int(generator.integers(1, max_tokens))
        prompt = generator.integers(0, VOCAB, num_prompt)
        for sample in range(group_size):
            size = int(generator.integers(1, max_tokens))
            mask = generator.random(size) < 0.8
            mask[0] = True
            fields = {
                "tokens": np.concatenate([prompt, generator.integers(0, VOCAB, size)]),
                "rollout_logprobs": generator.normal(-4, 1, size).astype(np.float32),
                "token_versions": np.zeros(size, np.int32),
                "loss_mask": mask.astype(np.uint8),
                "reward": np.float32(generator.normal()),
                "accuracy": np.float32(sample % 2),
            }
            fields["tokens"] = fields["tokens"].astype(np.int32)
            rows.append(
                Row(
                    uid=f"0.{seed}.{group}",
                    sample_index=sample,
                    group_size=group_size,
                    num_prompt_tokens=num_prompt,
                    finish_reason=FinishReason.STOP,
                    fields={name: np.asarray(value) for name, value in fields.items()},
                )
            )
    return rows


def make_config(model: Path, /, **sections: dict[str, object]) -> Config:
    """A small run on that model; sections are merged over the defaults."""
    tree: dict[str, dict[str, object]] = {
        "run": {"name": "test", "train_steps": 4},
        "model": {"path": str(model)},
        "data": {"train": "unused.jsonl"},
        "rollout": {"groups_per_step": 4, "group_size": 4, "max_response_tokens": 16},
        "train": {"lr": 1e-2, "micro_batch_tokens": 64, "chunks_per_step": 1, "save_interval": 0},
        "recovery": {"progress_timeout_s": 60.0},
    }
    for name, values in sections.items():
        tree.setdefault(name, {}).update(values)
    return config_from_tree(tree, "test")
