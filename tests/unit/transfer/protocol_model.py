"""A run of the queue without processes: the controller's decisions, and the world around it.

`Model` plays engines, forward-only steps, the train step and the journal against QueueRules. Each
method is one message (or one death) and checks what its sender could see. It remembers slots handed
out, blocks kept and steps completed; the `check_*` methods compare this with the state.
"""

import collections
import itertools
import random

import msgspec
import pytest

from relax_hpc.config import StalePolicy
from relax_hpc.control.rpc import Caller
from relax_hpc.errors import TransferError
from relax_hpc.transfer import queue_data as q
from relax_hpc.transfer import wire
from relax_hpc.transfer.ledger_cut import cut_ledger
from relax_hpc.transfer.queue_rules import QueueRules, QueueRulesConfig

from .state_view import (
    Block,
    Checkpoint,
    Engine,
    Key,
    Versions,
    admitted_prompts,
    canonical,
    decisions,
    key_of,
    place_of,
    trained_uids,
)

NUM_ENGINES = 3
TASKS = {"ref": "ref_logprobs", "logprob": "train_logprobs"}


class Model:
    """The controller without sockets: rules decide, the state applies, the journal remembers."""

    def __init__(self, config: QueueRulesConfig, num_prompts: int) -> None:
        self.config, self.num_prompts = config, num_prompts
        self.rules = QueueRules(config, config.new_state(q.QueueData()))
        self.snapshot = msgspec.json.encode(q.QueueData())
        self.journal: list[bytes] = []
        self.counter = itertools.count(1)
        self.attempt = 1
        self.engines = [Engine(i) for i in range(NUM_ENGINES)]
        self.incarnations = dict.fromkeys(["train", *config.task_fields], 1)
        self.zombies: dict[str, Versions] = {}
        """Slots of processes that are thought dead, and still may put."""
        self.uids: set[str] = set()
        self.dropped: dict[Key, str] = {}
        self.put_versions: dict[str, Versions] = {}
        self.lost_after: dict[str, int] = {}
        """Groups that were generated over a rollback: newer tokens may be of the lost branch."""
        self.saved: dict[Key, Versions] = {}
        """What the tokens have that were saved of unfinished groups."""
        self.branches: Versions = {0: 0}
        """A rollback begins a new branch: version 5 after it is other weights than before."""
        self.kept: set[Block] = set()
        """Blocks that the controller said it keeps."""
        self.collected: set[Block] = set()
        self.arenas: set[str] = set()
        self.cuts: dict[int, Checkpoint] = {}
        """By step."""
        self.leases: dict[str, list[q.RowKeys]] = {}
        self.taken: dict[int, list[list[str]]] = {}
        """Chunks of the current step as the train step received them: uids by dp rank."""
        self.dp_size = 1
        self.trained: dict[int, list[str]] = {}
        self.do([q.CallerSeen("rollout", engine.index, 1, 1) for engine in self.engines])
        self.do([q.CallerSeen(role, 0, 1, 1) for role in self.incarnations])
        self.do(self.rules.open_dataset(wire.OpenDataset(num_prompts, "x")))
        self.begun = wire.BeginTrain(self.key(), 0)
        self.do(self.rules.begin_train(self.caller("train"), self.begun))

    # -- the controller's side ----------------------------------------------------------------

    @property
    def data(self) -> q.QueueData:
        """The live state."""
        return self.rules.state.data

    def key(self) -> str:
        """A key that was never used."""
        return f"k{next(self.counter)}"

    def block(self, role: str, tier: str = "shm") -> wire.BlockRef:
        """A new block in the arena of some process of a role."""
        number = next(self.counter)
        arena = f"{role}{number % 2}.0-{self.attempt}.{number % 3}-aa"
        self.arenas.add(arena)
        extent = f"{arena}.{number % 5}" if tier == "shm" else f"{arena}.s0"
        return wire.BlockRef("n1", extent, 64 * number, 64, number, 0, tier)

    def do(self, events: list[q.Event]) -> None:
        """Apply and journal."""
        for event in events:
            self.journal.append(msgspec.json.encode(event))
            self.rules.state.apply(event)

    def caller(self, role: str, engine: Engine | None = None) -> Caller:
        """The newest start of a role."""
        index, incarnation = (0, self.incarnations.get(role, 1))
        if engine is not None:
            index, incarnation = engine.index, engine.incarnation
        return Caller(role=role, index=index, rank=0, incarnation=incarnation, attempt=self.attempt)

    def restart_controller(self) -> None:
        """What the journal gives is what was live; the run goes on with it."""
        state = self.config.new_state(msgspec.json.decode(self.snapshot, type=q.QueueData))
        for line in self.journal:
            state.apply(msgspec.json.decode(line, type=q.AnyEvent))
        again = QueueRules(self.config, state)
        assert canonical(again.state.data) == canonical(self.data)
        callers = {role: self.caller(role) for role in self.incarnations}
        callers["rollout"] = self.caller("rollout", self.engines[0])
        assert decisions(again, callers) == decisions(self.rules, callers)
        live, self.rules = self.free(), again
        # Collections are not journalled: told again, the owner of the block takes no notice.
        assert set(live) <= set(self.free()) <= set(live) | self.collected
        self.collected -= set(self.free())

    def rotate_journal(self) -> None:
        """A new file begins with a snapshot."""
        self.snapshot, self.journal = msgspec.json.encode(self.data), []

    # -- rollout ------------------------------------------------------------------------------

    def admit(self, engine: Engine, want: int, *, is_lost: bool = False) -> None:
        """Ask for prompts; a lost reply is asked for again with the same key."""
        engine.key = engine.key or self.key()
        client = f"rollout/{engine.index}/0"
        grant = self.data.admissions.get(client)
        if grant is None or grant.key != engine.key:
            request = wire.Admit(engine.key, engine.version, want, 0.0)
            event = self.rules.admit(self.caller("rollout", engine), request)
            if event is None:
                return
            self.do([event])
            fresh = [ticket.uid for ticket in event.tickets]
            assert not self.uids & set(fresh), "an uid is given out twice"
            self.uids |= set(fresh)
            grant = self.data.admissions[client]
        if is_lost:
            return
        engine.key = ""
        for slot in grant.slots:
            assert slot.deadline_version <= self.config.train_steps - 1
            versions = self.now(engine.version)
            if slot.partial is not None:
                saved = self.saved[key_of(slot.uid)]
                assert all(self.branches.get(v) == b for v, b in saved.items()), "lost tokens"
                versions |= saved
            engine.slots[slot.uid] = versions

    def now(self, version: int) -> Versions:
        """Tokens that an engine of this version generates."""
        return {version: self.branches.setdefault(version, 0)}

    def update(self, engine: Engine, num_steps: int) -> None:
        """The engine loads newer weights; it may skip versions."""
        engine.version = max(engine.version, min(engine.version + num_steps, self.data.version))
        for versions in engine.slots.values():  # groups go on under the new weights
            versions |= self.now(engine.version)

    def some_slot(self, chance: random.Random) -> tuple[dict[str, Versions], str] | None:
        """One slot of an engine, or of a process that is thought dead."""
        holders = [engine.slots for engine in self.engines if engine.slots]
        holders += [self.zombies] if self.zombies else []
        if not holders:
            return None
        slots = chance.choice(holders)
        return slots, chance.choice(sorted(slots))

    def finish(self, chance: random.Random, *, age: int = 0, is_lost: bool = False) -> None:
        """Put a group; `is_lost`: the reply got lost, so the same message comes once more."""
        found = self.some_slot(chance)
        if found is None:
            return
        slots, uid = found
        versions = slots.pop(uid)
        if age > 0:  # an engine that kept tokens it should not have kept
            versions = versions | self.now(max(min(versions) - age, 0))
        block, num_tokens = self.block("rollout"), chance.randint(1, 50)
        for _ in range(1 + is_lost):
            self.put(uid, block, versions if age >= 0 else {}, num_tokens)

    def put(self, uid: str, block: wire.BlockRef, versions: Versions, num_tokens: int) -> None:
        """One put; the oracle knows whether it must be kept."""
        before = self.data.groups.get(uid)
        was_generating = before is not None and before.phase is q.Phase.GENERATING
        oldest, newest = min(versions, default=-1), max(versions, default=-1)
        size = self.config.group_size
        rows = wire.Rows([1] * size, [num_tokens + i for i in range(size)], ["stop"] * size)
        info = wire.GroupInfo(uid, block, rows, oldest, newest)
        is_too_new = newest > min(self.data.version, self.lost_after.get(uid, newest))
        reply, events = self.rules.put_group(info, 0.0)
        self.do(events)
        if reply.is_kept:
            assert reply.is_wanted and uid in self.data.groups
            self.kept.add(place_of(block))
        else:
            assert place_of(block) not in self.used(), "a block that its writer frees is in use"
        if before is None or not was_generating:
            return
        is_old = 0 <= oldest < before.deadline - self.config.max_staleness
        is_old = is_old and self.config.stale_policy is not StalePolicy.CORRECT
        assert reply.is_kept == (not is_old and not is_too_new), (info, before)
        self.put_versions[uid] = versions or self.now(before.engine_version)
        if is_old and not is_too_new and self.config.stale_policy is StalePolicy.DROP:
            self.dropped[key_of(uid)] = "stale"

    def save_partial(self, chance: random.Random) -> None:
        """Tokens of an unfinished group; the slot goes on."""
        found = self.some_slot(chance)
        if found is None:
            return
        slots, uid = found
        versions = slots[uid]
        block = self.block("rollout", tier=chance.choice(["shm", "spill"]))
        request = wire.SavePartial(uid, block, min(versions), max(versions))
        limit = min(self.data.version, self.lost_after.get(uid, max(versions)))
        is_good = uid in self.generating() and max(versions) <= limit
        reply, events = self.rules.save_partial(request)
        self.do(events)
        assert reply.is_kept == is_good
        if reply.is_kept:
            self.kept.add(place_of(block))
            self.saved[key_of(uid)] = dict(versions)

    def end(self, chance: random.Random, how: str) -> None:
        """Drop or return a group; the first counts, the second is dispatched again."""
        found = self.some_slot(chance)
        if found is None:
            return
        slots, uid = found
        group = self.data.groups.get(uid)
        if group is not None and group.phase is not q.Phase.GENERATING:
            with pytest.raises(TransferError, match="was put already"):
                self.rules.drop_group(wire.EndGroup(uid, "late"))
            return
        del slots[uid]
        if how == "drop":
            if group is not None:
                self.dropped[key_of(uid)] = "uninformative"
            self.do(self.rules.drop_group(wire.EndGroup(uid, "uninformative")))
        else:
            self.do(self.rules.return_group(wire.EndGroup(uid, "aborted")))
        assert uid not in self.data.groups

    def kill_engine(self, engine: Engine, *, is_told: bool, is_zombie: bool) -> None:
        """The supervisor tells it (or not), the next start shows it; a zombie goes on putting."""
        if is_zombie:
            self.zombies |= engine.slots
        if is_told:
            self.do([q.ProducerLost("rollout", engine.index, engine.incarnation)])
        engine.incarnation += 1
        engine.version = min(engine.version, self.data.version)
        engine.slots, engine.key = {}, ""
        self.do([q.CallerSeen("rollout", engine.index, self.attempt, engine.incarnation)])
        assert not [u for u in self.generating() if self.data.groups[u].index == engine.index]

    def generating(self) -> set[str]:
        """Groups that nobody has put yet."""
        return {u for u, g in self.data.groups.items() if g.phase is q.Phase.GENERATING}

    def late_word_of_an_older_death(self, engine: Engine) -> None:
        """It comes after the next start: nothing of that one is touched."""
        before = set(self.data.groups)
        self.do([q.ProducerLost("rollout", engine.index, engine.incarnation - 1)])
        assert before == set(self.data.groups)

    # -- forward-only tasks -------------------------------------------------------------------

    def take_rows(self, task: str, max_rows: int) -> None:
        """Lease rows."""
        request = wire.TakeRows(task, self.key(), max_rows, 0.0)
        event = self.rules.take_rows(self.caller(task), request)
        if event is not None:
            self.do([event])
            assert sum(len(samples) for _, samples in event.rows) <= max_rows
            assert not self.leased(task, event.rows) & self.pending(task)
            self.leases.setdefault(task, []).extend(event.rows)

    def pending(self, task: str) -> set[tuple[str, int]]:
        """Rows that nobody leased."""
        return self.leased(task, list(self.rules.state.pending[task].items()))

    def leased(self, task: str, rows: list[q.RowKeys]) -> set[tuple[str, int]]:
        """Those of `rows` whose group is in flight and lacks the field."""
        groups = self.data.groups
        alive = [(uid, s) for uid, samples in rows for s in samples if uid in groups]
        return {(uid, s) for uid, s in alive if s in groups[uid].missing[task]}

    def put_fields(self, task: str, count: int) -> None:
        """Put the field for some of the leased rows, one block for all of them."""
        held = self.leases.get(task, [])
        rows, self.leases[task] = held[:count], held[count:]
        if not rows:
            return
        block = self.block(task)
        request = wire.PutFields(TASKS[task], rows, block)
        reply, events = self.rules.put_fields(request)
        self.do(events)
        assert not self.leased(task, rows), "put for all of them that live"
        if reply.is_kept:
            self.kept.add(place_of(block))
        else:
            assert place_of(block) not in self.used()

    def kill_forward(self, task: str) -> None:
        """Its leases return."""
        held = self.leases.pop(task, [])
        self.incarnations[task] += 1
        self.do([q.CallerSeen(task, 0, self.attempt, self.incarnations[task])])
        assert self.leased(task, held) <= self.pending(task), "leases of the dead return"

    # -- train --------------------------------------------------------------------------------

    def train(self, chance: random.Random) -> None:
        """The next message of the train step, as far as the queue can answer it."""
        step, index = self.data.version, len(self.taken)
        if self.rules.is_done or self.data.train_incarnation == 0:
            return
        if index == self.config.chunks_per_step:
            self.complete(step)
            return
        if not self.data.chunks:
            self.dp_size = chance.randint(1, self.config.groups_per_chunk)
        self.take(step, index)

    def take(self, step: int, index: int) -> bool:
        """All dp ranks ask, each of them twice; True when the chunk is theirs."""
        shares: list[list[str]] = []
        for dp_rank in [*range(self.dp_size), *range(self.dp_size)]:
            request = wire.TakeChunk(step, index, dp_rank, self.dp_size, 0.0)
            while events := self.rules.decide_chunk(self.caller("train"), request):
                self.do(events)
            reply = self.rules.chunk_reply(self.caller("train"), request)
            if reply is None:
                return False
            assert reply.groups is not None
            for group in reply.groups:
                assert len(group.rows) == group.group_size == self.config.group_size
                assert not any(self.data.groups[group.uid].missing.values())
            shares.append([group.uid for group in reply.groups])
        assert shares[: self.dp_size] == shares[self.dp_size :], "same share when asked again"
        flat = [uid for share in shares[: self.dp_size] for uid in share]
        assert len(flat) == len(set(flat)) == self.config.groups_per_chunk
        assert all(shares), "each dp rank has a group"
        self.taken[index] = shares[: self.dp_size]
        return True

    def complete(self, step: int) -> None:
        """The optimizer step; with a hole in a chunk it is refused, and the chunk asked again."""
        request = wire.CompleteStep(step)
        holes = [i for i, chunk in enumerate(self.data.chunks) if chunk.holes]
        if holes:
            with pytest.raises(TransferError, match="groups missing"):
                self.rules.complete_step(self.caller("train"), request)
            self.take(step, holes[0])
            return
        assert all(self.take(step, index) for index in range(self.config.chunks_per_step))
        uids = [uid for index in sorted(self.taken) for share in self.taken[index] for uid in share]
        lags = [step - min(self.put_versions[uid]) for uid in uids]
        assert min(lags) >= 0
        if self.config.stale_policy is not StalePolicy.CORRECT:
            assert max(lags) <= self.config.max_staleness, (uids, lags)
        for uid in uids:
            for version, branch in self.put_versions[uid].items():
                assert self.branches[version] == branch, f"{uid} has tokens of a lost branch"
        self.do(self.rules.complete_step(self.caller("train"), request))
        assert not self.rules.complete_step(self.caller("train"), request), "a repeated message"
        summary = self.data.last_summary
        assert summary is not None and summary.staleness_max == max(lags)
        assert sorted(summary.uids) == sorted(uids)
        self.trained[step], self.taken = sorted(uids), {}
        self.branches[step + 1] = next(self.counter)

    def reject(self, chance: random.Random) -> None:
        """Lost or corrupt payload: in any phase the prompt goes back, a chunk gets another one."""
        put = sorted(set(self.data.groups) - self.generating())
        in_chunks = sorted(u for chunk in self.data.chunks for u in chunk.picked if u)
        if in_chunks and chance.random() < 0.7:
            put = in_chunks
        if put:
            uid = chance.choice(put)
            self.do(self.rules.reject_group(wire.EndGroup(uid, "corrupt")))
            assert uid not in self.data.groups

    def restart_train(self, back: int, *, is_told: bool, is_repeated: bool = False) -> None:
        """It comes back with the weights of up to `back` steps ago."""
        if is_told:
            self.do([q.ProducerLost("train", 0, self.incarnations["train"])])
            assert not self.rules.is_done
        self.incarnations["train"] += 1
        self.do([q.CallerSeen("train", 0, self.attempt, self.incarnations["train"])])
        self.begin_at(max(self.data.version - back, 0), is_repeated=is_repeated)

    def begin_at(self, step: int, *, is_repeated: bool, cut: wire.LedgerCut | None = None) -> None:
        """begin_train; sent twice it counts once."""
        self.begun = request = wire.BeginTrain(self.key(), step, cut)
        is_rollback = step < self.data.version
        for _ in range(1 + is_repeated):
            self.do(self.rules.begin_train(self.caller("train"), request))
        for uid in self.generating() if is_rollback else ():
            self.lost_after[uid] = min(step, self.lost_after.get(uid, step))
        self.taken = {}
        self.trained = {s: uids for s, uids in self.trained.items() if s < step}
        self.branches = {v: b for v, b in self.branches.items() if v <= step}
        for engine in self.engines:  # they load what is published, sooner or later
            engine.version = min(engine.version, step)
        assert all(g.engine_version <= step for g in self.data.groups.values())

    def repeat_begin(self) -> None:
        """The same message comes once more, late: it was done already."""
        assert not self.rules.begin_train(self.caller("train"), self.begun)

    def next_attempt(self, back: int) -> None:
        """The job was requeued: all payload is gone, no prompt is."""
        self.attempt += 1
        self.do([q.AttemptBegun(self.attempt)])
        assert not self.data.groups and not self.rules.is_done and not self.free()
        self.kept, self.collected, self.leases, self.zombies = self.used(), set(), {}, {}
        for engine in self.engines:
            self.kill_engine(engine, is_told=False, is_zombie=False)
        for task in self.config.task_fields:
            self.kill_forward(task)
        self.restart_train(back, is_told=False)

    def save_checkpoint(self) -> None:
        """The train step stores the ledger's cut beside its weights."""
        step = self.data.version
        if step == 0:
            return
        cut = cut_ledger(self.data, step)
        known = dict(self.dropped), dict(self.trained), dict(self.branches)
        self.cuts[step] = Checkpoint(cut, *known)

    def lose_journal(self, chance: random.Random) -> None:
        """Nothing is left but a checkpoint: a new attempt begins from its cut."""
        if not self.cuts:
            return
        step = chance.choice(sorted(self.cuts))
        saved = self.cuts[step]
        self.dropped, self.branches = dict(saved.dropped), dict(saved.branches)
        self.trained = dict(saved.trained)
        self.rules = QueueRules(self.config, self.config.new_state(q.QueueData()))
        self.rotate_journal()
        for engine in self.engines:
            engine.version = 0
        self.kept, self.collected = set(), set()
        self.attempt += 1
        self.do([q.AttemptBegun(self.attempt)])
        self.do(self.rules.open_dataset(wire.OpenDataset(self.num_prompts, "x")))
        self.incarnations["train"] += 1
        self.leases, self.zombies, self.saved = {}, {}, {}
        for engine in self.engines:
            engine.incarnation += 1
            engine.slots, engine.key = {}, ""
        self.begin_at(step, is_repeated=chance.random() < 0.3, cut=saved.cut)
        self.cuts = {s: kept for s, kept in self.cuts.items() if s <= step}
        self.kept = self.used()
        assert self.data.version == step

    def open_dataset(self, num_prompts: int, fingerprint: str) -> None:
        """The same one again is fine, another one a clear stop."""
        request = wire.OpenDataset(num_prompts, fingerprint)
        if (num_prompts, fingerprint) == (self.num_prompts, "x"):
            assert not self.rules.open_dataset(request)
            return
        with pytest.raises(TransferError, match=r"began with a data set of .* start a new run"):
            self.rules.open_dataset(request)

    # -- payload ------------------------------------------------------------------------------

    def used(self) -> set[Block]:
        """Blocks of groups in flight, and of saved tokens."""
        blocks = [block for group in self.data.groups.values() for block in group.blocks]
        blocks += [g.partial.block for g in self.data.groups.values() if g.partial is not None]
        blocks += [partial.block for partial in self.data.ledger.partials.values()]
        return {place_of(block) for block in blocks}

    def free(self) -> list[Block]:
        """Blocks that their producers are told to free."""
        return [block for blocks in self.data.free.values() for block in blocks]

    def collect(self, chance: random.Random) -> None:
        """A producer frees some of what it may free."""
        for arena in sorted(self.arenas):
            free = sorted(self.rules.state.blocks.free_of(arena))
            blocks = chance.sample(free, chance.randint(0, len(free)))
            assert not set(blocks) & self.collected, "a block is freed twice"
            self.collected |= set(blocks)
            self.rules.state.blocks.acknowledge(arena, blocks)

    def sweep(self) -> None:
        """An agent removes extents of dead producers that nobody references."""
        used = {extent for extent, _, _ in self.used()}
        names = sorted({extent for extent, _, _ in self.kept})
        orphans, events = self.rules.find_orphans(names)
        assert set(orphans) == set(names) - used
        self.collected |= {block for block in self.free() if block[0] in orphans}
        self.do(events)

    # -- what always holds --------------------------------------------------------------------

    def check(self) -> None:
        """All invariants."""
        self.check_every_prompt_is_in_exactly_one_place()
        self.check_all_in_flight_can_be_trained_in_time()
        self.check_a_block_is_in_use_or_free_or_collected()
        self.check_leases_belong_to_rows_in_flight()

    def check_every_prompt_is_in_exactly_one_place(self) -> None:
        """Ahead of the cursor, in flight, to be dispatched again, trained or dropped."""
        ledger = self.data.ledger
        places = [(t.epoch, t.prompt_index) for t in ledger.again]
        places += [key_of(uid) for uid in self.data.groups]
        trained = trained_uids(ledger)
        places += [key_of(uid) for uids in trained.values() for uid in uids]
        places += list(self.dropped)
        assert len(places) == len(set(places)), "a prompt is in two places"
        admitted = admitted_prompts(self.config, self.num_prompts, ledger.position)
        assert admitted == set(places), "a prompt is lost"
        assert trained == self.trained
        assert ledger.dropped == collections.Counter(self.dropped.values())

    def check_all_in_flight_can_be_trained_in_time(self) -> None:
        """The staleness window; and never more than the capacity."""
        data, config = self.data, self.config
        assert self.rules.state.window.is_feasible(data.version, data.num_assigned)
        last = min(data.version + config.max_staleness, config.train_steps - 1)
        capacity = max(last - data.version + 1, 0) * config.groups_per_step
        assert len(data.groups) <= capacity == self.rules.status(0.0).capacity

    def check_a_block_is_in_use_or_free_or_collected(self) -> None:
        """In this order, and never in two of them."""
        used, free = self.used(), self.free()
        assert len(free) == len(set(free)), "a block is free twice"
        assert not used & set(free), "a block in use is free"
        assert not self.collected & (used | set(free)), "a collected block is used or free again"
        assert used | set(free) | self.collected == self.kept, "a block leaks"

    def check_leases_belong_to_rows_in_flight(self) -> None:
        """A row that lacks a field is leased to one client or open, never both."""
        for task in self.config.task_fields:
            rows = []
            for uid, group in self.data.groups.items():
                for samples in group.leased.get(task, {}).values():
                    rows += [(uid, sample) for sample in samples]
            open_rows = self.pending(task)
            assert len(rows) == len(set(rows)) and not set(rows) & open_rows
            missing = [(u, g.missing.get(task, ())) for u, g in self.data.groups.items()]
            assert set(rows) | open_rows == {(u, s) for u, samples in missing for s in samples}

    # -- the end ------------------------------------------------------------------------------

    def run_to_the_end(self) -> None:
        """Calm processes bring the run to its last step from wherever it is."""
        self.restart_controller()
        for engine in self.engines[1:]:
            self.kill_engine(engine, is_told=False, is_zombie=False)
        for task in self.config.task_fields:
            self.kill_forward(task)
        if self.data.train_incarnation == 0:
            self.restart_train(0, is_told=False)
        for _ in range(60 * self.config.train_steps):
            if self.rules.is_done:
                break
            self.calm_turn()
        assert self.rules.is_done, f"stuck: {self.rules.status(0.0)}"
        self.check()
        assert not self.data.groups
        partials = {place_of(p.block) for p in self.data.ledger.partials.values()}
        assert self.used() == partials, "only prompts that wait for a dispatch keep tokens"
        trained = [key_of(uid) for uids in self.trained.values() for uid in uids]
        assert len(trained) == len(set(trained))
        assert sorted(self.trained) == list(range(self.config.train_steps))

    def calm_turn(self) -> None:
        """Each process does all it can."""
        engine = self.engines[0]
        engine.version = self.data.version
        self.admit(engine, 5)
        for uid in list(engine.slots):
            self.put(uid, self.block("rollout"), engine.slots.pop(uid), 5)
        for task in self.config.task_fields:
            self.take_rows(task, 999)
            self.put_fields(task, 999)
        if len(self.taken) == self.config.chunks_per_step:
            self.complete(self.data.version)
        elif not self.rules.is_done:
            self.dp_size = len(self.data.chunks[0].shares) if self.data.chunks else 1
            self.take(self.data.version, len(self.taken))
