"""Valid ranges of all numbers in a recipe, in one table."""

import dataclasses
from typing import Any

from relax_hpc.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Valid values of a number; NaN and infinity never are."""

    low: float
    high: float = 1e9
    is_open: bool = False
    """Without the ends."""

    def has(self, value: float) -> bool:
        """Whether the value is valid; False for NaN and infinity."""
        if self.is_open:
            return self.low < value < self.high
        return self.low <= value <= self.high

    def __str__(self) -> str:
        if self.high == 1e9:
            return f"> {self.low:g}" if self.is_open else f">= {self.low:g}"
        if self.is_open:
            return f"> {self.low:g} and < {self.high:g}"
        return f"in {self.low:g} .. {self.high:g}"


_POSITIVE, _SECONDS, _COUNT = Range(0, is_open=True), Range(0, is_open=True), Range(1)
_NOT_NEGATIVE, _PROBABILITY = Range(0), Range(0, 1)
_BETA, _SEED = Range(0, 1, is_open=True), Range(0, 2**53)

RANGES = {
    "run": {"seed": _SEED, "train_steps": _COUNT},
    "data": {
        "max_prompt_tokens": _COUNT,
        "num_train_prompts": _COUNT,
        "num_eval_prompts": _NOT_NEGATIVE,
    },
    "reward": {"timeout_s": _SECONDS},
    "algorithm": {
        "clip_low": _BETA,
        "clip_high": _POSITIVE,
        "kl_coef": _NOT_NEGATIVE,
        "entropy_coef": _NOT_NEGATIVE,
        "tis_clip": _NOT_NEGATIVE,
        "overlong_buffer_tokens": _NOT_NEGATIVE,
        "overlong_penalty": _NOT_NEGATIVE,
    },
    "rollout": {
        "num_engines": _COUNT,
        "engine_tp": _COUNT,
        "groups_per_step": _COUNT,
        "group_size": _COUNT,
        "max_response_tokens": _COUNT,
        "max_staleness": _NOT_NEGATIVE,
        "max_concurrent_groups": _NOT_NEGATIVE,
        "temperature": _POSITIVE,
        "top_p": Range(1, 1),
        "top_k": Range(-1, -1),
        "max_tokens_in_cache": _COUNT,
        "eval_interval": _NOT_NEGATIVE,
        "eval_samples": _COUNT,
        "eval_temperature": _NOT_NEGATIVE,
        "eval_top_p": _PROBABILITY,
        "eval_max_response_tokens": _NOT_NEGATIVE,
    },
    "train": {
        "tp": _COUNT,
        "pp": _COUNT,
        "ep": _COUNT,
        "etp": _NOT_NEGATIVE,
        "first_stage_layers": _NOT_NEGATIVE,
        "last_stage_layers": _NOT_NEGATIVE,
        "micro_batch_tokens": _COUNT,
        "chunks_per_step": _COUNT,
        "lr": _BETA,
        "min_lr": Range(-1, 1),
        "lr_warmup_steps": _NOT_NEGATIVE,
        "weight_decay": _NOT_NEGATIVE,
        "adam_beta1": Range(0, 0.999999),
        "adam_beta2": Range(0, 0.999999),
        "adam_eps": _BETA,
        "clip_grad": _NOT_NEGATIVE,
        "save_interval": _NOT_NEGATIVE,
        "keep_checkpoints": _COUNT,
    },
    "transfer": {
        "extent_mb": _COUNT,
        "arena_mb": _COUNT,
        "node_shm_mb": _NOT_NEGATIVE,
        "spill_mb": _NOT_NEGATIVE,
        "put_timeout_s": _SECONDS,
        "streams": Range(1, 64),
    },
    "resources.*": {"ranks": _COUNT, "nodes": _COUNT, "cpus_per_rank": _COUNT},
    "resources": {
        "nodes": _COUNT,
        "gpus_per_node": _NOT_NEGATIVE,
        "mem_per_node_gb": _NOT_NEGATIVE,
        "time_min": _COUNT,
    },
    "recovery": {
        "max_role_restarts": _NOT_NEGATIVE,
        "max_train_restarts": _NOT_NEGATIVE,
        "heartbeat_timeout_s": _SECONDS,
        "start_timeout_s": _SECONDS,
        "progress_timeout_s": _SECONDS,
    },
}
"""Every number of every section; a field without a range does not pass the tests."""

_WHY = {
    "rollout.temperature": " (greedy samples teach nothing)",
    "rollout.top_p": " (a truncated support biases the probability ratio; eval_top_p may be less)",
    "rollout.top_k": " (a truncated support biases the probability ratio)",
}


def check_numbers(section: str, config: Any) -> None:
    """Refuse numbers outside of the table.

    Raises:
        ConfigError: names the key, its value and what is valid.
    """
    for name, valid in RANGES[section].items():
        key, value = f"{section}.{name}", getattr(config, name)
        if not valid.has(value):
            raise ConfigError(f"{key}={value}: must be {valid}{_WHY.get(key, '')}")
