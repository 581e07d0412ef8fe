"""The queue as a state machine: random runs with lagging engines, deaths, rollbacks, restarts."""

import collections
import dataclasses
import random

import msgspec
import pytest

from relax_hpc.control.rpc import Caller
from relax_hpc.transfer import queue_data as q
from relax_hpc.transfer import wire
from relax_hpc.transfer.queue_rules import QueueRules, QueueRulesConfig

CONFIG = QueueRulesConfig(
    groups_per_step=4, group_size=2, max_staleness=1, chunks_per_step=2, train_steps=12
)


def _caller(role: str, index: int = 0, incarnation: int = 1, rank: int = 0) -> Caller:
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
        assert _canonical(msgspec.json.encode(replayed.data)) == _canonical(before)
        state = self.config.new_state(msgspec.json.decode(before, type=q.QueueData))
        self.rules = QueueRules(self.config, state)

    # -- rollout

    def admit(self, engine: int) -> None:
        caller = _caller("rollout", engine, self.incarnations[f"rollout/{engine}"])
        request = wire.Admit(self.key(), self.engines[engine], self.chance.randint(1, 6), 0.0)
        event = self.rules.admit(caller, request)
        if event is None:
            return
        self.do([event])
        slots = self.data.admissions[f"rollout/{engine}/0"].slots
        self.slots[engine] += slots
        self.first_version.update({slot.uid: self.engines[engine] for slot in slots})

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
            _caller(task), wire.TakeRows(task, self.key(), self.chance.randint(1, 7), 0.0)
        )
        if event is not None:
            self.do([event])
            name = self.config.task_fields[task]
            _, events = self.rules.put_fields(wire.PutFields(name, event.rows, self.block()))
            self.do(events)

    # -- train

    def train_caller(self) -> Caller:
        return _caller("train", 0, self.incarnations["train/0"])

    def begin(self, step: int) -> None:
        self.do(self.rules.begin_train(self.train_caller(), wire.BeginTrain(self.key(), step)))
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

    # -- all

    def turn(self) -> None:
        engine = self.chance.randrange(3)
        dice = self.chance.random()
        if dice < 0.25:
            self.admit(engine)
        elif dice < 0.55:
            self.finish(engine)
        elif dice < 0.60:  # engines update late, and skip versions
            self.engines[engine] = max(self.engines[engine], self.data.version)
        elif dice < 0.90:
            self.train()
            for task in self.config.task_fields:
                self.forward(task)
        elif dice < 0.91:
            self.restart_controller()
        elif dice < 0.92:
            self.kill_engine(engine)
        elif dice < 0.923:
            self.kill_train()

    def check_every_prompt_is_in_one_place(self) -> None:
        ledger = self.data.ledger
        places = [(t.epoch, t.prompt_index) for t in ledger.again]
        places += [(g.ticket.epoch, g.ticket.prompt_index) for g in self.data.groups.values()]
        for packed in ledger.trained.values():
            places += [(t.epoch, t.prompt_index) for t in packed.unpack()]
        assert len(places) == len(set(places)), "a prompt is in two places"
        assert len(places) + sum(ledger.dropped.values()) == ledger.position


def _canonical(text: bytes) -> object:
    """Sets come in any order."""
    tree = msgspec.json.decode(text)
    for blocks in tree["free"].values():
        blocks.sort()
    return tree


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_no_group_is_ever_trained_beyond_the_bound_and_none_is_lost(
    seed: int, max_staleness: int
) -> None:
    tasks = {"ref": "ref_logprobs", "logprob": "train_logprobs"} if seed % 2 else {}
    config = dataclasses.replace(CONFIG, max_staleness=max_staleness, task_fields=tasks, seed=seed)
    run = Simulation(config, seed)
    for _ in range(6000):
        run.turn()
        if run.rules.is_done:
            break
    run.check_every_prompt_is_in_one_place()
    assert run.rules.is_done, f"stuck: {run.rules.status(2.0)}"
    assert min(run.staleness) >= 0 and max(run.staleness) <= max_staleness
    assert {
        s: run.rules.state.ledger.trained_uids(s) for s in run.data.ledger.trained
    } == run.trained
    assert sorted(run.trained) == list(range(config.train_steps))
    prompts = [tuple(u.split(".")[:2]) for uids in run.trained.values() for u in uids]
    assert len(prompts) == len(set(prompts)) == config.train_steps * config.groups_per_step
    assert not run.data.groups, "near the end no more is admitted than can be trained"
    assert not len(run.rules.state.blocks)


def test_capacity_after_a_resume_at_version_50() -> None:
    config = dataclasses.replace(CONFIG, groups_per_step=8, max_staleness=2, train_steps=100)
    run = Simulation(config, 0, num_prompts=1000)
    run.begin(50)
    request = wire.Admit("k", 50, 1000, 0.0)
    event = run.rules.admit(_caller("rollout"), request)
    assert event is not None and len(event.tickets) == 24
    assert run.rules.status(2.0).capacity == 24
    run.do([event])
    assert run.rules.admit(_caller("rollout", 1), wire.Admit("l", 50, 1, 0.0)) is None


def test_a_lagging_engine_gets_only_what_can_be_trained_in_time() -> None:
    config = dataclasses.replace(CONFIG, max_staleness=2)
    run = Simulation(config, 0)
    run.begin(5)

    def room(version: int) -> int:
        request = wire.Admit(run.key(), version, 100, 0.0)
        event = run.rules.admit(_caller("rollout"), request)
        return 0 if event is None else len(event.tickets)

    assert [room(version) for version in (2, 3, 4, 5, 6)] == [0, 4, 8, 12, 0]


def test_rollback_dispatches_consumed_prompts_again_first_and_in_order() -> None:
    run = Simulation(dataclasses.replace(CONFIG, max_staleness=0), 3)
    while run.data.version < 3:
        if run.chance.random() < 0.5:
            run.admit(0)
            run.engines[0] = run.data.version
        run.finish(0)
        run.train()
    consumed = [uid for step in (1, 2) for uid in run.trained[step]]
    ahead = len(run.data.ledger.again)
    run.incarnations["train/0"] += 1
    run.begin(1)
    again = run.data.ledger.again
    assert [t.prompt_index for t in again[:8]] == [int(u.split(".")[1]) for u in consumed]
    assert all(t.uid not in consumed for t in again)
    assert len(again) >= 8 + ahead
    run.do(run.rules.begin_train(run.train_caller(), wire.BeginTrain(run.data.train_key, 1)))
    assert len(run.data.ledger.again) == len(again), "a repeated message counts once"
    run.check_every_prompt_is_in_one_place()


def test_restarted_train_step_gets_the_same_groups_of_an_incomplete_step() -> None:
    run = Simulation(CONFIG, 1)
    while run.next_chunk < 2:
        run.admit(0)
        run.finish(0)
        run.train()
    uids = {group.uid for group in run.live}
    run.incarnations["train/0"] += 1
    run.begin(0)
    while run.next_chunk < 2:
        run.train()
    assert {group.uid for group in run.live} == uids
    assert "rollback" not in run.data.ledger.redispatched


def test_a_new_attempt_dispatches_everything_in_flight_again() -> None:
    run = Simulation(CONFIG, 1)
    for _ in range(3):
        run.admit(0)
        run.finish(0)
    in_flight = {(g.ticket.epoch, g.ticket.prompt_index) for g in run.data.groups.values()}
    assert in_flight
    run.do([q.AttemptBegun(2)])
    assert not run.data.groups and not run.data.free
    assert {(t.epoch, t.prompt_index) for t in run.data.ledger.again} >= in_flight
    run.check_every_prompt_is_in_one_place()


def _finished() -> Simulation:
    run = Simulation(dataclasses.replace(CONFIG, train_steps=2), 2)
    while not run.rules.is_done:
        run.turn()
    return run


@pytest.mark.parametrize("event", [q.ProducerLost("train", 0, 9), q.AttemptBegun(2)])
def test_engines_do_not_end_while_a_lost_train_step_may_come_back(event: q.Event) -> None:
    run = _finished()
    run.do([event])
    assert not run.rules.is_done
    assert run.rules.admit(_caller("rollout"), wire.Admit("k", 2, 1, 0.0)) is None
    run.incarnations["train/0"] += 1
    run.begin(1)
    assert not run.rules.is_done
    run.engines = [1, 1, 1]
    while not run.rules.is_done:
        run.admit(0)
        run.finish(0)
        run.train()
    run.do([event])
    run.begin(2)
    assert run.rules.is_done, "it came back with everything saved"


def test_a_known_death_releases_prompts_and_leases_at_once() -> None:
    run = Simulation(dataclasses.replace(CONFIG, task_fields={"ref": "ref_logprobs"}), 4)
    run.admit(0)
    while not run.rules.state.pending["ref"]:
        run.finish(0)
        run.admit(0)
    taken = run.rules.take_rows(_caller("ref"), wire.TakeRows("ref", "k", 2, 0.0))
    assert taken is not None
    run.do([taken])
    generating = sum(g.phase is q.Phase.GENERATING for g in run.data.groups.values())
    run.do([q.ProducerLost("rollout", 0, 1), q.ProducerLost("ref", 0, 1)])
    assert all(g.phase is not q.Phase.GENERATING for g in run.data.groups.values())
    assert run.data.ledger.redispatched.get("producer_lost", 0) == generating
    pending = run.rules.state.pending["ref"]
    assert all(set(samples) <= set(pending[uid]) for uid, samples in taken.rows)
    assert not any(leases for g in run.data.groups.values() for leases in g.leased.values())
    run.check_every_prompt_is_in_one_place()


def test_a_late_word_of_a_death_does_not_touch_the_next_start() -> None:
    run = Simulation(CONFIG, 4)
    run.do([q.CallerSeen(role, 0, 1, 2) for role in ("rollout", "train")])
    run.incarnations.update({"rollout/0": 1, "train/0": 1})
    run.begin(0)
    run.admit(0)
    in_flight = set(run.data.groups)
    assert in_flight and run.data.train_incarnation == 2
    run.do([q.ProducerLost("rollout", 0, 1), q.ProducerLost("train", 0, 1)])
    assert set(run.data.groups) == in_flight and run.data.train_incarnation == 2
    assert run.data.admissions["rollout/0/0"].slots


def test_a_repeated_admit_gets_the_same_slots() -> None:
    run = Simulation(CONFIG, 1)
    request = wire.Admit("same", 0, 3, 0.0)
    event = run.rules.admit(_caller("rollout"), request)
    assert event is not None
    run.do([event])
    assert run.data.admissions["rollout/0/0"].key == "same"
    assert len(run.data.admissions["rollout/0/0"].slots) == 3


def test_samples_older_than_their_admission_are_generated_again() -> None:
    run = Simulation(dataclasses.replace(CONFIG, max_staleness=0), 1)
    run.begin(4)
    run.engines[0] = 4
    run.admit(0)
    slot = run.slots[0][0]
    info = msgspec.structs.replace(run.group(slot.uid, [9, 9]), oldest_version=3)
    reply, events = run.rules.put_group(info, 1.0)
    run.do(events)
    assert not reply.is_wanted and slot.uid not in run.data.groups
    assert run.data.ledger.redispatched["older_than_admitted"] == 1
