"""A run of the queue without processes: engines, forward-only roles, a train step, their deaths."""

import collections
import random
from typing import TYPE_CHECKING

import msgspec

from relax_hpc.control.rpc import Caller
from relax_hpc.transfer import queue_data as q
from relax_hpc.transfer import wire
from relax_hpc.transfer.ledger_cut import cut_ledger
from relax_hpc.transfer.queue_rules import QueueRules, QueueRulesConfig

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG = QueueRulesConfig(
    groups_per_step=4, group_size=2, max_staleness=1, chunks_per_step=2, train_steps=12
)


def make_caller(role: str, index: int = 0, incarnation: int = 1, rank: int = 0) -> Caller:
    return Caller(role=role, index=index, rank=rank, incarnation=incarnation, attempt=1)


class Simulation:
    """Engines, forward-only roles and a train step that take random turns."""

    def __init__(self, config: QueueRulesConfig, seed: int, num_prompts: int = 37) -> None:
        self.config = config
        self.chance = random.Random(seed)
        self.rules = QueueRules(config, config.new_state(q.QueueData()))
        self.num_prompts = num_prompts
        self.events: list[bytes] = []
        self.engines = [0, 0, 0]
        """Version that each engine serves; may lag behind."""
        self.incarnations = collections.Counter({f"rollout/{i}": 1 for i in range(3)})
        self.incarnations["train/0"] = 1
        self.slots: list[list[wire.Slot]] = [[], [], []]
        self.first_version: dict[str, int] = {}
        self.keys = 0
        self.blocks = 0
        self.partial_version: dict[int, int] = {}
        self.num_given_back = 0
        self.attempts = 1
        self.next_chunk = 0
        self.live: list[wire.GroupRows] = []
        self.trained: dict[int, list[str]] = {}
        self.staleness: list[int] = []
        self.do(self.rules.open_dataset(wire.OpenDataset(num_prompts, "x")))
        self.begin(0)

    @property
    def data(self) -> q.QueueData:
        return self.rules.state.data

    def key(self) -> str:
        self.keys += 1
        return str(self.keys)

    def do(self, events: list[q.Event]) -> None:
        for event in events:
            self.events.append(msgspec.json.encode(event))
            self.rules.state.apply(event)
        assert self.rules.state.window.is_feasible(self.data.version, self.data.num_assigned)

    def restart_controller(self) -> None:
        """Snapshot or full replay: both must give the same state."""
        before = msgspec.json.encode(self.data)
        replayed = self.config.new_state(q.QueueData())
        for event in self.events:
            replayed.apply(msgspec.json.decode(event, type=q.AnyEvent))
        assert canonical(msgspec.json.encode(replayed.data)) == canonical(before)
        state = self.config.new_state(msgspec.json.decode(before, type=q.QueueData))
        self.rules = QueueRules(self.config, state)

    # -- rollout

    def admit(self, engine: int) -> None:
        caller = make_caller("rollout", engine, self.incarnations[f"rollout/{engine}"])
        request = wire.Admit(self.key(), self.engines[engine], self.chance.randint(1, 6), 0.0)
        event = self.rules.admit(caller, request)
        if event is None:
            return
        self.do([event])
        slots = self.data.admissions[f"rollout/{engine}/0"].slots
        self.slots[engine] += slots
        for slot in slots:
            assert slot.uid not in self.first_version, "an uid came twice"
            oldest = self.engines[engine]
            if slot.partial is not None:
                oldest = min(oldest, self.partial_version[slot.partial.epoch])
                self.num_given_back += 1
            self.first_version[slot.uid] = oldest

    def save_partial(self, engine: int) -> None:
        """Save tokens of a random group, all of the oldest version that it may have."""
        if not self.slots[engine]:
            return
        uid = self.chance.choice(self.slots[engine]).uid
        version, block = self.first_version[uid], self.block()
        newest = max(version, min(self.engines[engine], self.data.version))
        self.partial_version[block.epoch] = version
        reply, events = self.rules.save_partial(wire.SavePartial(uid, block, version, newest))
        self.do(events)
        assert reply.is_kept == (uid in self.data.groups)

    def finish(self, engine: int) -> None:
        """End a random group of an engine: put it mostly, else drop or return it."""
        if not self.slots[engine]:
            return
        slots = self.slots[engine]
        slot = slots.pop(self.chance.randrange(len(slots)))
        dice = self.chance.random()
        if dice < 0.12:
            self.do(self.rules.drop_group(wire.EndGroup(slot.uid, "uninformative")))
        elif dice < 0.2:
            self.do(self.rules.return_group(wire.EndGroup(slot.uid, "aborted")))
        else:
            lengths = [self.chance.randint(2, 90) for _ in range(2)]
            reply, events = self.rules.put_group(self.group(slot.uid, lengths), 1.0)
            self.do(events)
            assert reply.is_kept or slot.uid not in self.data.groups

    def block(self) -> wire.BlockRef:
        self.blocks += 1
        return wire.BlockRef("n1", f"arena.{self.blocks % 3}", 64 * self.blocks, 64, self.blocks, 7)

    def group(self, uid: str, lengths: list[int]) -> wire.GroupInfo:
        rows = wire.Rows([1] * len(lengths), lengths, ["stop"] * len(lengths))
        return wire.GroupInfo(uid, self.block(), rows, self.first_version[uid])

    def kill_engine(self, engine: int) -> None:
        name = f"rollout/{engine}"
        self.incarnations[name] += 1
        self.do([q.CallerSeen("rollout", engine, 1, self.incarnations[name])])
        self.slots[engine] = []
        self.engines[engine] = self.chance.randint(0, self.data.version)

    def forward(self, task: str) -> None:
        event = self.rules.take_rows(
            make_caller(task), wire.TakeRows(task, self.key(), self.chance.randint(1, 7), 0.0)
        )
        if event is not None:
            self.do([event])
            name = self.config.task_fields[task]
            _, events = self.rules.put_fields(wire.PutFields(name, event.rows, self.block()))
            self.do(events)

    # -- train

    def train_caller(self) -> Caller:
        return make_caller("train", 0, self.incarnations["train/0"])

    def begin(self, step: int, cut: wire.LedgerCut | None = None) -> None:
        request = wire.BeginTrain(self.key(), step, cut)
        self.do(self.rules.begin_train(self.train_caller(), request))
        assert all(g.engine_version <= step for g in self.data.groups.values()), "lost branch"
        self.next_chunk, self.live = 0, []
        for later in [s for s in self.trained if s >= step]:
            del self.trained[later]

    def train(self) -> None:
        step, caller = self.data.version, self.train_caller()
        if self.rules.is_done:
            return
        if self.next_chunk == self.config.chunks_per_step:
            self.complete(step)
            return
        request = wire.TakeChunk(step, self.next_chunk, 0, 2, 0.0)
        while events := self.rules.decide_chunk(caller, request):
            self.do(events)
        shares = [
            self.rules.chunk_reply(caller, wire.TakeChunk(step, self.next_chunk, r, 2, 0.0))
            for r in (0, 1)
        ]
        if None in shares:
            return
        groups = [group for share in shares for group in share.groups]  # type: ignore[union-attr]
        if self.chance.random() < 0.05:
            self.do(self.rules.reject_group(wire.EndGroup(groups[0].uid, "corrupt")))
            return
        assert len(groups) == self.config.groups_per_chunk
        self.live += groups
        self.next_chunk += 1

    def train_any_age(self) -> None:
        """Train without comparing ages: the test does."""
        self.first_version = collections.defaultdict(lambda: self.data.version)
        step, caller = self.data.version, self.train_caller()
        for index in range(self.config.chunks_per_step):
            self.do(self.rules.decide_chunk(caller, wire.TakeChunk(step, index, 0, 2, 0.0)))
        if len(self.data.chunks) == self.config.chunks_per_step:
            self.do(self.rules.complete_step(caller, wire.CompleteStep(step)))

    def complete(self, step: int) -> None:
        self.do(self.rules.complete_step(self.train_caller(), wire.CompleteStep(step)))
        uids = [group.uid for group in self.live]
        for uid in uids:
            self.staleness.append(step - self.first_version[uid])
        summary = self.data.last_summary
        assert summary is not None
        assert summary.staleness_max == max(self.staleness[-len(uids) :])
        assert sorted(summary.uids) == sorted(uids)
        self.trained[step] = summary.uids
        self.next_chunk, self.live = 0, []

    def kill_train(self) -> None:
        self.incarnations["train/0"] += 1
        self.do([q.CallerSeen("train", 0, 1, self.incarnations["train/0"])])
        step = self.data.version - self.chance.choice([0, 0, 1, 2])
        self.begin(max(step, 0))
        self.engines = [min(version, self.data.version) for version in self.engines]

    def lose_journal(self) -> None:
        """The job starts again with a checkpoint and nothing else."""
        step = max(self.data.version - self.chance.choice([0, 0, 1]), 0)
        cut = cut_ledger(self.data, step)
        self.rules = QueueRules(self.config, self.config.new_state(q.QueueData()))
        self.events, self.slots = [], [[], [], []]
        self.attempts += 1
        self.do([q.AttemptBegun(self.attempts)])
        self.incarnations.update({name: 1 for name in self.incarnations})
        if self.chance.random() < 0.5:  # an engine may be faster than the train step
            self.do(self.rules.open_dataset(wire.OpenDataset(self.num_prompts, "x")))
            self.admit(0)
        self.begin(step, cut)
        self.slots = [[], [], []]
        self.do(self.rules.open_dataset(wire.OpenDataset(self.num_prompts, "x")))
        self.engines = [min(version, step) for version in self.engines]

    # -- all

    def turn(self) -> None:
        engine = self.chance.randrange(3)
        turns: list[tuple[float, Callable[[], None]]] = [
            (0.25, lambda: self.admit(engine)),
            (0.55, lambda: self.finish(engine)),
            (0.57, lambda: self.save_partial(engine)),
            (0.60, lambda: self.update(engine)),
            (0.90, self.consume),
            (0.91, self.restart_controller),
            (0.92, lambda: self.kill_engine(engine)),
            (0.923, self.kill_train),
            (0.924, self.lose_journal),
        ]
        dice = self.chance.random()
        for limit, turn in turns:
            if dice < limit:
                turn()
                return

    def update(self, engine: int) -> None:
        """Engines update late, and skip versions."""
        self.engines[engine] = max(self.engines[engine], self.data.version)

    def consume(self) -> None:
        self.train()
        for task in self.config.task_fields:
            self.forward(task)

    def check_every_prompt_is_in_one_place(self) -> None:
        ledger = self.data.ledger
        places = [(t.epoch, t.prompt_index) for t in ledger.again]
        places += [(g.ticket.epoch, g.ticket.prompt_index) for g in self.data.groups.values()]
        for packed in ledger.trained.values():
            places += [(t.epoch, t.prompt_index) for t in packed.unpack()]
        assert len(places) == len(set(places)), "a prompt is in two places"
        assert len(places) + sum(ledger.dropped.values()) == ledger.position


def canonical(text: bytes) -> object:
    """Sets come in any order."""
    tree = msgspec.json.decode(text)
    for blocks in tree["free"].values():
        blocks.sort()
    return tree
