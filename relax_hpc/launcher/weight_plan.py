"""The weight sync of a recipe, planned before the run: `relax-hpc plan --weights`."""

import json
import typing
from collections.abc import Mapping
from pathlib import Path

from relax_hpc.config import Config
from relax_hpc.dcs.architectures import read_model
from relax_hpc.dcs.engine_layout import EngineParallel
from relax_hpc.dcs.plan import Place, Placement
from relax_hpc.dcs.trainer_layout import TrainerParallel
from relax_hpc.dcs.weights_summary import summary
from relax_hpc.errors import ConfigError
from relax_hpc.launcher.plan import Plan, StepPlan

SIZES: typing.Final[Mapping[str, Mapping[str, typing.Any]]] = {
    "Qwen3-235B-A22B": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_experts": 128,
        "tie_word_embeddings": False,
    },
}
"""What decides the tensors in config.json, by the name of the model's folder: a sync of hundreds of
GPUs is planned where nobody wants to download 470 GB."""


def weights_summary(
    config: Config, model_config: Mapping[str, typing.Any], plan: Plan
) -> dict[str, typing.Any]:
    """Plan the weight sync of a run; see `dcs.weights_summary.summary`.

    Switches are known inside of the job only: nodes count as one leaf.

    Args:
        config: of the run: degrees of parallelism and dtype.
        model_config: the model's parsed `config.json`.
        plan: where the steps run.
    """
    trainer = TrainerParallel(
        tp=config.train.tp,
        pp=config.train.pp,
        dp=config.dp,
        ep=config.train.ep,
        etp=config.train.etp,
        first_stage_layers=config.train.first_stage_layers,
        last_stage_layers=config.train.last_stage_layers,
    )
    train = [step for step in plan.steps if step.role == "train"]
    is_replay = bool(config.rollout.replay)  # then rollout steps have no engines
    engines = [step for step in plan.steps if step.role == "rollout" and not is_replay]
    options = config.rollout.sglang_args
    attention_dp = 1
    if "enable-dp-attention" in options:
        attention_dp = _number(options, "dp-size", "data-parallel-size", "dp")
    engine = EngineParallel(
        tp=config.rollout.engine_tp,
        ep=_number(options, "ep-size", "expert-parallel-size", "ep"),
        attention_dp=attention_dp,
        num_engines=len(engines),
        is_lm_head_dp="enable-dp-lm-head" in options,
    )
    placement = Placement(
        tuple(place for step in train for place in _places(step, config.resources.train.ranks)),
        tuple(place for step in engines for place in _places(step, engine.tp)),
    )
    model = read_model(model_config, f"{config.model.path}/config.json")
    return summary(model, config.model.dtype, trainer, engine, placement)


def read_model_config(config: Config) -> tuple[dict[str, typing.Any], str]:
    """Read `config.json` of the recipe's model; of a well-known model also without its folder.

    Returns:
        Its content, and where that is from.

    Raises:
        ConfigError: the folder is not here (yet) and its name is not in SIZES, or the file is no
            JSON object.
    """
    path = Path(config.model.path) / "config.json"
    name = Path(config.model.path).name
    if name in SIZES and not path.exists():
        return dict(SIZES[name]), f"the sizes that relax_hpc knows of {name} ({path} is not here)"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise ConfigError(
            f"model.path={config.model.path}: {path} cannot be read ({err}); the weights' plan "
            "needs the model's config.json: set model.path to a folder that is here, or to one "
            f"named {', '.join(SIZES)}"
        ) from err
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds {type(tree).__name__}, not an object")
    return tree, str(path)


def _number(options: Mapping[str, str | int | float], *names: str) -> int:
    """Value of an SGLang option under one of its names; 1 when it is not set."""
    for name in names:
        if name in options:
            try:
                return int(options[name])
            except ValueError:
                raise ConfigError(
                    f"rollout.sglang_args: {name}={options[name]!r} is no number"
                ) from None
    return 1


def _places(step: StepPlan, num_ranks: int) -> list[Place]:
    """Nodes of a step's ranks: its nodes filled one after the other."""
    nodes = [(part.component, node) for part in step.parts for node in part.nodes]
    numbers = [component * 1_000_000 + node for component, node in nodes]
    return [Place(numbers[rank * len(numbers) // num_ranks]) for rank in range(num_ranks)]
