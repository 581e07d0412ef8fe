"""Decisions of the queue: who gets which prompt, row or group. Returns events, changes nothing.

Every method looks at the state and returns what should happen as events (possibly none); the
controller applies and journals them. Refusals are TransferErrors, "not yet" is None.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from relax_hpc.config import Config, Sampler, StalePolicy
from relax_hpc.control.rpc import Caller
from relax_hpc.errors import TransferError
from relax_hpc.transfer import queue_data as q
from relax_hpc.transfer import wire
from relax_hpc.transfer.ledger import Partial
from relax_hpc.transfer.ledger_cut import restored_ledger
from relax_hpc.transfer.queue_histograms import response_tokens
from relax_hpc.transfer.queue_report import StuckLimit, report, summarize
from relax_hpc.transfer.queue_state import QueueState
from relax_hpc.transfer.samplers import divide


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QueueRulesConfig:
    """What the queue needs to know of a run."""

    groups_per_step: int
    group_size: int
    max_staleness: int
    chunks_per_step: int
    train_steps: int
    eval_interval: int = 0
    """0 = never."""
    task_fields: dict[str, str] = dataclasses.field(default_factory=dict)
    """Field that each forward-only task adds before a group can be trained."""
    seed: int = 0
    is_shuffled: bool = True
    sampler: Sampler = Sampler.BALANCED
    stale_policy: StalePolicy = StalePolicy.REGENERATE
    """What happens to a put group with tokens older than the bound allows."""
    stuck_after_s: float = 900.0
    """A task whose oldest row waits longer is named in the status."""

    @classmethod
    def from_config(cls, config: Config) -> "QueueRulesConfig":
        """Take the queue's part out of the run's configuration."""
        tasks = {}
        if config.resources.ref is not None:
            tasks["ref"] = "ref_logprobs"
        if config.resources.logprob is not None:
            tasks["logprob"] = "train_logprobs"
        return cls(
            groups_per_step=config.rollout.groups_per_step,
            group_size=config.rollout.group_size,
            max_staleness=config.rollout.max_staleness,
            chunks_per_step=config.train.chunks_per_step,
            train_steps=config.run.train_steps,
            eval_interval=config.rollout.eval_interval if config.data.eval else 0,
            task_fields=tasks,
            seed=config.run.seed,
            is_shuffled=config.data.shuffle,
            stale_policy=config.rollout.stale_policy,
            sampler=config.train.sampler,
        )

    @property
    def groups_per_chunk(self) -> int:
        """Groups in each chunk of a step."""
        return self.groups_per_step // self.chunks_per_step

    def new_state(self, data: q.QueueData) -> QueueState:
        """Build the state machine for a snapshot (or an empty QueueData)."""
        return QueueState(
            data,
            groups_per_step=self.groups_per_step,
            task_fields=self.task_fields,
            seed=self.seed,
            is_shuffled=self.is_shuffled,
        )


def client_of(caller: Caller) -> str:
    """Key of a client: leases, grants and claims belong to it."""
    return f"{caller.role}/{caller.index}/{caller.rank}"


_REFUSED = wire.Stored(is_kept=False, is_wanted=False)
_KEPT = wire.Stored(is_kept=True, is_wanted=True)
_GENERATING = q.Phase.GENERATING


class QueueRules:
    """Decisions over one state."""

    def __init__(self, config: QueueRulesConfig, state: QueueState) -> None:
        self.config = config
        self.state = state
        self._whole = list(range(config.group_size))
        """Samples of a whole group, for replies."""

    @property
    def is_done(self) -> bool:
        """All train steps are complete, and no train step is known to be lost since.

        A train step that died between its last update and its last checkpoint comes back with an
        older version: engines that wait for it must not end.
        """
        data = self.state.data
        return data.version >= self.config.train_steps and data.train_incarnation > 0

    # -- rollout ------------------------------------------------------------------------------

    def open_dataset(self, request: wire.OpenDataset) -> list[q.Event]:
        """Accept the first data set, and the same one again."""
        known = self.state.data.ledger
        allow = request.allow_changed
        event = q.DatasetOpened(request.num_prompts, request.fingerprint, allow)
        if request.num_prompts <= 0:
            raise TransferError(f"data set has {request.num_prompts} prompts: must be > 0")
        if known.num_prompts == 0:
            return [event]
        if (known.num_prompts, known.fingerprint) == (request.num_prompts, request.fingerprint):
            return [] if known.is_change_allowed == allow else [event]
        if allow:
            return [event]
        raise TransferError(
            f"this run began with a data set of {known.num_prompts} prompts, fingerprint "
            f"{known.fingerprint}; now it has {request.num_prompts} prompts, fingerprint "
            f"{request.fingerprint}: restore data.train (and the tokenizer), start a new run with "
            "run.init_from, or set data.allow_changed = true"
        )

    def admit(self, caller: Caller, request: wire.Admit) -> q.Admitted | None:
        """Grant slots, as many as stay feasible; None: none now."""
        data, config = self.state.data, self.config
        if data.ledger.num_prompts == 0:
            raise TransferError("admit before open_dataset: the data set is unknown")
        # An engine ahead of the train step serves weights of a branch that was rolled back.
        if self.is_done or request.engine_version > data.version:
            return None
        deadline = min(request.engine_version + config.max_staleness, config.train_steps - 1)
        room = self.state.window.room(data.version, data.num_assigned, deadline)
        num_groups = min(room, request.max_groups)
        if num_groups <= 0:
            return None
        tickets, num_again = self.state.ledger.peek(num_groups)
        return q.Admitted(
            client=client_of(caller),
            key=request.key,
            role=caller.role,
            index=caller.index,
            incarnation=caller.incarnation,
            engine_version=request.engine_version,
            deadline=deadline,
            tickets=tickets,
            num_again=num_again,
            deadlines=self._with_saved_tokens([t.uid for t in tickets[:num_again]], deadline),
        )

    def _with_saved_tokens(self, uids: Iterable[str], deadline: int) -> dict[str, int]:
        """Slots that get back what an earlier dispatch generated, and their deadlines.

        Old tokens bring the deadline forward; where that does not fit they are generated anew.
        """
        data, policy = self.state.data, self.config.stale_policy
        given: dict[str, int] = {}
        for uid in uids:
            partial = data.ledger.partials.get(uid)
            if partial is None:
                continue
            low = min(deadline, max(partial.oldest_version, 0) + self.config.max_staleness)
            others = [value for value in given.values() if value < deadline]
            if policy is StalePolicy.CORRECT:
                given[uid] = deadline
            elif self.state.window.can_lower(
                data.version, data.num_assigned, low, deadline, others
            ):
                given[uid] = low
        return given

    def put_group(self, info: wire.GroupInfo, now: float) -> tuple[wire.Stored, list[q.Event]]:
        """One group of `put_groups`."""
        results, events = self.put_groups([info], now)
        return results[0], events

    def put_groups(
        self, infos: Sequence[wire.GroupInfo], now: float
    ) -> tuple[list[wire.Stored], list[q.Event]]:
        """Accept each group once; refuse what nobody waits for.

        Args:
            infos: the groups of one message.
            now: seconds since 1970.

        Raises:
            TransferError: rows of a group have another shape than those of this run; none is put.
        """
        results: list[wire.Stored] = []
        kept: dict[str, wire.GroupInfo] = {}
        ended: dict[str, q.Event] = {}
        for info in infos:
            self._check_rows(info)
            first = kept.get(info.uid)
            if first is not None:  # the same group twice in one message
                results.append(wire.Stored(info.block == first.block, True))
                continue
            reply, event = self._decide_put(info)
            if event is not None:
                ended.setdefault(info.uid, event)
            elif reply is _KEPT:
                kept[info.uid] = info
            results.append(reply)
        put: list[q.Event] = [q.GroupsPut(list(kept.values()), now)] if kept else []
        return results, [*put, *ended.values()]

    def _decide_put(self, info: wire.GroupInfo) -> tuple[wire.Stored, q.Event | None]:
        """Return the answer, and how the group ends if it does; _KEPT: it is to be put."""
        group = self.state.data.groups.get(info.uid)
        if group is None:
            return _REFUSED, None
        if group.phase is not _GENERATING:
            return wire.Stored(info.block in group.blocks, True), None
        if self._is_lost(group, info.newest_version):
            return _REFUSED, q.DispatchedAgain([info.uid], "rollback")
        ended = self._beyond_the_bound(group, info)
        return (_KEPT, None) if ended is None else (_REFUSED, ended)

    def _is_lost(self, group: q.Group, newest_version: int) -> bool:
        """Whether tokens of this version may come from weights of a branch that is gone."""
        return newest_version > self.state.data.version or 0 <= group.lost_after < newest_version

    def _check_rows(self, info: wire.GroupInfo) -> None:
        rows, size = info.rows, self.config.group_size
        if not (
            len(rows.num_tokens) == len(rows.num_prompt_tokens) == len(rows.finish_reasons) == size
        ):
            raise TransferError(
                f"group {info.uid} has {len(rows)} samples (prompt lengths "
                f"{len(rows.num_prompt_tokens)}, finish reasons {len(rows.finish_reasons)}), "
                f"rollout.group_size is {size}"
            )

    def _beyond_the_bound(self, group: q.Group, info: wire.GroupInfo) -> q.Event | None:
        if not 0 <= info.oldest_version < group.deadline - self.config.max_staleness:
            return None
        policy = self.config.stale_policy
        if policy is StalePolicy.CORRECT:
            return None
        lengths = response_tokens(info.rows)
        if policy is StalePolicy.DROP:
            return q.GroupDropped(info.uid, "stale", lengths)
        return q.DispatchedAgain([info.uid], "older_than_admitted", lengths)

    def save_partial(self, request: wire.SavePartial) -> tuple[wire.Stored, list[q.Event]]:
        """Remember tokens of an unfinished group for its next dispatch."""
        group = self.state.data.groups.get(request.uid)
        if group is None or group.phase is not q.Phase.GENERATING:
            return _REFUSED, []
        if self._is_lost(group, request.newest_version):
            return _REFUSED, []
        partial = Partial(request.block, request.oldest_version, request.newest_version)
        if group.partial == partial:
            return _KEPT, []
        return _KEPT, [q.PartialSaved(request.uid, partial)]

    def drop_group(self, request: wire.EndGroup) -> list[q.Event]:
        """The prompt is used up."""
        if self._can_end(request.uid):
            return [q.GroupDropped(request.uid, request.reason, request.response_tokens)]
        return []

    def return_group(self, request: wire.EndGroup) -> list[q.Event]:
        """The prompt is dispatched again."""
        if self._can_end(request.uid):
            return [q.DispatchedAgain([request.uid], request.reason, request.response_tokens)]
        return []

    def reject_group(self, request: wire.EndGroup) -> list[q.Event]:
        """A reader found the payload lost or corrupt, in any phase."""
        if request.uid in self.state.data.groups:
            return [q.DispatchedAgain([request.uid], "unreadable")]
        return []

    def _can_end(self, uid: str) -> bool:
        group = self.state.data.groups.get(uid)
        if group is not None and group.phase is not q.Phase.GENERATING:
            raise TransferError(f"group {uid} was put already: it cannot be dropped or returned")
        return group is not None

    # -- ref, logprob -------------------------------------------------------------------------

    def take_rows(self, caller: Caller, request: wire.TakeRows) -> q.RowsTaken | None:
        """Lease the oldest rows that lack the task's field."""
        pending = self.state.pending.get(request.task)
        if pending is None:
            known = ", ".join(self.state.pending) if self.state.pending else "none"
            raise TransferError(f"task {request.task!r} is not part of this run (tasks: {known})")
        rows: list[q.RowKeys] = []
        num_left = request.max_rows
        for uid, samples in pending.items():
            if num_left <= 0:
                break
            rows.append((uid, samples[:num_left]))
            num_left -= len(samples)
        return q.RowsTaken(request.task, client_of(caller), request.key, rows) if rows else None

    def put_fields(self, request: wire.PutFields) -> tuple[wire.Stored, list[q.Event]]:
        """Accept a field for those rows that still lack it."""
        task = self.state.task_of_field.get(request.name)
        if task is None:
            raise TransferError(f"field {request.name!r}: no task of this run adds it")
        if self.state.blocks.has_block(request.block):
            return _KEPT, []
        groups = self.state.data.groups
        known = [(uid, samples) for uid, samples in request.rows if uid in groups]
        rows = []
        for uid, samples in known:
            missing = set(groups[uid].missing.get(task, ()))
            if accepted := [s for s in samples if s in missing]:
                rows.append((uid, accepted))
        if not rows:
            return wire.Stored(is_kept=False, is_wanted=bool(known)), []
        return _KEPT, [q.FieldsPut(request.name, rows, request.block)]

    def find_orphans(self, names: list[str]) -> tuple[list[str], list[q.Event]]:
        """Extents of dead producers that nobody needs; what was free in them is forgotten."""
        blocks = self.state.blocks
        found = [name for name in names if not blocks.has_extent(name)]
        told = [name for name in found if blocks.has_free(name)]
        return found, [q.ExtentsRemoved(told)] if told else []

    def rows_reply(self, rows: list[q.RowKeys]) -> wire.TakenRows:
        """Describe leased rows; those whose group is gone are left out."""
        groups = self.state.data.groups
        return wire.TakenRows(*self._describe([row for row in rows if row[0] in groups]))

    def _describe(
        self, rows: Iterable[q.RowKeys]
    ) -> tuple[list[wire.GroupRows], list[wire.BlockRef]]:
        """Describe rows of put groups, and name each of their blocks once."""
        groups, size = self.state.data.groups, self.config.group_size
        result: list[wire.GroupRows] = []
        places: dict[wire.BlockRef, int] = {}
        before: list[wire.BlockRef] = []
        of_group: list[int] = []
        for uid, samples in rows:
            group = groups[uid]
            assert group.rows is not None, f"group {uid} is not put"
            if group.blocks != before:
                before = group.blocks
                of_group = [places.setdefault(block, len(places)) for block in before]
            if len(samples) == size:
                info = wire.GroupRows(uid, size, self._whole, group.rows, of_group)
            else:
                info = wire.GroupRows(uid, size, samples, group.rows.pick(samples), of_group)
            result.append(info)
        return result, list(places)

    # -- train --------------------------------------------------------------------------------

    def begin_train(self, caller: Caller, request: wire.BeginTrain) -> list[q.Event]:
        """(Re)start the train step; the same message twice counts once."""
        if not 0 <= request.step <= self.config.train_steps:
            raise TransferError(
                f"begin_train({request.step}): must be in 0 .. {self.config.train_steps}"
            )
        if request.key == self.state.data.train_key:
            return []
        begun = q.TrainBegun(request.key, caller.incarnation, request.step)
        data = self.state.data
        is_older = data.version < request.step or not data.train_key  # no key: a new journal
        if request.cut is None or not is_older:
            return [begun]  # our journal knows more than the checkpoint
        ledger = restored_ledger(request.cut, request.step, data.ledger, caller.incarnation)
        return [q.LedgerRestored(request.step, ledger), begun]

    def decide_chunk(self, caller: Caller, request: wire.TakeChunk) -> list[q.Event]:
        """Fill holes and decide the next chunk if it is asked for and can be filled."""
        self._check_chunk(request)
        data = self.state.data
        is_current = caller.incarnation == data.train_incarnation and request.step == data.version
        if not is_current:
            return []
        for number, chunk in enumerate(data.chunks):
            for dp_rank in chunk.holes:
                picked = self._pick(1)
                return [q.HoleFilled(number, dp_rank, picked[0])] if picked else []
        if request.index != len(data.chunks):
            return []
        picked = self._pick(self.config.groups_per_chunk)
        if not picked:
            return []
        tokens = [data.groups[uid].num_tokens for uid in picked]
        loads = self._loads(request.dp_size)
        parts = divide(self.config.sampler, tokens, request.dp_size, loads)
        return [q.ChunkDecided(picked, [[picked[i] for i in part] for part in parts])]

    def _loads(self, dp_size: int) -> list[int]:
        """Tokens that each rank got in the earlier chunks of this step."""
        loads, groups = [0] * dp_size, self.state.data.groups
        for chunk in self.state.data.chunks:
            for rank, share in enumerate(chunk.shares):
                loads[rank] += sum(groups[uid].num_tokens for uid in share)
        return loads

    def chunk_reply(self, caller: Caller, request: wire.TakeChunk) -> wire.TakenChunk | None:
        """The share of a decided chunk; None: not decided, or a group of it is being replaced."""
        data = self.state.data
        is_current = caller.incarnation == data.train_incarnation and request.step == data.version
        if not is_current or request.index >= len(data.chunks):
            return None
        chunk = data.chunks[request.index]
        if request.dp_rank in chunk.holes:
            return None
        share = chunk.shares[request.dp_rank]
        return wire.TakenChunk(*self._describe([(uid, self._whole) for uid in share]))

    def complete_step(self, caller: Caller, request: wire.CompleteStep) -> list[q.Event]:
        """Acknowledge the current step; the step before again is harmless."""
        data, step = self.state.data, request.step
        if caller.incarnation != data.train_incarnation:
            raise TransferError(f"complete_step({step}) before begin_train of this incarnation")
        if data.last_summary is not None and data.last_summary.step == step:
            return []
        num_chunks, holes = len(data.chunks), sum(len(c.holes) for c in data.chunks)
        if step != data.version or num_chunks != self.config.chunks_per_step or holes:
            raise TransferError(
                f"complete_step({step}): the queue is at step {data.version} with {num_chunks} of "
                f"{self.config.chunks_per_step} chunks taken and {holes} groups missing"
            )
        return [q.StepCompleted(step, summarize(data, step))]

    def _pick(self, num_groups: int) -> list[str]:
        data = self.state.data
        return self.state.window.pick(num_groups, data.version, data.num_assigned)

    def _check_chunk(self, request: wire.TakeChunk) -> None:
        data, what = self.state.data, f"chunk {request.index} of step {request.step}"
        if request.step < data.version:
            raise TransferError(
                f"{what}: that step is complete, the queue is at step {data.version}; call "
                "begin_train after loading a checkpoint"
            )
        if not 0 <= request.index < self.config.chunks_per_step:
            raise TransferError(f"{what}: train.chunks_per_step is {self.config.chunks_per_step}")
        if not 0 <= request.dp_rank < request.dp_size <= self.config.groups_per_chunk:
            raise TransferError(
                f"{what}: dp rank {request.dp_rank} of {request.dp_size}, but a chunk has "
                f"{self.config.groups_per_chunk} groups"
            )
        if request.step == data.version and data.chunks:
            dp_size = len(data.chunks[0].shares)
            if request.dp_size != dp_size or request.index > len(data.chunks):
                raise TransferError(
                    f"{what} for dp size {request.dp_size}: {len(data.chunks)} chunks are decided "
                    f"for dp size {dp_size}; take chunks in order, all with one dp size"
                )

    # -- evaluation and state -----------------------------------------------------------------

    def evals_pending(self) -> list[int]:
        """Versions due and not finished: every eval_interval, and after the last step."""
        if not self.config.eval_interval:
            return []
        data, last = self.state.data, self.config.train_steps
        due = set(range(0, min(data.version, last) + 1, self.config.eval_interval))
        if data.version >= last:
            due.add(last)
        return sorted(due - set(data.evals_finished))

    def claim_eval(self, caller: Caller, version: int) -> tuple[bool, list[q.Event]]:
        """The first engine wins; asked again it gets the same answer."""
        holder = self.state.data.eval_claims.get(version)
        if holder is not None or version not in self.evals_pending():
            return holder == client_of(caller), []
        return True, [q.EvalClaimed(version, client_of(caller))]

    def status(self, now: float) -> wire.QueueStatus:
        """Count everything.

        Args:
            now: seconds since 1970.
        """
        config = self.config
        data = self.state.data
        last = min(data.version + config.max_staleness, config.train_steps - 1)
        return report(
            self.state,
            capacity=max(0, last - data.version + 1) * config.groups_per_step,
            train_steps=config.train_steps,
            is_done=self.is_done,
            evals_pending=self.evals_pending(),
            limit=StuckLimit(now, config.stuck_after_s),
        )
