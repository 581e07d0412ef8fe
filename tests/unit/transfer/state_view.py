"""How tests look at the queue's state: prompts, blocks and what was trained."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from relax_hpc.control.rpc import Caller
from relax_hpc.transfer import queue_data as q
from relax_hpc.transfer import wire
from relax_hpc.transfer.ledger import Ledger, LedgerData
from relax_hpc.transfer.queue_rules import QueueRules, QueueRulesConfig

Key = tuple[int, int]
Block = tuple[str, int, int]
Versions = dict[int, int]
"""Policy versions that generated a group's tokens, each with its branch (see `Model.branches`)."""


@dataclasses.dataclass
class Engine:
    """One rollout engine as the outside sees it."""

    index: int
    incarnation: int = 1
    version: int = 0
    key: str = ""
    """Of the admit whose reply got lost; asked again with it."""
    slots: dict[str, Versions] = dataclasses.field(default_factory=dict)
    """Uid -> versions that its tokens have so far."""


class Checkpoint(NamedTuple):
    """The ledger's cut, and what the world knew then."""

    cut: wire.LedgerCut
    dropped: dict[Key, str]
    trained: dict[int, list[str]]
    branches: Versions


def key_of(uid: str) -> Key:
    """(epoch, prompt index) of an uid."""
    epoch, prompt_index, _ = uid.split(".")
    return int(epoch), int(prompt_index)


def place_of(block: wire.BlockRef) -> Block:
    """What names a block for ever."""
    return block.extent, block.offset, block.epoch


def canonical(data: q.QueueData) -> object:
    """Plain data in which the order of sets does not matter; free blocks are compared apart."""
    tree = msgspec.json.decode(msgspec.json.encode(data))
    del tree["free"]
    for group in tree["groups"].values():
        group["leased"] = {task: clients for task, clients in group["leased"].items() if clients}
    return tree


def trained_uids(ledger: LedgerData) -> dict[int, list[str]]:
    """Uids by train step, sorted."""
    view = Ledger(ledger, 0, is_shuffled=False)
    return {step: sorted(view.trained_uids(step)) for step in ledger.trained}


def admitted_prompts(config: QueueRulesConfig, num_prompts: int, position: int) -> set[Key]:
    """What the cursor went over: (epoch, prompt index)."""
    data = LedgerData(num_prompts=num_prompts, fingerprint="x")
    tickets, _ = Ledger(data, config.seed, config.is_shuffled).peek(position)
    return {(ticket.epoch, ticket.prompt_index) for ticket in tickets}


def decisions(rules: QueueRules, callers: Mapping[str, Caller]) -> list[object]:
    """What would be answered now: indexes that the data does not show must agree too."""
    data, config = rules.state.data, rules.config
    admit = rules.admit(callers["rollout"], wire.Admit("probe", data.version, 99, 0.0))
    answers: list[object] = [admit, msgspec.structs.replace(rules.status(0.0), num_free=0)]
    if data.version < config.train_steps:
        dp_size = len(data.chunks[0].shares) if data.chunks else 1
        index = min(len(data.chunks), config.chunks_per_step - 1)
        chunk = wire.TakeChunk(data.version, index, 0, dp_size, 0.0)
        answers.append(rules.decide_chunk(callers["train"], chunk))
    for task in config.task_fields:
        taken = rules.take_rows(callers[task], wire.TakeRows(task, "probe", 999, 0.0))
        answers.append(taken and sorted(taken.rows))
    return answers
