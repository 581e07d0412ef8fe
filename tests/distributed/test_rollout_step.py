"""Real rollout and dcs steps with real kills; the train step is played by the test."""

import importlib.machinery
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

from relax_hpc.config import Config, config_from_tree, config_to_json
from relax_hpc.control.identity import Identity, LocalPlace, task_environment
from relax_hpc.control.registry import members
from relax_hpc.control.rpc import RpcClient, create_keys
from relax_hpc.dcs.client import WeightPublisher
from relax_hpc.dcs.layout import Box, TensorSpec
from relax_hpc.metrics.metric import read_metrics, series
from relax_hpc.records import Row
from relax_hpc.runfolder import RunFolder, create_run_folder
from relax_hpc.transfer.transfer_queue import TransferQueue

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
NODE = "n1"
STEPS, GROUPS, SIZE = 6, 4, 4


def _tool(name: str) -> Any:
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "tools" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's architecture and tokenizer with random weights, and some additions."""
    folder = tmp_path_factory.mktemp("model")
    tool = _tool("make_tiny_model")
    torch.manual_seed(0)
    tokenizer = tool.build_tokenizer()
    tool.build_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for split, count in (("train", 40), ("eval", 12)):
        rows = [
            {"prompt": [{"role": "user", "content": f"{i}+{i + 7}="}], "label": str(2 * i + 7)}
            for i in range(10, 10 + count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Iterator["Run"]:
    run = Run(create_run_folder(tmp_path, "run"))
    yield run
    run.end()


class Run:
    """A run folder and the steps started in it."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        create_keys(folder)

    def configure(self, model: Path, **rollout: Any) -> Config:
        staleness = rollout.get("max_staleness", 1)
        tree: dict[str, Any] = {
            "run": {
                "name": "run",
                "train_steps": STEPS,
                "mode": "async" if staleness else "async_on_policy",
            },
            "model": {"path": str(model)},
            "data": {"train": str(model / "train.jsonl"), "eval": str(model / "eval.jsonl")},
            "reward": {"kind": "tests.distributed.rollout_reward.even"},
            "rollout": {
                "groups_per_step": GROUPS,
                "group_size": SIZE,
                "max_response_tokens": 6,
                "eval_interval": 3,
                **rollout,
            },
            "train": {"chunks_per_step": 2},
            "transfer": {"extent_mb": 2, "arena_mb": 32},
            "resources": {"rollout": {"ranks": rollout.get("num_engines", 1)}},
        }
        config = config_from_tree(tree, "test")
        self.folder.config.write_text(config_to_json(config))
        return config

    def start(self, role: str, index: int = 0, incarnation: int = 1) -> subprocess.Popen[bytes]:
        environment = task_environment(
            run=self.folder,
            role=role,
            index=index,
            attempt=1,
            incarnation=incarnation,
            address_prefix="127.",
            local=LocalPlace(rank=0, world=1, local_rank=0, node=NODE),
        )
        with (self.folder.path / f"{role}-{index}.{incarnation}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"relax_hpc.steps.{role}"],
                env=os.environ | environment | {"OMP_NUM_THREADS": "1"},
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    def logs(self) -> str:
        paths = sorted(self.folder.path.glob("*.log"))
        return "\n".join(f"== {p.name}\n{p.read_text()[-4000:]}" for p in paths)

    def identity(self, role: str) -> Identity:
        return Identity(run=self.folder, role=role, node=NODE, address_prefix="127.")

    def end(self) -> None:
        for process in reversed(self.processes):  # the dcs step last
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        shutil.rmtree(self.folder.shm(NODE), ignore_errors=True)


class Trainer:
    """Plays the train step: publishes, takes chunks, completes steps."""

    def __init__(self, run: Run, model: Path) -> None:
        identity = run.identity("train")
        self.queue, self.publisher = TransferQueue(identity), WeightPublisher(identity)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.rows: dict[int, list[Row]] = {}
        self.staleness: list[int] = []

    def publish(self, version: int) -> None:
        generator = torch.Generator().manual_seed(version)
        pieces, specs = [], []
        for name, parameter in self.model.named_parameters():
            if version:
                parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
            shape = tuple(parameter.shape)
            array = parameter.detach().numpy().copy()
            pieces.append((Box(name, (0,) * len(shape), shape), "float32", array))
            specs.append(TensorSpec(name, "float32", shape))
        self.weights[version] = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.publisher.publish(version, pieces, specs, 1, 0)

    def train(self, after_step: Callable[[int], None] = lambda step: None) -> None:
        self.queue.begin_train(0)
        self.publish(0)
        for step in range(STEPS):
            self.rows[step] = []
            for index in range(2):
                chunk = self.queue.take_chunk(step, index, 0, 1, timeout_s=90.0)
                self.rows[step] += [_copy(row) for row in chunk.rows]
            self.staleness.append(self.queue.complete_step(step).staleness_max)
            self.publish(step + 1)
            after_step(step)

    def check(self, max_staleness: int) -> None:
        uids = [row.uid for rows in self.rows.values() for row in rows]
        assert len(uids) == STEPS * GROUPS * SIZE
        assert len(set(uids)) == STEPS * GROUPS
        assert max(self.staleness) <= max_staleness
        for step, rows in self.rows.items():
            for row in rows:
                assert step - int(row.fields["token_versions"].min()) <= max_staleness
            self.check_logprobs(rows[:3])

    def check_logprobs(self, rows: list[Row]) -> None:
        """Each token's log-prob is that of the version that it names."""
        for row in rows:
            tokens = torch.tensor(row.fields["tokens"], dtype=torch.int64)
            response = tokens[row.num_prompt_tokens :]
            for version in set(row.fields["token_versions"].tolist()):
                self.model.load_state_dict(self.weights[version])
                with torch.no_grad():
                    logits = self.model(tokens[None]).logits[0]
                table = torch.log_softmax(logits[row.num_prompt_tokens - 1 : -1], -1)
                expected = table.gather(1, response[:, None])[:, 0].numpy()
                here = row.fields["token_versions"] == version
                np.testing.assert_allclose(
                    row.fields["rollout_logprobs"][here], expected[here], atol=2e-4
                )


def _copy(row: Row) -> Row:
    return msgspec.structs.replace(row, fields={k: v.copy() for k, v in row.fields.items()})


def _wait_all(run: Run, processes: list[subprocess.Popen[bytes]], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    for process in processes:
        try:
            code = process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"a rollout step does not end:\n{run.logs()}") from None
        assert code == 0, run.logs()


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_with_two_engines(run: Run, model_folder: Path, staleness: int) -> None:
    run.configure(model_folder, max_staleness=staleness, num_engines=2)
    run.start("dcs")
    engines = [run.start("rollout", index) for index in range(2)]
    trainer = Trainer(run, model_folder)
    try:
        trainer.train()
    except Exception as err:
        raise AssertionError(f"{err}\n{run.logs()}") from err
    _wait_all(run, engines)
    trainer.check(staleness)
    records = read_metrics(run.folder)
    assert {step for step, _ in series(records, "eval/accuracy")} == {0, 3, 6}
    assert {value for _, value in series(records, "eval/samples")} == {12.0}
    status = trainer.queue.status()
    assert set(status.dropped) <= {"uninformative"} and not status.redispatched


def test_kill_9_of_an_engine_and_of_the_dcs(run: Run, model_folder: Path) -> None:
    run.configure(model_folder)
    dcs = run.start("dcs")
    engine = run.start("rollout")
    trainer = Trainer(run, model_folder)

    def after_step(step: int) -> None:
        nonlocal dcs, engine
        if step == 1:
            engine.send_signal(signal.SIGKILL)
            engine.wait()
            engine = run.start("rollout", incarnation=2)
        if step == 3:
            dcs.send_signal(signal.SIGKILL)
            dcs.wait()
            dcs = run.start("dcs", incarnation=2)

    try:
        trainer.train(after_step)
    except Exception as err:
        raise AssertionError(f"{err}\n{run.logs()}") from err
    _wait_all(run, [engine])
    trainer.check(1)


def test_sigterm_ends_the_step_in_order(run: Run, model_folder: Path) -> None:
    run.configure(model_folder)
    run.start("dcs")
    engine = run.start("rollout")
    client = RpcClient(run.folder, "control", run.identity("train"))
    deadline = time.monotonic() + 60
    while not any(m.progress.get("state") == "running" for m in members(client, timeout_s=60)):
        assert time.monotonic() < deadline, run.logs()
        time.sleep(0.2)
    engine.send_signal(signal.SIGTERM)
    assert engine.wait(30) == 143, run.logs()
    assert not [m for m in members(client) if m.role == "rollout"]


def test_another_data_set_is_refused_with_a_sentence(run: Run, model_folder: Path) -> None:
    run.configure(model_folder)
    run.start("dcs")
    TransferQueue(run.identity("rollout")).open_dataset(3, "other")
    engine = run.start("rollout", incarnation=2)
    assert engine.wait(60) == 1
    assert "this run began with a data set of 3 prompts" in run.logs()
