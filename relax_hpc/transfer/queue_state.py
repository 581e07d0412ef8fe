"""The queue's state machine: events change it, nothing else does. No clock, no sockets.

`apply` is used live and in replay. The controller decides (queue_rules.py), applies the event and
journals it; a restarted controller applies the journal and stands where the old one stood.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable

from relax_hpc.errors import TransferError
from relax_hpc.transfer import queue_data as q
from relax_hpc.transfer.ledger import LIFE, LIVES, Ledger, Partial, Ticket
from relax_hpc.transfer.queue_blocks import BlockIndex
from relax_hpc.transfer.queue_histograms import count_ended, count_generated, count_trained
from relax_hpc.transfer.samplers import Window
from relax_hpc.transfer.wire import BlockRef, GroupInfo, Rows, Slot

SLOTS, READY, CHUNKS = "slots", "ready", "chunks"
"""What waiting requests wait for; `QueueState.changed` collects what an event touched. READY: a
chunk might be decided; CHUNKS: one was, or chunks changed."""
_WAITING, _READY, _ASSIGNED = q.Phase.WAITING, q.Phase.READY, q.Phase.ASSIGNED
"""Each look into an enum class costs as much as a call."""


def rows_signal(task: str) -> str:
    """What the processes of a forward-only task wait for."""
    return f"rows {task}"


def free_signal(arena: str) -> str:
    """What the producer of an arena waits for."""
    return f"free {arena}"


class QueueState:
    """Data plus the indexes that make each question cheap."""

    def __init__(
        self,
        data: q.QueueData,
        *,
        groups_per_step: int,
        task_fields: dict[str, str],
        seed: int,
        is_shuffled: bool,
    ) -> None:
        """Build the indexes.

        Args:
            data: snapshot, or empty for a new run.
            groups_per_step: B.
            task_fields: field that each task adds: {"ref": "ref_logprobs", ...}.
            seed: of the prompt order.
            is_shuffled: False = prompts in file order.
        """
        self.data = data
        self.task_fields = task_fields
        self.task_of_field = {name: task for task, name in task_fields.items()}
        self.ledger = Ledger(data.ledger, seed, is_shuffled)
        self.window = Window(groups_per_step)
        self.blocks = BlockIndex(data.free)
        self.changed: set[str] = set()
        self._uncounted: list[Rows] = []
        self.pending: dict[str, OrderedDict[str, list[int]]] = {
            task: OrderedDict() for task in task_fields
        }
        """Rows that a task can take, uid -> samples, in order of completion."""
        for partial in data.ledger.partials.values():
            self.blocks.use(partial.block)
        for group in sorted(data.groups.values(), key=lambda g: (g.ready_order, g.put_at)):
            self._index_group(group)

    def _index_group(self, group: q.Group) -> None:
        uid = group.ticket.uid
        if group.phase is not q.Phase.ASSIGNED:
            self.window.add(group.deadline)
        if group.phase is q.Phase.READY:
            self.window.set_ready(uid, group.deadline)
        for block in group.blocks:
            self.blocks.use(block)
        if group.partial is not None:
            self.blocks.use(group.partial.block)
        for task in self.task_fields:
            leased = {s for part in group.leased.get(task, {}).values() for s in part}
            samples = [s for s in group.missing.get(task, ()) if s not in leased]
            if samples:
                self.pending[task][uid] = samples

    # -- events -------------------------------------------------------------------------------

    def apply(self, event: q.Event) -> None:
        """Change the state by one event."""
        self.apply_but_count(event)
        self.count()

    def apply_but_count(self, event: q.Event) -> None:
        """Like apply, but what was put is missing in the histograms until `count`.

        Nobody who waits for a put needs them: they can be counted when the replies are gone.
        """
        _dispatch(type(event))(self, event)

    def count(self) -> None:
        """Count what was put since."""
        if self._uncounted:
            count_generated(self.data.histograms, self._uncounted)
            self._uncounted = []

    @functools.singledispatchmethod
    def _apply(self, event: q.Event) -> None:
        raise TransferError(f"journal holds an event of unknown type {type(event).__name__}")

    @_apply.register
    def _(self, event: q.AttemptBegun) -> None:
        data = self.data
        self._end_groups(list(data.groups), "attempt")
        self._discard_partials(lambda partial: partial.block.tier == "shm")
        if event.attempt > 1 and not data.ledger.num_prompts:  # no journal: what uids were there?
            data.ledger.first_k = event.attempt * LIVES * LIFE
        data.attempt, data.train_incarnation = event.attempt, 0
        data.chunks, data.num_assigned = [], 0
        data.admissions, data.takes, data.eval_claims = {}, {}, {}
        data.free.clear()

    @_apply.register
    def _(self, event: q.CallerSeen) -> None:
        self.data.callers[f"{event.role}/{event.index}"] = (event.attempt, event.incarnation)
        self._lose_producer(event.role, event.index, event.incarnation - 1)
        self._release_client(event.role, event.index)

    @_apply.register
    def _(self, event: q.ProducerLost) -> None:
        self._lose_producer(event.role, event.index, event.incarnation)
        _, newest = self.data.callers.get(f"{event.role}/{event.index}", (0, 0))
        if newest > event.incarnation:
            return  # its next start is here already: leases and claims are that one's
        self._release_client(event.role, event.index)
        if event.role == "train":
            self.data.train_incarnation = 0

    @_apply.register
    def _(self, event: q.DatasetOpened) -> None:
        if self.ledger.open(event.num_prompts, event.fingerprint, event.is_change_allowed):
            self._discard_partials(lambda _: True)
        self.changed.add(SLOTS)

    @_apply.register
    def _(self, event: q.Admitted) -> None:
        self.ledger.advance(len(event.tickets), event.num_again)
        slots = []
        for ticket in event.tickets:
            uid = ticket.uid
            deadline = event.deadlines.get(uid, event.deadline)
            partial = self.data.ledger.partials.pop(uid, None)
            if partial is not None and uid not in event.deadlines:
                self._release(partial.block)
                partial = None
            self.data.groups[uid] = q.Group(
                ticket=ticket,
                engine_version=event.engine_version,
                deadline=deadline,
                role=event.role,
                index=event.index,
                incarnation=event.incarnation,
                partial=partial,
            )
            self.window.add(deadline)
            saved = None if partial is None else partial.block
            slots.append(Slot(uid, ticket.prompt_index, ticket.epoch, deadline, saved))
        self.data.admissions[event.client] = q.Grant(event.key, slots=slots)

    @_apply.register
    def _(self, event: q.GroupsPut) -> None:
        block, num_users = event.groups[0].block, 0
        for info in event.groups:
            if info.block != block:
                self.blocks.use(block, num_users)
                block, num_users = info.block, 0
            num_users += 1
            self._put(info, block, event.at)  # groups of one block keep one object of it
        self.blocks.use(block, num_users)
        self._uncounted += [info.rows for info in event.groups]

    @_apply.register
    def _(self, event: q.GroupPut) -> None:
        info = GroupInfo(
            event.uid, event.block, event.rows, event.oldest_version, event.newest_version
        )
        self.apply_but_count(q.GroupsPut([info], event.at))

    @_apply.register
    def _(self, event: q.FieldsPut) -> None:
        task = self.task_of_field.get(event.name)
        if task is None:  # a journal of an attempt that had one more task
            return
        for uid, samples in event.rows:
            group = self.data.groups.get(uid)
            if group is None:
                continue
            done = set(samples)
            before = len(group.missing.get(task, ()))
            group.missing[task] = [s for s in group.missing.get(task, ()) if s not in done]
            if len(group.missing[task]) < before:
                self._end_leases(group, task, done)
                self._use(group, event.block)
                self._check_ready(uid, group)

    @_apply.register
    def _(self, event: q.PartialSaved) -> None:
        self._set_partial(self.data.groups[event.uid], event.partial)

    @_apply.register
    def _(self, event: q.GroupDropped) -> None:
        group = self.data.groups[event.uid]
        count_ended(self.data.histograms, event.reason, group.rows, event.response_tokens)
        self._remove_group(event.uid)
        self.ledger.drop(event.reason)

    @_apply.register
    def _(self, event: q.DispatchedAgain) -> None:
        count_ended(self.data.histograms, event.reason, None, event.response_tokens)
        self._end_groups(event.uids, event.reason)

    @_apply.register
    def _(self, event: q.RowsTaken) -> None:
        pending = self.pending[event.task]
        for uid, samples in event.rows:
            left = [s for s in pending[uid] if s not in samples]
            if left:
                pending[uid] = left
            else:
                del pending[uid]
            leases = self.data.groups[uid].leased.setdefault(event.task, {})
            leases[event.client] = leases.get(event.client, []) + samples
        self.data.takes[event.client] = q.Grant(event.key, rows=event.rows)

    @_apply.register
    def _(self, event: q.ChunkDecided) -> None:
        shares = [list(share) for share in event.shares]
        self.data.chunks.append(q.Chunk(list(event.picked), shares))
        for uid in event.picked:
            self._assign(uid)
        self.changed.add(CHUNKS)

    @_apply.register
    def _(self, event: q.HoleFilled) -> None:
        chunk = self.data.chunks[event.chunk]
        chunk.holes.remove(event.dp_rank)
        chunk.shares[event.dp_rank].append(event.uid)
        chunk.picked[chunk.picked.index("")] = event.uid
        self._assign(event.uid)
        self.changed.add(CHUNKS)

    @_apply.register
    def _(self, event: q.TrainBegun) -> None:
        data = self.data
        data.train_key, data.train_incarnation = event.key, event.incarnation
        self._return_chunks()
        if event.step < data.version:
            # Groups of the lost branch: their policy versions will be other weights.
            lost = [
                uid
                for uid, group in data.groups.items()
                if max(group.engine_version, group.newest_version) > event.step
            ]
            self._end_groups(lost, "rollback")
            self._mark_lost(event.step)
            self._discard_partials(lambda partial: partial.newest_version > event.step)
            self.ledger.dispatch_again(self.ledger.untrain(event.step), "rollback", is_first=True)
        elif event.step > data.version:
            self._end_groups(list(data.groups), "version_jump")
        data.version = event.step
        data.last_summary = None
        data.evals_finished = [v for v in data.evals_finished if v <= event.step]
        data.eval_claims = {v: c for v, c in data.eval_claims.items() if v <= event.step}
        self.changed |= {SLOTS, READY, CHUNKS}

    @_apply.register
    def _(self, event: q.LedgerRestored) -> None:
        data = self.data
        data.chunks, data.num_assigned = [], 0
        for uid in list(data.groups):
            self._remove_group(uid)
        self._discard_partials(lambda _: True)
        data.version = event.step
        self.ledger.restore(event.ledger)
        for partial in data.ledger.partials.values():
            self.blocks.use(partial.block)
        self.changed |= {SLOTS, READY, CHUNKS}

    @_apply.register
    def _(self, event: q.StepCompleted) -> None:
        data = self.data
        uids = [uid for chunk in data.chunks for uid in chunk.picked]
        self.ledger.train(event.step, [data.groups[uid].ticket for uid in uids])
        count_trained(data.histograms, event.summary)
        for uid in uids:
            self._remove_group(uid)
        data.chunks, data.num_assigned = [], 0
        data.version = event.step + 1
        data.last_summary = event.summary
        self.changed |= {SLOTS, READY, CHUNKS}

    @_apply.register
    def _(self, event: q.ExtentsRemoved) -> None:
        for name in event.names:
            self.blocks.forget_extent(name)

    @_apply.register
    def _(self, event: q.EvalClaimed) -> None:
        self.data.eval_claims[event.version] = event.client

    @_apply.register
    def _(self, event: q.EvalFinished) -> None:
        if event.version not in self.data.evals_finished:
            self.data.evals_finished.append(event.version)
        self.data.eval_claims.pop(event.version, None)

    # -- parts of events ----------------------------------------------------------------------

    def _put(self, info: GroupInfo, block: BlockRef, at: float) -> None:
        uid, rows = info.uid, info.rows
        group = self.data.groups[uid]
        group.rows, group.put_at = rows, at
        group.oldest_version, group.newest_version = info.oldest_version, info.newest_version
        group.num_tokens = sum(rows.num_tokens)
        group.blocks.append(block)
        if group.partial is not None:
            self._set_partial(group, None)
        group.phase = _WAITING
        for task in self.task_fields:
            samples = list(range(len(rows.num_tokens)))
            group.missing[task] = samples
            self.pending[task][uid] = samples.copy()
            self.changed.add(rows_signal(task))
        self._check_ready(uid, group)

    def _lose_producer(self, role: str, index: int, last_incarnation: int) -> None:
        """Dispatch again what incarnations up to `last_incarnation` had not put."""
        lost = [
            uid
            for uid, group in self.data.groups.items()
            if group.phase is q.Phase.GENERATING
            and (group.role, group.index) == (role, index)
            and group.incarnation <= last_incarnation
        ]
        self._end_groups(lost, "producer_lost")

    def _mark_lost(self, step: int) -> None:
        """Versions > `step` will be other weights: what was generated with the old ones is lost."""
        for group in self.data.groups.values():
            if group.phase is q.Phase.GENERATING:
                group.lost_after = step if group.lost_after < 0 else min(group.lost_after, step)
                if group.partial is not None and group.partial.newest_version > step:
                    self._set_partial(group, None)

    def _check_ready(self, uid: str, group: q.Group) -> None:
        if group.phase is _WAITING and not any(group.missing.values()):
            group.phase = _READY
            self.data.ready_count += 1
            group.ready_order = self.data.ready_count
            self.window.set_ready(uid, group.deadline)
            self.changed.add(READY)

    def _assign(self, uid: str) -> None:
        group = self.data.groups[uid]
        self.window.remove(uid, group.deadline)
        group.phase = _ASSIGNED
        self.data.num_assigned += 1

    def _return_chunks(self) -> None:
        """Chunks of a train step that did not complete: payload is still there, deliver again."""
        for group in self.data.groups.values():
            if group.phase is q.Phase.ASSIGNED:
                group.phase = q.Phase.READY
                self.window.add(group.deadline)
        self.data.chunks, self.data.num_assigned = [], 0
        self.window.reset_ready()
        ready = [g for g in self.data.groups.values() if g.phase is q.Phase.READY]
        for group in sorted(ready, key=lambda g: g.ready_order):
            self.window.set_ready(group.ticket.uid, group.deadline)

    def _end_groups(self, uids: Iterable[str], reason: str) -> None:
        """Dispatch the prompts of groups again; a place in a chunk becomes a hole."""
        tickets: list[Ticket] = []
        partials: dict[tuple[int, int], Partial] = {}
        for uid in uids:
            group = self.data.groups[uid]
            ticket = group.ticket
            tickets.append(ticket)
            if group.partial is not None:
                partials[(ticket.epoch, ticket.prompt_index)] = group.partial
                self.blocks.use(group.partial.block)
            if group.phase is q.Phase.ASSIGNED:
                self._make_hole(uid)
            count_ended(self.data.histograms, reason, group.rows, ())
            self._remove_group(uid)
        for ticket in self.ledger.dispatch_again(tickets, reason, is_first=False):
            partial = partials.pop((ticket.epoch, ticket.prompt_index), None)
            if partial is not None:
                self.data.ledger.partials[ticket.uid] = partial
        for partial in partials.values():
            self._release(partial.block)

    def _set_partial(self, group: q.Group, partial: Partial | None) -> None:
        if partial is not None:
            self.blocks.use(partial.block)
        if group.partial is not None:
            self._release(group.partial.block)
        group.partial = partial

    def _discard_partials(self, is_bad: Callable[[Partial], bool]) -> None:
        """Release saved tokens of prompts that wait for their next dispatch."""
        partials = self.data.ledger.partials
        for uid in [uid for uid, partial in partials.items() if is_bad(partial)]:
            self._release(partials.pop(uid).block)

    def _make_hole(self, uid: str) -> None:
        for chunk in self.data.chunks:
            for dp_rank, share in enumerate(chunk.shares):
                if uid in share:
                    share.remove(uid)
                    chunk.holes.append(dp_rank)
                    chunk.picked[chunk.picked.index(uid)] = ""

    def _remove_group(self, uid: str) -> None:
        group = self.data.groups.pop(uid)
        if group.phase is q.Phase.ASSIGNED:
            self.data.num_assigned -= 1
        else:
            self.window.remove(uid, group.deadline)
        for pending in self.pending.values():
            pending.pop(uid, None)
        for block in group.blocks:
            self._release(block)
        self._set_partial(group, None)
        self.changed |= {SLOTS, READY}

    def _use(self, group: q.Group, block: BlockRef) -> None:
        group.blocks.append(block)
        self.blocks.use(block)

    def _release(self, block: BlockRef) -> None:
        arena = self.blocks.release(block)
        if arena is not None:
            self.changed.add(free_signal(arena))

    def _end_leases(self, group: q.Group, task: str, samples: set[int]) -> None:
        """Nobody needs to work on these rows any more."""
        leases = group.leased.get(task, {})
        for client in list(leases):
            leases[client] = [s for s in leases[client] if s not in samples]
            if not leases[client]:
                del leases[client]
        left = [s for s in self.pending[task].get(group.ticket.uid, ()) if s not in samples]
        if left:
            self.pending[task][group.ticket.uid] = left
        else:
            self.pending[task].pop(group.ticket.uid, None)

    def _release_client(self, role: str, index: int) -> None:
        """Leases and claims of a process that is gone go back."""
        prefix = f"{role}/{index}/"
        for uid, group in self.data.groups.items():
            for task, leases in group.leased.items():
                for client in [c for c in leases if c.startswith(prefix)]:
                    rows = self.pending[task].get(uid, []) + leases.pop(client)
                    self.pending[task][uid] = sorted(rows)
                    self.changed.add(rows_signal(task))
        claims = self.data.eval_claims
        for version in [v for v, client in claims.items() if client.startswith(prefix)]:
            del claims[version]
        for grants in (self.data.admissions, self.data.takes):
            for client in [c for c in grants if c.startswith(prefix)]:
                del grants[client]
        self.changed.add(SLOTS)


_dispatch = vars(QueueState)["_apply"].dispatcher.dispatch
"""What singledispatchmethod looks up in each call, without the wrapper that it makes each time."""
