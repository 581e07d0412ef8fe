"""Replay: what is trained from an archive is bit for bit what was trained when it was recorded."""

import dataclasses
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from relax_hpc.config import Config, StalePolicy, config_from_tree
from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import RpcServer, create_keys
from relax_hpc.errors import StaleIncarnationError, TransferError
from relax_hpc.records import FinishReason, PromptSlot, Row, Sample
from relax_hpc.rollout.replay import ReplayParts, _Feeder, plan_replay, replay
from relax_hpc.runfolder import RunFolder, create_run_folder
from relax_hpc.transfer import wire
from relax_hpc.transfer.agent import NodeAgent
from relax_hpc.transfer.archive import GroupArchive, TrainedLog, archive_files, list_groups
from relax_hpc.transfer.controller import QueueController
from relax_hpc.transfer.queue_rules import QueueRulesConfig
from relax_hpc.transfer.transfer_queue import TransferQueue

NUM_PROMPTS = 30
WAIT_S = 60.0
Trained = dict[tuple[int, int, int], list[tuple[Any, ...]]]
"""(step, chunk, dp rank) -> rows, all of their bytes."""


def make_config(**rollout: Any) -> Config:
    staleness = rollout.get("max_staleness", 2)
    tree: dict[str, Any] = {
        "run": {"name": "t", "train_steps": 6, "mode": "async" if staleness else "async_on_policy"},
        "model": {"path": "m"},
        "data": {"train": "a.jsonl"},
        "rollout": {
            "groups_per_step": 4,
            "group_size": 2,
            "max_response_tokens": 8,
            "max_staleness": staleness,
            **rollout,
        },
        "train": {"chunks_per_step": 2},
        "transfer": {"extent_mb": 1, "arena_mb": 8},
    }
    tree["run"] |= (
        {"train_steps": rollout.pop("train_steps", 6)} if "train_steps" in rollout else {}
    )
    tree["rollout"].pop("train_steps", None)
    return config_from_tree(tree, "test")


@dataclasses.dataclass
class Run:
    """A controller and an agent in this process."""

    folder: RunFolder
    config: Config
    server: RpcServer
    agent: NodeAgent
    queues: list[TransferQueue] = dataclasses.field(default_factory=list)

    def who(self, role: str, **changes: Any) -> Identity:
        return Identity(run=self.folder, role=role, node="n1", address_prefix="127.", **changes)

    def queue(self, role: str, **changes: Any) -> TransferQueue:
        queue = TransferQueue(self.who(role, **changes), config=self.config.transfer)
        self.queues.append(queue)
        return queue


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[[Config], Run]]:
    runs: list[Run] = []

    def start(config: Config) -> Run:
        folder = create_run_folder(tmp_path, "run")
        create_keys(folder)
        dcs = Identity(run=folder, role="dcs", node="n1", address_prefix="127.")
        agent = NodeAgent(dcs, config.transfer)
        agent.start()
        server = RpcServer(folder, wire.SERVICE, dcs)
        QueueController(server, dcs, QueueRulesConfig.from_config(config))
        server.start_thread()
        runs.append(Run(folder, config, server, agent))
        return runs[-1]

    yield start
    for run in runs:
        for queue in run.queues:
            queue.close()
        run.server.stop()
        run.agent.close(remove=True)
        shutil.rmtree(run.folder.shm("n1"), ignore_errors=True)


def make_samples(slot: PromptSlot, versions: tuple[int, int]) -> list[Sample]:
    """Few lengths, so that groups tie when chunks are divided; tokens of two versions."""
    generator = np.random.default_rng([int(part) for part in slot.uid.split(".")])
    samples = []
    for index in range(2):
        length = int(generator.integers(1, 4))
        samples.append(
            Sample(
                num_prompt_tokens=2,
                finish_reason=FinishReason.STOP if index else FinishReason.LENGTH,
                fields={
                    "tokens": generator.integers(0, 999, 2 + length).astype(np.int32),
                    "rollout_logprobs": -generator.random(length).astype(np.float32),
                    "token_versions": np.sort(generator.choice(versions, length)).astype(np.int32),
                    "loss_mask": np.ones(length, np.uint8),
                    "reward": np.asarray(generator.random(), np.float32),
                    "accuracy": np.asarray(index, np.float32),
                },
            )
        )
    return samples


def generate(run: Run, index: int, archive: GroupArchive) -> None:
    """An engine that is slow and drops groups now and then."""
    chance = random.Random(index)
    queue = run.queue("rollout", index=index)
    queue.open_dataset(NUM_PROMPTS, "data")
    held: list[tuple[PromptSlot, int]] = []
    while True:
        begun = max(0, queue.status().version - chance.randint(0, 1))
        admission = queue.admit(begun, chance.randint(1, 4), 0.02)
        if admission.done:
            return
        held += [(slot, begun) for slot in admission.slots]
        chance.shuffle(held)
        for slot, version in held[: chance.randint(0, 3)]:
            held.remove((slot, version))
            if chance.random() < 0.15:
                queue.drop_group(slot, "uninformative")
                continue
            now = max(version, queue.status().version)
            samples = make_samples(slot, (version, now))
            if queue.put_group(slot, samples):
                assert archive.offer(slot, samples)


def train(run: Run, dp_size: int, log: TrainedLog | None = None, begin: int = 0) -> Trained:
    """Take everything that a trainer with `dp_size` replicas gets."""
    queue, trained = run.queue("train"), Trained()
    queue.begin_train(begin)
    for step in range(begin, run.config.run.train_steps):
        for index in range(run.config.train.chunks_per_step):
            for dp_rank in range(dp_size):
                chunk = queue.take_chunk(step, index, dp_rank, dp_size, WAIT_S)
                trained[step, index, dp_rank] = [_bytes_of(row) for row in chunk.rows]
        summary = queue.complete_step(step)
        is_bound = run.config.rollout.stale_policy is StalePolicy.REGENERATE
        assert summary.staleness_max <= run.config.rollout.max_staleness or not is_bound
        if log is not None:
            log.append(step, summary.uids)
    return trained


def _bytes_of(row: Row) -> tuple[Any, ...]:
    fields = {
        name: (array.dtype.str, array.shape, array.tobytes()) for name, array in row.fields.items()
    }
    return row.sample_index, row.num_prompt_tokens, str(row.finish_reason), fields


def record(run: Run, dp_size: int = 1) -> Trained:
    """A run of two engines and a trainer; its archive is in RUN/trajectories."""
    folder = run.folder.path / "trajectories"
    archives = [GroupArchive(folder, run.who("rollout", index=i), min_free_bytes=0) for i in (0, 1)]
    engines = [
        threading.Thread(target=generate, args=(run, index, archive), daemon=True)
        for index, archive in enumerate(archives)
    ]
    for engine in engines:
        engine.start()
    trained = train(run, dp_size, TrainedLog(folder))
    for engine, archive in zip(engines, archives, strict=True):
        engine.join(WAIT_S)
        archive.close()
        assert not archive.stats().dropped
    return trained


class Progress:
    is_replaced = False
    told: Mapping[str, Any] = {}

    def report(self, **progress: Any) -> None:
        self.told = progress

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass


def start_replay(run: Run, folder: Path, index: int = 0, **changes: Any) -> threading.Thread:
    queue = run.queue("rollout", index=index, **changes)
    queue.open_dataset(NUM_PROMPTS, "data")
    progress = Progress()
    parts = ReplayParts(queue=queue, progress=progress, metrics=progress, index=index)
    thread = threading.Thread(target=replay, args=(run.config, parts, folder), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(("max_staleness", "dp_size"), [(2, 1), (1, 2), (0, 1)])
def test_a_replay_trains_on_the_same_bits(
    start_run: Callable[[Config], Run], max_staleness: int, dp_size: int
) -> None:
    config = make_config(max_staleness=max_staleness)
    recorded_run = start_run(config)
    recorded = record(recorded_run, dp_size)
    folder = recorded_run.folder.path / "trajectories"
    assert plan_replay(config, folder).is_exact
    again = start_run(config)
    feeders = [start_replay(again, folder, index) for index in (0, 1)]
    replayed = train(again, dp_size)
    assert replayed == recorded
    for feeder in feeders:
        feeder.join(WAIT_S)
        assert not feeder.is_alive()
    status = again.queue("train").status()
    assert status.done and not status.dropped and not status.redispatched
    assert not again.queue("rollout").evals_pending()


def test_a_restarted_feeder_goes_on_where_it_was(start_run: Callable[[Config], Run]) -> None:
    config = make_config()
    recorded_run = start_run(config)
    recorded = record(recorded_run)
    folder = recorded_run.folder.path / "trajectories"
    again = start_run(config)
    queue = again.queue("rollout")
    queue.open_dataset(NUM_PROMPTS, "data")
    replayed: Trained = {}
    trainer = threading.Thread(target=lambda: replayed.update(train(again, 1)), daemon=True)
    trainer.start()
    chance = random.Random(0)
    for incarnation in range(1, 5):
        progress = Progress()
        mine = again.queue("rollout", incarnation=incarnation)
        parts = ReplayParts(queue=mine, progress=progress, metrics=progress)
        thread = threading.Thread(target=_until_replaced, args=(config, parts, folder), daemon=True)
        thread.start()
        if incarnation < 4:
            time.sleep(chance.random() * 0.2)
            progress.is_replaced = True
        thread.join(WAIT_S)
        assert not thread.is_alive()
    trainer.join(WAIT_S)
    assert replayed == recorded


def _until_replaced(config: Config, parts: ReplayParts, folder: Path) -> None:
    try:
        replay(config, parts, folder)
    except StaleIncarnationError:
        return


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_trainer_that_was_rolled_back_gets_each_group_once(
    start_run: Callable[[Config], Run], max_staleness: int
) -> None:
    config = make_config(max_staleness=max_staleness, stale_policy="correct")
    recorded_run = start_run(config)
    recorded = record(recorded_run)
    folder = recorded_run.folder.path / "trajectories"
    again = start_run(config)
    feeder = start_replay(again, folder)
    _train_and_die(again)
    replayed = train(again, 1, begin=2)
    later = {key: rows for key, rows in recorded.items() if key[0] >= 2}
    if max_staleness == 0:  # nothing is fed ahead: also the order is kept
        assert replayed == later
    assert sorted(map(repr, _rows(replayed))) == sorted(map(repr, _rows(later)))
    feeder.join(WAIT_S)
    assert not feeder.is_alive()


def _train_and_die(run: Run) -> None:
    queue = run.queue("train")
    queue.begin_train(0)
    for step in range(4):  # then it dies, with a checkpoint of step 2
        for index in range(2):
            queue.take_chunk(step, index, 0, 1, WAIT_S)
        queue.complete_step(step)


def _rows(trained: Trained) -> list[tuple[Any, ...]]:
    return [row for rows in trained.values() for row in rows]


def test_what_the_archive_lacks_is_replaced_and_told(
    start_run: Callable[[Config], Run], caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config()
    recorded_run = start_run(config)
    record(recorded_run)
    folder = recorded_run.folder.path / "trajectories"
    total = len(list_groups(folder))
    lost = [g for g in list_groups(folder) if g.path == archive_files(folder)[-1]]
    archive_files(folder)[-1].unlink()
    steps = (total - len(lost)) // 4 - 1
    short = make_config(train_steps=steps)
    plan = plan_replay(short, folder)
    assert len(plan.groups) == 4 * steps
    again = start_run(short)
    feeder = start_replay(again, folder)
    train(again, 1)
    feeder.join(WAIT_S)
    with pytest.raises(TransferError, match=r"lower run.train_steps to \d+"):
        plan_replay(make_config(train_steps=50), folder)


def test_without_a_record_of_training_all_groups_are_trained(
    start_run: Callable[[Config], Run],
) -> None:
    config = make_config()
    recorded_run = start_run(config)
    record(recorded_run)
    folder = recorded_run.folder.path / "trajectories"
    (folder / "trained.jsonl").unlink()
    assert not plan_replay(config, folder).is_exact
    again = start_run(config)
    feeder = start_replay(again, folder)
    assert len(_rows(train(again, 1))) == 6 * 4 * 2
    feeder.join(WAIT_S)


def test_an_archive_of_another_shape_is_refused(
    start_run: Callable[[Config], Run], tmp_path: Path
) -> None:
    recorded_run = start_run(make_config())
    record(recorded_run)
    folder = recorded_run.folder.path / "trajectories"
    with pytest.raises(TransferError, match=r"set rollout.group_size=2"):
        plan_replay(make_config(group_size=4), folder)
    with pytest.raises(TransferError, match=r"set rollout.max_staleness to at least"):
        plan_replay(make_config(max_staleness=0), folder)
    with pytest.raises(TransferError, match=r"groups_per_step as it was recorded"):
        plan_replay(make_config(groups_per_step=12, train_steps=2), folder)
    with pytest.raises(TransferError, match=r"holds 0 groups.* need 24"):
        plan_replay(make_config(), tmp_path / "nothing")


class StubQueue:
    """A queue at one version that has lost groups and grants what it is told to."""

    def __init__(self, version: int, in_queue: int, slots: list[PromptSlot]) -> None:
        self.version, self.in_queue, self.slots = version, in_queue, slots
        self.put: list[str] = []
        self.returned: list[str] = []
        self.asked: list[int] = []

    def status(self) -> Any:
        return SimpleNamespace(
            version=self.version, done=False, waiting=0, ready=self.in_queue, assigned=0
        )

    def admit(self, engine_version: int, max_groups: int, timeout_s: float) -> Any:
        self.asked.append(engine_version)
        slots, self.slots = self.slots[:max_groups], self.slots[max_groups:]
        return SimpleNamespace(slots=slots, done=False)

    def put_group(self, slot: PromptSlot, samples: list[Sample]) -> bool:
        self.put.append(slot.uid)
        self.in_queue += 1
        return True

    def return_group(self, slot: PromptSlot, reason: str) -> None:
        self.returned.append(slot.uid)


def test_a_lost_group_that_became_too_old_ends_the_replay(tmp_path: Path) -> None:
    config = make_config(max_staleness=1)
    who = Identity(run=RunFolder(tmp_path), role="rollout", node="n1")
    archive = GroupArchive(tmp_path / "trajectories", who, min_free_bytes=0)
    for number in range(24):  # group n is trained in step n // 4, on tokens of the version before
        slot = _slot(f"0.{number}.0", number // 4)
        version = max(number // 4 - 1, 0)
        archive.offer(slot, make_samples(slot, (version, version)))
    archive.close()
    slots = [_slot(f"0.{k}.0", max(k // 4, 1)) for k in range(12)]
    queue = StubQueue(0, 0, slots)
    parts = ReplayParts(queue=queue, progress=Progress(), metrics=Progress())
    feeder = _Feeder(config, parts, plan_replay(config, tmp_path / "trajectories").groups)
    feeder._feed_some(queue.status())
    feeder._feed_some(queue.status())
    queue.version, queue.in_queue = 1, 4
    feeder._feed_some(queue.status())
    assert queue.put == [f"0.{k}.0" for k in range(12)]
    # Step 1 is trained; back to step 1, where groups of step 2 are taken instead of its own.
    queue.version, queue.in_queue = 2, 0
    queue.slots = [_slot(f"0.{k}.1", 2) for k in range(4, 8)]
    feeder._feed_some(queue.status())
    assert queue.put[12:] == [] and queue.returned == [f"0.{k}.1" for k in range(4, 8)]
    with pytest.raises(TransferError, match=r"rolled back to step 2 .* 4 groups, .* 0\.4\.0 "):
        feeder._feed_some(queue.status())


def _slot(uid: str, deadline_version: int) -> PromptSlot:
    index = int(uid.split(".")[1])
    return PromptSlot(uid=uid, prompt_index=index, epoch=0, deadline_version=deadline_version)
