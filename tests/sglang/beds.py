"""Engines over real SGLang servers for the tests of this folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_hpc.config import Config, config_from_tree
from relax_hpc.control.identity import Identity
from relax_hpc.rollout.sglang_server import SglangEngine
from relax_hpc.runfolder import create_run_folder
from tests.conformance.engines import EngineBed


def config_of(model: Path, tp: int = 1, **rollout: Any) -> Config:
    tree = {
        "run": {"name": "sgl", "train_steps": 1},
        "model": {"path": str(model)},
        "data": {"train": "none.jsonl"},
        "rollout": {
            "engine": "sglang",
            "engine_tp": tp,
            "groups_per_step": 4,
            "group_size": 2,
            "max_response_tokens": 64,
        }
        | rollout,
        "resources": {"rollout": {"ranks": tp}},
        "recovery": {"start_timeout_s": 240.0},
    }
    return config_from_tree(tree, "test")


def identity_of(folder: Path, node: str = "n01") -> Identity:
    return Identity(run=create_run_folder(folder, "sgl"), role="rollout", node=node)


def maker(folder: Path, model: Path, tp: int = 1, **rollout: Any) -> Callable[[], SglangEngine]:
    return lambda: SglangEngine(config_of(model, tp, **rollout), identity_of(folder))


class SglangBed(EngineBed):
    """Removes the run's folder in shared memory too: in a run the node agent does."""

    def close(self) -> None:
        super().close()
        assert isinstance(self.engine, SglangEngine)
        self.engine._folder.parent.rmdir()


def bed_of(folder: Path, model: Path, tp: int = 1, **rollout: Any) -> EngineBed:
    return SglangBed(model, maker(folder, model, tp, **rollout))
