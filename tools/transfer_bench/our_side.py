"""Our side: `python -m transfer_bench.our_side controller|agent|producer|consumer WORK`.

The four processes of a node in a real run: the queue controller (CURVE, journal with fsync), the
node agent, a producer and a consumer, each told by RELAX_* variables who it is. Slots are admitted
and steps completed while the clock stands, as TransferQueue has neither.
"""

import sys
import time
from collections.abc import Callable

from relax_hpc.config import TransferConfig
from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import RpcServer
from relax_hpc.errors import DeadlineError
from relax_hpc.records import FinishReason, PromptSlot, Sample
from relax_hpc.transfer import wire
from relax_hpc.transfer.agent import NodeAgent
from relax_hpc.transfer.controller import QueueController
from relax_hpc.transfer.queue_rules import QueueRulesConfig
from relax_hpc.transfer.schema import Length, RowSchema, column
from relax_hpc.transfer.transfer_queue import TransferQueue
from transfer_bench.side import Answer, serve
from transfer_bench.work import GROUP_SIZE, Work, checksum, make_work

_DEADLINE_S = 60.0
_NUM_PROMPTS = 1_000_000
_CONFIG = TransferConfig(arena_mb=2048)
_TEXT_ROWS = RowSchema(
    columns={
        "tokens": column("int32", Length.TOKENS),
        "logprobs": column("float32", Length.TOKENS),
    },
    tokens="tokens",
)
_TENSOR_ROWS = RowSchema(columns={})
"""Nothing is required and nothing looked at: TransferQueue does not, either."""


def controller(me: Identity, work: Work) -> None:
    """Serve until the end of the input."""
    num_groups = len(work.samples) // GROUP_SIZE
    rules = QueueRulesConfig(
        groups_per_step=num_groups, group_size=GROUP_SIZE, max_staleness=1, chunks_per_step=1,
        train_steps=_NUM_PROMPTS // num_groups,
    )  # fmt: skip
    server = RpcServer(me.run, wire.SERVICE, me)
    QueueController(server, me, rules)
    server.start_thread()
    serve({"ready": dict})
    server.stop()


def agent(me: Identity, work: Work) -> None:
    """Serve until the end of the input, then remove the node's shared memory."""
    node = NodeAgent(me, _CONFIG)
    node.start()
    serve({"ready": dict})
    node.close(remove=True)


def producer(me: Identity, work: Work) -> None:
    """Put the work once for each line."""
    queue = _connect(me, work)
    queue.open_dataset(_NUM_PROMPTS, "bench")
    groups = _groups(work)
    version = 0

    def put() -> Answer:
        nonlocal version
        slots = _admit(queue, version, len(groups))
        pairs = list(zip(slots, groups, strict=True))
        begun = time.monotonic()
        wanted = queue.put_groups(pairs)
        put_s = time.monotonic() - begun
        if not all(wanted):
            raise RuntimeError("the queue does not want what it admitted")
        version += 1
        return {"begun_at": begun, "put_s": put_s}

    serve({"ready": dict, "put": put})
    queue.close()


def consumer(me: Identity, work: Work) -> None:
    """Take the work once for each line; it may wait for it."""
    queue = _connect(me, work)
    queue.begin_train(0)
    step = 0

    def take() -> Answer:
        nonlocal step
        begun = time.monotonic()
        rows = queue.take_chunk(step, 0, 0, 1, _DEADLINE_S).rows
        received = time.monotonic()
        total = checksum([row.fields for row in rows])
        read = time.monotonic()
        queue.complete_step(step)
        completed = time.monotonic()
        step += 1
        return {
            "get_s": received - begun,
            "received_at": received,
            "read_s": read - received,
            "complete_s": completed - read,
            "checksum": total,
        }

    serve({"ready": dict, "take": take})
    queue.close()


def _connect(me: Identity, work: Work) -> TransferQueue:
    schema = _TENSOR_ROWS if work.name == "tensors" else _TEXT_ROWS
    return TransferQueue(me, config=_CONFIG, schema=schema)


def _groups(work: Work) -> list[list[Sample]]:
    samples = [
        Sample(num_prompt_tokens=1, finish_reason=FinishReason.STOP, fields=fields)
        for fields in work.samples
    ]
    return [samples[i : i + GROUP_SIZE] for i in range(0, len(samples), GROUP_SIZE)]


def _admit(queue: TransferQueue, version: int, num_groups: int) -> list[PromptSlot]:
    """Get the slots of one step; the step before it was completed."""
    slots: list[PromptSlot] = []
    deadline = time.monotonic() + _DEADLINE_S
    while len(slots) < num_groups:
        if time.monotonic() > deadline:
            raise DeadlineError(f"{len(slots)} of {num_groups} slots in {_DEADLINE_S:g} s")
        slots += queue.admit(version, num_groups - len(slots), 1.0).slots
    return slots


ROLES: dict[str, Callable[[Identity, Work], None]] = {
    "controller": controller,
    "agent": agent,
    "producer": producer,
    "consumer": consumer,
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](Identity.from_env(), make_work(sys.argv[2]))
