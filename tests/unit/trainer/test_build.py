"""What the train step refuses before it reads a model."""

import typing
from pathlib import Path

import pytest

from relax_hpc.errors import ConfigError
from relax_hpc.trainer.build import build_backend
from tests.distributed.tiny_models import make_config


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"ep": 2}, "train.ep=2: .* use 1"),
        ({"etp": 1}, "train.etp=1: .* use 0"),
        ({"first_stage_layers": 3}, "train.first_stage_layers=3: .* use 0"),
        ({"last_stage_layers": 3}, "train.last_stage_layers=3: .* use 0"),
    ],
)
def test_layouts_that_only_the_weight_plan_knows(
    tmp_path: Path, setting: dict[str, typing.Any], says: str
) -> None:
    config = make_config(tmp_path / "not-here", train=setting)
    with pytest.raises(ConfigError, match=says):
        build_backend(config, config.train, is_training=True)
