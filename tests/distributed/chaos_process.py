"""A process of a small run that tests kill at any moment; its role comes from the environment.

Each payload is a function of its uid: whoever reads a row computes what it must be, so a torn,
mixed-up or stale one is seen in any field. Some prompts are always dropped, also by a function of
the prompt. The train step appends `step uid uid ...` to RUN/trained (synced) after its optimizer
step, and saves every second step a "checkpoint" (RUN/checkpoint: the ledger's cut of that step), so
that a restart may have to repeat a step. RUN/chaos.json: the settings of the run.
"""

import json
import os
import random
import signal
import time
import zlib
from types import FrameType

import numpy as np

from relax_hpc.config import TransferConfig
from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import RpcServer
from relax_hpc.records import Fields, FinishReason, PromptSlot, Row, Sample
from relax_hpc.transfer import wire
from relax_hpc.transfer.agent import NodeAgent
from relax_hpc.transfer.controller import QueueController
from relax_hpc.transfer.queue_rules import QueueRulesConfig
from relax_hpc.transfer.transfer_queue import TransferQueue

NUM_PROMPTS = 64
GROUP_SIZE = 2
SPILLED = "spilled"
"""File of the run folder: an engine's payload went to disk."""
DROPPED = "uninformative"


def settings_of(me: Identity) -> tuple[QueueRulesConfig, TransferConfig, float]:
    """Return the queue's rules, the transfer section, and how long a chunk takes."""
    chaos = json.loads((me.run.path / "chaos.json").read_text())
    # Less memory than the groups in flight may need: producers wait now and then.
    transfer = TransferConfig(extent_mb=4, put_timeout_s=120, **chaos["transfer"])
    return rules(chaos["train_steps"]), transfer, chaos["chunk_s"]


def rules(train_steps: int) -> QueueRulesConfig:
    """Return the queue's settings of a chaos run."""
    return QueueRulesConfig(
        groups_per_step=4,
        group_size=GROUP_SIZE,
        max_staleness=2,
        chunks_per_step=2,
        train_steps=train_steps,
        task_fields={"ref": "ref_logprobs"},
        seed=5,
    )


def is_dropped(epoch: int, prompt_index: int) -> bool:
    """About one prompt of nine is useless, whoever generates it and how often."""
    return zlib.crc32(f"{epoch} {prompt_index}".encode()) % 9 == 0


def make_fields(uid: str, sample: int) -> Fields:
    """All that the uid decides (not the policy version)."""
    chance = np.random.default_rng(zlib.crc32(f"{uid} {sample}".encode()))
    length = int(chance.integers(1, 30_000))
    return {
        "tokens": chance.integers(0, 2**31 - 1, 2 + length, np.int32),
        "rollout_logprobs": chance.random(length, np.float32),
        "loss_mask": chance.integers(0, 2, length, np.uint8),
        "reward": np.asarray(chance.random(), np.float32),
        "accuracy": np.asarray(chance.random(), np.float32),
        "pixel_values": chance.random((int(chance.integers(1, 60)), 1000), np.float32),
    }


def ref_logprobs(uid: str, sample: int, length: int) -> np.ndarray:
    """What the ref step computes."""
    return np.random.default_rng(zlib.crc32(f"ref {uid} {sample}".encode())).random(
        length, np.float32
    )


def make_group(slot: PromptSlot, version: int) -> list[Sample]:
    """One group, from its uid."""
    samples = []
    for index in range(GROUP_SIZE):
        fields = make_fields(slot.uid, index)
        versions = np.full(fields["rollout_logprobs"].shape, version, np.int32)
        samples.append(
            Sample(
                num_prompt_tokens=2,
                finish_reason=FinishReason.STOP,
                fields={**fields, "token_versions": versions},
            )
        )
    return samples


def check_row(row: Row) -> None:
    """Every byte is what the uid says.

    Raises:
        AssertionError: names the field that is torn, mixed up or missing.
    """
    expected = make_fields(row.uid, row.sample_index)
    for name, array in expected.items():
        seen = row.fields[name]
        where = f"{row.uid} sample {row.sample_index} {name}"
        assert (seen.dtype, seen.shape) == (array.dtype, array.shape), f"torn: {where}"
        assert seen.tobytes() == array.tobytes(), f"torn: {where}"


def dcs(me: Identity) -> None:
    """Rank 0: the controller and the agent of its node; other ranks: only an agent."""
    config, transfer, _ = settings_of(me)
    agent = NodeAgent(me, transfer)
    agent.start()
    stopped: list[int] = []
    if me.rank == 0:
        server = RpcServer(me.run, wire.SERVICE, me)
        QueueController(server, me, config)
        server.start_thread()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)

    signal.signal(signal.SIGTERM, stop)
    while not stopped:
        time.sleep(0.05)
    if me.rank == 0:
        server.stop()
    agent.close(remove=True)


def rollout(me: Identity) -> None:
    """An engine that lags behind, and is sometimes slow."""
    chance = random.Random(100 * me.index + me.incarnation)
    queue = TransferQueue(me, config=settings_of(me)[1])
    queue.open_dataset(NUM_PROMPTS, "data")
    while True:
        version = max(0, queue.status().version - chance.randint(0, 1))
        admission = queue.admit(version, chance.randint(1, 4), 0.3)
        if admission.done:
            queue.close()
            return
        for slot in admission.slots:
            time.sleep(chance.random() * 0.02)
            if is_dropped(slot.epoch, slot.prompt_index):
                queue.drop_group(slot, DROPPED)
            elif chance.random() < 0.05:
                queue.return_group(slot, "aborted")
            else:
                queue.put_group(slot, make_group(slot, version))
                stats = queue.arena_stats()
                if stats is not None and stats.spilled_bytes:
                    (me.run.path / SPILLED).touch()


def ref(me: Identity) -> None:
    """Adds a field to every row."""
    chance = random.Random(me.incarnation)
    queue = TransferQueue(me, config=settings_of(me)[1])
    while not (me.run.path / "done").exists():
        rows = queue.take_rows("ref", chance.randint(1, 6), 0.3)
        if not rows:
            continue
        torn = {row.uid for row in rows if _is_torn(row)}
        time.sleep(chance.random() * 0.01)
        for uid in torn:
            # Its group ended meanwhile and the memory is used again: then nobody wants it.
            of_group = [row for row in rows if row.uid == uid]
            assert not _put_ref(queue, of_group), f"torn rows of {uid} are still wanted"
        _put_ref(queue, [row for row in rows if row.uid not in torn])
    queue.close()


def _is_torn(row: Row) -> bool:
    try:
        check_row(row)
    except AssertionError:
        return True
    return False


def _put_ref(queue: TransferQueue, rows: list[Row]) -> bool:
    arrays = [
        ref_logprobs(row.uid, row.sample_index, row.num_tokens - row.num_prompt_tokens)
        for row in rows
    ]
    return queue.put_fields(rows, "ref_logprobs", arrays)


def train(me: Identity) -> None:
    """Takes, checks every byte, trains, saves, acknowledges."""
    config, transfer, chunk_s = settings_of(me)
    queue = TransferQueue(me, config=transfer)
    checkpoint = me.run.path / "checkpoint"
    begin, cut = 0, None
    if checkpoint.exists():
        number, cut = checkpoint.read_bytes().split(b" ", 1)
        begin = int(number)
    queue.begin_train(begin, cut)
    for step in range(begin, config.train_steps):
        rows: list[Row] = []
        for index in range(config.chunks_per_step):
            rows += queue.take_chunk(step, index, 0, 1, 100.0).rows
            _check(rows, step, config.max_staleness)
            time.sleep(chunk_s)
        _check(rows, step, config.max_staleness)  # views stay as they are until the step is told
        summary = queue.complete_step(step)
        assert 0 <= summary.staleness_max <= config.max_staleness
        _append(me, f"{step} {' '.join(dict.fromkeys(row.uid for row in rows))}\n")
        if step % 2 == 1 or step == config.train_steps - 1:
            _save(me, step + 1, queue.cut_ledger(step + 1))
    (me.run.path / "done").touch()
    queue.close()


def _check(rows: list[Row], step: int, max_staleness: int) -> None:
    for row in rows:
        check_row(row)
        length = row.num_tokens - row.num_prompt_tokens
        expected = ref_logprobs(row.uid, row.sample_index, length)
        assert row.fields["ref_logprobs"].tobytes() == expected.tobytes(), f"torn: {row.uid}"
        versions = row.fields["token_versions"]
        assert 0 <= step - int(versions.min()) <= max_staleness, f"too old: {row.uid}"


def _append(me: Identity, line: str) -> None:
    with (me.run.path / "trained").open("a") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _save(me: Identity, step: int, cut: bytes) -> None:
    path = me.run.path / "checkpoint"
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(f"{step} ".encode() + cut)
    temporary.replace(path)


if __name__ == "__main__":
    role = {"dcs": dcs, "rollout": rollout, "ref": ref, "train": train}
    identity = Identity.from_env()
    role[identity.role](identity)
