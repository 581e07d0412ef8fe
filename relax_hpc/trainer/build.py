"""Build the megatron backend of a role; torch.distributed must be initialised."""

import dataclasses
import math
import typing
from pathlib import Path

from relax_hpc.config import Config, TrainConfig
from relax_hpc.errors import ConfigError
from relax_hpc.trainer import hf_weights
from relax_hpc.trainer.megatron_compat import import_megatron
from relax_hpc.trainer.model_config import read_model_shape

if typing.TYPE_CHECKING:
    from relax_hpc.trainer.megatron import MegatronBackend

TIMEOUT_MARGIN_S = 300.0
"""Collectives wait this much longer than the leader for rows: the cause is reported first."""


def initial_weights(config: Config) -> Path:
    """Return the Hugging Face folder that the run starts from: `model.path` or `run.init_from`."""
    if not config.run.init_from:
        return Path(config.model.path)
    run, _, step = config.run.init_from.rpartition("@")
    return Path(run) / "checkpoints" / f"step_{step}" / "hf"


def collective_timeout_s(config: Config) -> float:
    """Seconds after which a collective gives up: longer than any wait for rows."""
    return config.recovery.progress_timeout_s + TIMEOUT_MARGIN_S


def forward_only_config(train: TrainConfig, ranks: int) -> TrainConfig:
    """Parallel layout of a forward-only role: the trainer's if its ranks allow, else all TP.

    A role with fewer ranks than the trainer's replica keeps TP as large as divides its ranks.
    """
    tp = math.gcd(train.tp, ranks)
    pp = train.pp if ranks % (tp * train.pp) == 0 else 1
    return dataclasses.replace(
        train, tp=tp, pp=pp, sequence_parallel=train.sequence_parallel and tp > 1
    )


def build_backend(config: Config, train: TrainConfig, is_training: bool) -> "MegatronBackend":
    """Build model (weights loaded) and, for training, optimizer. Collective over the role's ranks.

    Args:
        config: of the run.
        train: parallel layout of this role.
        is_training: False: forward only, no optimizer.

    Raises:
        ConfigError: the model or the layout is not supported.
    """
    folder = initial_weights(config)
    _refuse_unsupported(train)
    shape = read_model_shape(folder)
    hf_weights.check_parallel(shape, train.tp, train.pp)
    import_megatron()
    from relax_hpc.trainer import megatron

    timeout_min = math.ceil(collective_timeout_s(config) / 60)
    megatron.initialize_parallel(train, timeout_min, config.run.seed)
    groups, place = megatron.make_control_groups()
    dtype = megatron.DTYPES[config.model.dtype]
    backend = megatron.MegatronBackend(shape, train, dtype, groups, place)
    with hf_weights.open_hf_folder(folder) as read:
        backend.load_tensors(read)
    if is_training:
        backend.prepare_training()
    return backend


def _refuse_unsupported(train: TrainConfig) -> None:
    """Refuse what the weight plan knows and this backend does not yet: experts, uneven stages."""
    simple = {"ep": 1, "etp": 0, "first_stage_layers": 0, "last_stage_layers": 0}
    for name, value in simple.items():
        if (seen := getattr(train, name)) != value:
            raise ConfigError(f"train.{name}={seen}: the train step does not shard so; use {value}")
