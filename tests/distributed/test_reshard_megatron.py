"""Megatron's own parameters to engine ranks of another world, while its optimizer writes them."""

import json
import typing
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from relax_hpc.dcs.layout import Box
from relax_hpc.dcs.reshard import ShardReceiver, ShardSender
from relax_hpc.dcs.weight_group import WeightGroup
from relax_hpc.trainer.hf_weights import open_hf_folder
from tests.distributed.fakes import FakeKeeper, FakePublisher, FakeQueue, FakeReporter
from tests.distributed.launch import start_distributed
from tests.distributed.reshard_process import DEADLINE_S, Case, make_case
from tests.distributed.tiny_models import make_config, make_model, make_rows

pytestmark = pytest.mark.distributed

TRAINER = {"tp": 2, "pp": 2}
ENGINES = {"tp": 2, "num_engines": 1}
NUM_TRAINER, NUM_ENGINE = 4, 2


def case_of(root: str) -> Case:
    config = json.loads(Path(root, "model/config.json").read_text())
    return make_case(config, TRAINER, ENGINES)


def group_of(root: str, rank: int) -> WeightGroup:
    """Join from one of two worlds of torch.distributed; beside it, not in it."""
    size = NUM_TRAINER + NUM_ENGINE
    store = dist.FileStore(f"{root}/weights", size)
    return WeightGroup(store, rank, size, name="one", deadline_s=DEADLINE_S)


def trainer_rank(root: str) -> None:
    """Version 1 is what was loaded, version 2 what two steps made of it."""
    from relax_hpc.trainer.megatron_compat import import_megatron

    import_megatron()
    from relax_hpc.trainer.build import build_backend
    from relax_hpc.trainer.loop import TrainLoop, TrainServices

    folder = Path(root, "model")
    config = make_config(
        folder,
        run={"train_steps": 2},
        model={"dtype": "bfloat16"},
        train=TRAINER,
        resources={"train": {"ranks": NUM_TRAINER}},
    )
    backend = build_backend(config, config.train, is_training=True)
    rank = dist.get_rank()
    held = [(item.box, item.view) for item in backend.held]
    case = case_of(root)
    sender = ShardSender(case.plan, rank, group_of(root, rank), held, deadline_s=DEADLINE_S)
    sender.snapshot(1)
    services = TrainServices(
        queue=FakeQueue(lambda step: make_rows(step, groups=4)),
        publisher=FakePublisher(),
        keeper=FakeKeeper(),
        reporter=FakeReporter(),
    )
    assert TrainLoop(config, backend, services).run()
    sender.snapshot(2)
    backend.export_hf(Path(root, "trained"), folder)
    sender.drain()
    sender.close()


def engine_rank(root: str) -> list[list[typing.Any]]:
    """Write the bits of every box of both versions into files; returns [version, box, file]."""
    rank = dist.get_rank()
    group = group_of(root, NUM_TRAINER + rank)
    receiver = ShardReceiver(case_of(root).plan, rank, group, deadline_s=DEADLINE_S)
    written = []
    for version in (1, 2):
        for number, (box, tensor) in enumerate(receiver.receive(version).items()):
            path = f"{root}/{rank}-{version}-{number}.npy"
            np.save(path, tensor.view(torch.int16).numpy())
            written.append([version, [box.name, box.start, box.stop], path])
    return written


def test_engines_get_what_megatron_holds(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen3", tied=True)
    (tmp_path / "trained").mkdir()
    trainers = start_distributed(trainer_rank, NUM_TRAINER, str(tmp_path))
    engines = start_distributed(engine_rank, NUM_ENGINE, str(tmp_path))
    try:
        trainers.wait()
        written = [line for of_rank in engines.wait() for line in of_rank]
    finally:
        trainers.kill()
        engines.kill()
    changed = 0
    with open_hf_folder(tmp_path / "model") as first, open_hf_folder(tmp_path / "trained") as last:
        for version, (name, start, stop), path in written:
            box = Box(name, tuple(start), tuple(stop))
            wanted = (first if version == 1 else last)(box).to(torch.bfloat16).contiguous()
            seen = torch.from_numpy(np.load(path))
            assert torch.equal(seen, wanted.view(torch.int16)), (version, box)
            if version == 2:
                changed += int((seen != first(box).to(torch.bfloat16).view(torch.int16)).sum())
    assert changed > 0  # the steps did something
