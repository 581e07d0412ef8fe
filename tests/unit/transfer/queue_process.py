"""A process of a small run, for tests that kill it: `queue_process.py controller|rollout|train`.

The train role appends `step uid uid ...` to RUN/trained (fsync) before it tells the queue, and
saves a "checkpoint" (RUN/checkpoint) every second step: a restart may have to repeat a step.
"""

import os
import random
import sys
import time

import numpy as np

from relax_hpc.config import TransferConfig
from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import RpcServer
from relax_hpc.records import FinishReason, PromptSlot, Sample
from relax_hpc.runfolder import write_atomic
from relax_hpc.transfer import wire
from relax_hpc.transfer.agent import NodeAgent
from relax_hpc.transfer.controller import QueueController
from relax_hpc.transfer.queue_rules import QueueRulesConfig
from relax_hpc.transfer.transfer_queue import TransferQueue

RULES = QueueRulesConfig(
    groups_per_step=4, group_size=2, max_staleness=1, chunks_per_step=2, train_steps=14, seed=5
)
NUM_PROMPTS = 40
CONFIG = TransferConfig(extent_mb=1, arena_mb=4)


def make_sample(version: int = 0, num_response: int = 3, mark: int = 7) -> Sample:
    """One sample: 2 prompt tokens and `num_response` response tokens."""
    return Sample(
        num_prompt_tokens=2,
        finish_reason=FinishReason.STOP,
        fields={
            "tokens": np.arange(2 + num_response, dtype=np.int32) + mark,
            "rollout_logprobs": np.full(num_response, -0.5, np.float32),
            "token_versions": np.full(num_response, version, np.int32),
            "loss_mask": np.ones(num_response, np.uint8),
            "reward": np.float32(1.0).reshape(()),
            "accuracy": np.asarray(0.5, np.float32),
        },
    )


def make_group(slot: PromptSlot, version: int = 0, size: int = 2) -> list[Sample]:
    """Samples whose tokens tell the prompt, so that mixed-up payload is seen."""
    return [make_sample(version, 1 + i, 1000 * slot.prompt_index) for i in range(size)]


def controller(me: Identity) -> None:
    NodeAgent(me, CONFIG).start()
    server = RpcServer(me.run, wire.SERVICE, me)
    QueueController(server, me, RULES)
    server.run()


def rollout(me: Identity) -> None:
    chance = random.Random(100 * me.index + me.incarnation)
    queue = TransferQueue(me, config=CONFIG)
    queue.open_dataset(NUM_PROMPTS, "data")
    while True:
        version = max(0, queue.status().version - chance.randint(0, 1))
        admission = queue.admit(version, chance.randint(1, 4), 0.3)
        if admission.done:
            return
        for slot in admission.slots:
            time.sleep(chance.random() * 0.02)
            queue.put_group(slot, make_group(slot, version))


def train(me: Identity) -> None:
    queue = TransferQueue(me, config=CONFIG)
    checkpoint, log = me.run.path / "checkpoint", me.run.path / "trained"
    begin = int(checkpoint.read_text()) if checkpoint.exists() else 0
    queue.begin_train(begin)
    for step in range(begin, RULES.train_steps):
        rows = []
        for index in range(RULES.chunks_per_step):
            rows += queue.take_chunk(step, index, 0, 1, 100.0).rows
            time.sleep(0.02)
        for row in rows:
            assert row.fields["tokens"][0] == 1000 * int(row.uid.split(".")[1]), "mixed up payload"
            assert step - int(row.fields["token_versions"].min()) <= RULES.max_staleness
        summary = queue.complete_step(step)
        assert 0 <= summary.staleness_max <= RULES.max_staleness
        with log.open("a") as file:
            file.write(f"{step} {' '.join(dict.fromkeys(row.uid for row in rows))}\n")
            file.flush()
            os.fsync(file.fileno())
        if step % 2 == 1 or step == RULES.train_steps - 1:
            write_atomic(checkpoint, str(step + 1))


if __name__ == "__main__":
    role = {"controller": controller, "rollout": rollout, "train": train}
    role[sys.argv[1]](Identity.from_env())
