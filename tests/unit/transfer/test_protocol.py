"""The queue's protocol as a property: any order of messages, deaths, lost replies and replays.

Hypothesis chooses the interleaving and shrinks what breaks. After every message holds:

- each (epoch, prompt) that was admitted is in exactly one place: in flight, to be dispatched again,
  trained, or dropped with a counted reason; no uid is given out twice;
- nothing is trained more than max_staleness versions after its oldest token;
- groups in flight never exceed (max_staleness + 1) x groups_per_step, less near the end;
- each block that was kept is in use, free or collected, in this order and never in two of them;
- the journal, replayed at any point, gives the state that is live, and the same decisions.

At the end of each example calm processes drive the run to its last step: whatever happened before,
nothing may wait for ever. A seeded sample in CI, thousands of examples with --long.
"""

import collections
import dataclasses
import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from relax_hpc.config import StalePolicy
from relax_hpc.control.rpc import Caller
from relax_hpc.transfer import wire
from relax_hpc.transfer.queue_data import Event, QueueData
from relax_hpc.transfer.queue_rules import QueueRules, QueueRulesConfig

from .protocol_model import NUM_ENGINES, TASKS, Model
from .state_view import Engine, key_of

which = st.integers(0, NUM_ENGINES - 1)
seeds = st.integers(0, 7)
rarely = st.integers(0, 7).map(lambda number: number == 7)
"""For what resets much: else the runs never get far."""


@st.composite
def configs(draw: st.DrawFn) -> QueueRulesConfig:
    """Small runs of all shapes."""
    chunks = draw(st.sampled_from([1, 2]))
    tasks = draw(st.sampled_from([(), ("ref",), ("ref", "logprob")]))
    return QueueRulesConfig(
        groups_per_step=chunks * draw(st.sampled_from([1, 2, 3])),
        group_size=draw(st.sampled_from([1, 2])),
        max_staleness=draw(st.sampled_from([0, 1, 2])),
        chunks_per_step=chunks,
        train_steps=draw(st.integers(2, 8)),
        eval_interval=draw(st.sampled_from([0, 2])),
        task_fields={task: TASKS[task] for task in tasks},
        stale_policy=draw(st.sampled_from(StalePolicy)),
        seed=draw(st.integers(0, 3)),
        is_shuffled=draw(st.booleans()),
    )


class Protocol(RuleBasedStateMachine):
    """Hypothesis calls the rules in any order."""

    model: Model | None = None

    @initialize(config=configs(), num_prompts=st.integers(2, 14))
    def begin(self, config: QueueRulesConfig, num_prompts: int) -> None:
        self.model = Model(config, num_prompts)
        self.engines = self.model.engines
        self.tasks = list(config.task_fields)

    @property
    def run(self) -> Model:
        assert self.model is not None
        return self.model

    def chance(self, seed: int) -> random.Random:
        """Another one in each rule: hypothesis likes small numbers, and the same again."""
        return random.Random(f"{seed} {self.run.key()}")

    @rule(seed=seeds, num_turns=st.sampled_from([40, 20, 10, 3, 1]))
    def work(self, seed: int, num_turns: int) -> None:
        """Ordinary turns, so that runs get far enough for the rest to matter."""
        chance = self.chance(seed)
        for _ in range(num_turns):
            self.turn(chance)
            self.run.check()

    @rule(seed=seeds)
    def work_more(self, seed: int) -> None:
        """Twice as likely."""
        self.work(seed, 40)

    def turn(self, chance: random.Random) -> None:
        run, engine, dice = self.run, chance.choice(self.engines), chance.random()
        if dice < 0.2:
            run.admit(engine, chance.randint(1, 5), is_lost=chance.random() < 0.1)
        elif dice < 0.53:
            run.finish(chance, age=chance.random() < 0.05, is_lost=chance.random() < 0.1)
        elif dice < 0.61:
            run.update(engine, chance.randint(1, 3))
        elif dice < 0.63:
            run.save_partial(chance)
        elif dice < 0.81 or (dice < 0.95 and not self.tasks):
            run.train(chance)
        elif dice < 0.89:
            run.take_rows(chance.choice(self.tasks), chance.randint(1, 8))
        elif dice < 0.95:
            run.put_fields(chance.choice(self.tasks), chance.randint(1, 8))
        else:
            self.mishap(chance)

    def mishap(self, chance: random.Random) -> None:
        """What happens now and then in a long run."""
        run, engine, dice = self.run, chance.choice(self.engines), chance.random()
        if dice < 0.3:
            run.reject(chance)
        elif dice < 0.45:
            run.kill_engine(engine, is_told=chance.random() < 0.5, is_zombie=chance.random() < 0.5)
        elif dice < 0.6:
            run.end(chance, chance.choice(["drop", "return"]))
        elif dice < 0.7:
            run.restart_controller()
            run.repeat_begin()
        elif dice < 0.88 and self.tasks:
            run.kill_forward(chance.choice(self.tasks))
        else:
            run.restart_train(chance.choice([0, 0, 1, 2]), is_told=chance.random() < 0.5)

    @rule(which=which, want=st.integers(1, 5), is_lost=st.booleans())
    def admit(self, which: int, want: int, is_lost: bool) -> None:
        self.run.admit(self.engines[which], want, is_lost=is_lost)

    @rule(which=which, num_steps=st.integers(1, 3))
    def engine_takes_newer_weights(self, which: int, num_steps: int) -> None:
        self.run.update(self.engines[which], num_steps)

    @rule(seed=seeds, age=st.sampled_from([0, -1, 1, 2]), is_lost=st.booleans())
    def put_group(self, seed: int, age: int, is_lost: bool) -> None:
        self.run.finish(self.chance(seed), age=age, is_lost=is_lost)

    @rule(seed=seeds)
    def save_partial(self, seed: int) -> None:
        self.run.save_partial(self.chance(seed))

    @rule(seed=seeds, how=st.sampled_from(["drop", "return"]))
    def end_group(self, seed: int, how: str) -> None:
        self.run.end(self.chance(seed), how)

    @rule(which=which, is_told=st.booleans(), is_zombie=st.booleans())
    def kill_engine(self, which: int, is_told: bool, is_zombie: bool) -> None:
        self.run.kill_engine(self.engines[which], is_told=is_told, is_zombie=is_zombie)

    @rule(which=which)
    def late_word_of_an_older_death(self, which: int) -> None:
        self.run.late_word_of_an_older_death(self.engines[which])

    @rule(number=st.integers(0, 1), max_rows=st.integers(1, 5))
    def take_rows(self, number: int, max_rows: int) -> None:
        for task in self.tasks[number : number + 1]:
            self.run.take_rows(task, max_rows)

    @rule(number=st.integers(0, 1), count=st.integers(1, 5))
    def put_fields(self, number: int, count: int) -> None:
        for task in self.tasks[number : number + 1]:
            self.run.put_fields(task, count)

    @rule(number=st.integers(0, 1))
    def kill_forward(self, number: int) -> None:
        for task in self.tasks[number : number + 1]:
            self.run.kill_forward(task)

    @rule(seed=seeds)
    def train(self, seed: int) -> None:
        self.run.train(self.chance(seed))

    @rule(seed=seeds)
    def reader_rejects_a_group(self, seed: int) -> None:
        self.run.reject(self.chance(seed))

    @rule(back=st.integers(0, 3), is_told=st.booleans(), is_repeated=st.booleans(), go=rarely)
    def restart_train(self, back: int, is_told: bool, is_repeated: bool, go: bool) -> None:
        if go:
            self.run.restart_train(back, is_told=is_told, is_repeated=is_repeated)

    @rule(back=st.integers(0, 2), go=rarely)
    def next_attempt(self, back: int, go: bool) -> None:
        if go:
            self.run.next_attempt(back)

    @rule()
    def save_checkpoint(self) -> None:
        self.run.save_checkpoint()

    @rule(seed=seeds, go=rarely)
    def lose_journal(self, seed: int, go: bool) -> None:
        if go:
            self.run.lose_journal(self.chance(seed))

    @rule()
    def sweep(self) -> None:
        self.run.sweep()

    @rule(num_prompts=st.integers(1, 20), fingerprint=st.sampled_from(["x", "y"]))
    def open_dataset(self, num_prompts: int, fingerprint: str) -> None:
        self.run.open_dataset(num_prompts, fingerprint)

    @rule()
    def restart_controller(self) -> None:
        self.run.restart_controller()

    @rule()
    def rotate_journal(self) -> None:
        self.run.rotate_journal()

    @rule(seed=seeds)
    def collect(self, seed: int) -> None:
        self.run.collect(self.chance(seed))

    @invariant()
    def all_promises_hold(self) -> None:
        if self.model is not None:
            self.model.check()

    def teardown(self) -> None:
        if self.model is not None:
            self.model.run_to_the_end()


_SETTINGS = settings(
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    print_blob=True,
)


def test_any_interleaving_of_the_protocol() -> None:
    # What fails is not shrunk here (that takes minutes): run the long test for it.
    chosen = settings(
        _SETTINGS,
        derandomize=True,
        max_examples=80,
        stateful_step_count=40,
        phases=[Phase.generate],
    )
    run_state_machine_as_test(Protocol, settings=chosen)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_thousands_of_interleavings_of_the_protocol() -> None:
    chosen = settings(_SETTINGS, max_examples=4000, stateful_step_count=60)
    run_state_machine_as_test(Protocol, settings=chosen)


# ---------------------------------------------------------------------------------------------
# Bounds that have a number
# ---------------------------------------------------------------------------------------------


def _config(**changes: object) -> QueueRulesConfig:
    base = QueueRulesConfig(
        groups_per_step=4, group_size=2, max_staleness=1, chunks_per_step=2, train_steps=12
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "batch", "max_staleness", "capacity"),
    [(50, 8, 2, 24), (0, 8, 2, 24), (98, 8, 2, 16), (99, 8, 2, 8), (100, 8, 2, 0), (50, 4, 0, 4)],
)
def test_capacity_depends_on_the_bound_and_not_on_the_version(
    version: int, batch: int, max_staleness: int, capacity: int
) -> None:
    """A restart at version 50 with batch 8 and max_staleness 2 admits 24 groups, not 424."""
    run = Model(_config(groups_per_step=batch, max_staleness=max_staleness, train_steps=100), 1000)
    run.begin_at(version, is_repeated=False)
    for number in range(60):
        engine = run.engines[number % NUM_ENGINES]
        engine.version = version
        run.admit(engine, 7)
    assert len(run.data.groups) == run.rules.status(0.0).capacity == capacity


def test_two_copies_of_one_prompt_are_two_groups() -> None:
    """A data set of 3 prompts and 8 groups in flight: each prompt is there several times."""
    run = Model(_config(), 3)
    engine = run.engines[0]
    run.admit(engine, 8)
    uids = list(engine.slots)
    copies = collections.Counter(key_of(uid)[1] for uid in uids)
    assert len(set(uids)) == 8 and sorted(copies.values()) == [2, 3, 3]
    first, *rest = uids
    run.put(first, run.block("rollout"), {0: 0}, 5)
    assert run.generating() == set(rest), "its copies still generate"
    run.run_to_the_end()


def test_the_old_copy_of_a_prompt_that_was_dispatched_again_is_refused() -> None:
    run = Model(_config(), 40)
    run.admit(run.engines[0], 1)
    (old,) = run.engines[0].slots
    run.kill_engine(run.engines[0], is_told=True, is_zombie=True)
    run.admit(run.engines[1], 1)
    (new,) = run.engines[1].slots
    assert key_of(old) == key_of(new) and old != new
    run.put(old, run.block("rollout"), {0: 0}, 5)
    assert old not in run.data.groups and not run.kept
    run.put(new, run.block("rollout"), {0: 0}, 5)
    assert len(run.kept) == 1


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_a_resume_at_an_epoch_border_starts_the_next_epoch(is_shuffled: bool) -> None:
    run = Model(_config(is_shuffled=is_shuffled, max_staleness=0), 8)
    while run.data.version < 2:
        run.calm_turn()
    assert run.data.ledger.position == 8 and not run.data.groups
    run.rotate_journal()
    run.restart_controller()
    run.next_attempt(0)
    run.engines[0].version = 2
    run.admit(run.engines[0], 4)
    epochs = {key_of(uid)[0] for uid in run.engines[0].slots}
    assert epochs == {1}, "neither the last epoch again nor one left out"
    run.run_to_the_end()


def test_a_word_of_the_train_steps_death_keeps_engines_from_ending() -> None:
    run = Model(_config(train_steps=2), 40)
    while not run.rules.is_done:
        run.calm_turn()
    run.restart_train(1, is_told=True)
    assert not run.rules.is_done
    caller = Caller(role="rollout", index=0, rank=0, incarnation=1, attempt=1)
    assert run.rules.admit(caller, wire.Admit("k", 2, 1, 0.0)) is None, "a lost branch's weights"
    run.run_to_the_end()


def test_an_engine_that_was_replaced_in_place_keeps_no_slot() -> None:
    run = Model(_config(), 40)
    engine: Engine = run.engines[0]
    run.admit(engine, 3, is_lost=True)
    assert len(run.generating()) == 3 and not engine.slots
    run.admit(engine, 3)
    assert len(engine.slots) == 3 == len(run.generating()), "the lost reply comes again"
    run.admit(engine, 3, is_lost=True)
    run.kill_engine(engine, is_told=False, is_zombie=False)
    assert not run.generating(), "slots that nobody heard of are dispatched again"
    run.run_to_the_end()


def test_tokens_of_a_lost_branch_are_never_trained() -> None:
    """A slow group has tokens of version 2; version 2 is lost, and trained again: other weights."""
    run = Model(_config(groups_per_step=1, group_size=1, chunks_per_step=1, max_staleness=2), 40)
    slow, fast = run.engines[:2]
    _train_steps(run, fast, 1)
    slow.version = 1
    run.admit(slow, 1)
    (uid,) = slow.slots
    _train_steps(run, fast, 1)
    run.update(slow, 1)
    run.restart_train(1, is_told=False)
    _train_steps(run, fast, 1)
    run.put(uid, run.block("rollout"), slow.slots.pop(uid), 5)
    run.run_to_the_end()


def test_saved_tokens_of_a_lost_branch_are_not_given_out_again() -> None:
    run = Model(_config(groups_per_step=1, group_size=1, chunks_per_step=1, max_staleness=2), 40)
    slow, fast = run.engines[:2]
    _train_steps(run, fast, 1)
    slow.version = 1
    run.admit(slow, 1)
    _train_steps(run, fast, 1)
    run.update(slow, 1)
    run.save_partial(random.Random(0))
    run.restart_train(1, is_told=False)
    run.kill_engine(slow, is_told=True, is_zombie=False)
    run.admit(fast, 9)
    grant = run.data.admissions["rollout/1/0"]
    assert [slot.partial for slot in grant.slots] == [None] * len(grant.slots)


def _train_steps(run: Model, engine: Engine, num_steps: int) -> None:
    """Train with what this engine generates."""
    last = run.data.version + num_steps
    while run.data.version < last:
        engine.version = run.data.version
        run.admit(engine, 1)
        for uid in list(engine.slots):
            run.put(uid, run.block("rollout"), engine.slots.pop(uid), 5)
        run.train(random.Random(0))


# ---------------------------------------------------------------------------------------------
# Length bias (guarantee 8) and order (guarantee 12)
# ---------------------------------------------------------------------------------------------


class OneEngine:
    """A queue and an engine whose prompts 3, 13, 23, .. take 20 times as long as the others."""

    def __init__(self, max_staleness: int) -> None:
        self.config = QueueRulesConfig(
            groups_per_step=4, group_size=1, max_staleness=max_staleness, chunks_per_step=1,
            train_steps=60, is_shuffled=False,
        )  # fmt: skip
        self.rules = QueueRules(self.config, self.config.new_state(QueueData()))
        self.running: list[tuple[int, str, int]] = []
        self.trained: list[str] = []
        self.do(self.rules.open_dataset(wire.OpenDataset(1000, "x")))
        self.do(self.rules.begin_train(caller_of("train"), wire.BeginTrain("b", 0)))

    def do(self, events: Sequence[Event]) -> None:
        for event in events:
            self.rules.state.apply(event)

    def turn(self, now: int) -> None:
        version = self.rules.state.data.version
        request = wire.Admit(f"k{now}", version, 2, 0.0)
        granted = self.rules.admit(caller_of("rollout"), request)
        if granted is not None:
            self.do([granted])
            for ticket in granted.tickets:
                self.running.append((now + cost_of(ticket.uid), ticket.uid, version))
        for item in [item for item in self.running if item[0] <= now]:
            self.running.remove(item)
            self.put(item[1], item[2], now)
        asked = wire.TakeChunk(version, 0, 0, 1, 0.0)
        self.do(self.rules.decide_chunk(caller_of("train"), asked))
        if self.rules.chunk_reply(caller_of("train"), asked) is not None:
            self.do(self.rules.complete_step(caller_of("train"), wire.CompleteStep(version)))
            summary = self.rules.state.data.last_summary
            assert summary is not None and summary.staleness_max <= self.config.max_staleness
            self.trained += summary.uids

    def put(self, uid: str, version: int, now: int) -> None:
        block = wire.BlockRef("n1", "a.0", 64 * now, 64, now + 1, 0)
        rows = wire.Rows([1], [1 + 100 * cost_of(uid)], ["stop"])
        info = wire.GroupInfo(uid, block, rows, version, version)
        reply, events = self.rules.put_group(info, 0.0)
        assert reply.is_kept, "nothing is discarded for its age"
        self.do(events)


def cost_of(uid: str) -> int:
    return 20 if int(uid.split(".")[1]) % 10 == 3 else 1


def caller_of(role: str) -> Caller:
    return Caller(role=role, index=0, rank=0, incarnation=1, attempt=1)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_q8_slow_prompts_are_trained_as_often_as_fast_ones(max_staleness: int) -> None:
    """None of them is thrown away for its age, so trained lengths are those that were produced."""
    world = OneEngine(max_staleness)
    for now in range(100_000):
        if world.rules.is_done:
            break
        world.turn(now)
    status = world.rules.status(0.0)
    assert status.done and not status.dropped and not status.redispatched
    slow = [uid for uid in world.trained if cost_of(uid) > 1]
    assert len(world.trained) == 240 and 24 - (max_staleness + 1) <= len(slow) <= 24
    assert status.histograms.trained == status.histograms.generated
    assert not status.histograms.dropped


@pytest.mark.parametrize("seed", range(5))
def test_q12_groups_are_whole_and_first_come_first_served(seed: int) -> None:
    """With one deadline the order of completion is the order of training, whatever it was."""
    chance = random.Random(seed)
    config = _config(
        groups_per_step=6, chunks_per_step=3, train_steps=1, task_fields={"ref": "ref_logprobs"}
    )
    rules = QueueRules(config, config.new_state(QueueData()))
    engine = caller_of("rollout")
    train, ref = caller_of("train"), caller_of("ref")
    apply = rules.state.apply
    for event in [
        *rules.open_dataset(wire.OpenDataset(1000, "x")),
        *rules.begin_train(train, wire.BeginTrain("b", 0)),
    ]:
        apply(event)
    granted = rules.admit(engine, wire.Admit("k", 0, 6, 0.0))
    assert granted is not None
    apply(granted)
    uids = [ticket.uid for ticket in granted.tickets]
    chance.shuffle(uids)
    for number, uid in enumerate(uids):
        block = wire.BlockRef("n1", "a.0", 64 * number, 64, number + 1, 0)
        info = wire.GroupInfo(uid, block, wire.Rows([1, 1], [9, 9], ["stop"] * 2), 0, 0)
        for event in rules.put_group(info, 0.0)[1]:
            apply(event)
    taken = rules.take_rows(ref, wire.TakeRows("ref", "k", 99, 0.0))
    assert taken is not None and [uid for uid, _ in taken.rows] == uids
    apply(taken)
    finished: list[str] = []
    rows = [(uid, sample) for uid in uids for sample in (0, 1)]
    chance.shuffle(rows)
    for number, (uid, sample) in enumerate(rows):
        block = wire.BlockRef("n1", "b.0", 64 * number, 64, number + 1, 0)
        request = wire.PutFields("ref_logprobs", [(uid, [sample])], block)
        for event in rules.put_fields(request)[1]:
            apply(event)
        if not any(rules.state.data.groups[uid].missing.values()):
            finished.append(uid)
    order: list[str] = []
    for index in range(3):
        asked = wire.TakeChunk(0, index, 0, 1, 0.0)
        for event in rules.decide_chunk(train, asked):
            apply(event)
        reply = rules.chunk_reply(train, asked)
        assert reply is not None and reply.groups is not None
        assert all(group.samples == [0, 1] for group in reply.groups)
        order += [group.uid for group in reply.groups]
    assert [set(order[i : i + 2]) for i in (0, 2, 4)] == [
        set(finished[i : i + 2]) for i in (0, 2, 4)
    ]
