"""The queue's state machine: events change it, nothing else does. No clock, no sockets.

`apply` is used live and in replay. The controller decides (queue_rules.py), applies the event and
journals it; a restarted controller applies the journal and stands where the old one stood.
"""

import collections
import functools
from collections.abc import Iterable

from relax_hpc.errors import TransferError
from relax_hpc.transfer import queue_data as q
from relax_hpc.transfer.ledger import Ledger, Ticket
from relax_hpc.transfer.samplers import Window
from relax_hpc.transfer.wire import Segment, Slot

RowKey = tuple[str, int]

SLOTS, ROWS, CHUNKS, GARBAGE = "slots", "rows", "chunks", "garbage"
"""What waiting requests wait for; `QueueState.changed` collects what an event touched."""


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
        self.ledger = Ledger(data.ledger, seed, is_shuffled)
        self.window = Window(groups_per_step)
        self.changed: set[str] = set()
        self.pending: dict[str, dict[RowKey, None]] = {task: {} for task in task_fields}
        """Rows that a task can take, in order of completion."""
        self._segment_users: collections.Counter[str] = collections.Counter()
        for group in sorted(data.groups.values(), key=lambda g: g.ready_order):
            self._index_group(group)

    def _index_group(self, group: q.Group) -> None:
        if group.phase is not q.Phase.ASSIGNED:
            self.window.add(group.deadline)
        if group.phase is q.Phase.READY:
            self.window.set_ready(group.ticket.uid, group.deadline)
        for segment in group.segments:
            self._segment_users[segment.name] += 1
        for task, name in self.task_fields.items():
            uid = group.ticket.uid
            for sample in sorted(group.missing.get(name, ())):
                if q.lease_key(task, uid, sample) not in self.data.leases:
                    self.pending[task][(uid, sample)] = None

    # -- events -------------------------------------------------------------------------------

    def apply(self, event: q.Event) -> None:
        """Change the state by one event."""
        self._apply(event)

    @functools.singledispatchmethod
    def _apply(self, event: q.Event) -> None:
        raise TransferError(f"journal holds an event of unknown type {type(event).__name__}")

    @_apply.register
    def _(self, event: q.AttemptBegun) -> None:
        data = self.data
        self._end_groups(list(data.groups), "attempt")
        data.attempt, data.train_incarnation = event.attempt, 0
        data.chunks, data.num_assigned = [], 0
        data.admissions, data.takes, data.eval_claims = {}, {}, {}
        data.leases, data.garbage = {}, {}

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
        self.data.ledger.num_prompts = event.num_prompts
        self.data.ledger.fingerprint = event.fingerprint
        self.changed.add(SLOTS)

    @_apply.register
    def _(self, event: q.Admitted) -> None:
        self.ledger.advance(len(event.tickets), event.num_again)
        slots = []
        for ticket in event.tickets:
            self.data.groups[ticket.uid] = q.Group(
                ticket=ticket,
                engine_version=event.engine_version,
                deadline=event.deadline,
                role=event.role,
                index=event.index,
                incarnation=event.incarnation,
            )
            self.window.add(event.deadline)
            slots.append(Slot(ticket.uid, ticket.prompt_index, ticket.epoch, event.deadline))
        self.data.admissions[event.client] = q.Grant(event.key, slots=slots)

    @_apply.register
    def _(self, event: q.GroupPut) -> None:
        group = self.data.groups[event.uid]
        group.rows, group.oldest_version = event.rows, event.oldest_version
        group.num_tokens = sum(row.num_tokens for row in event.rows)
        self._use_segment(group, event.segment)
        samples = [row.sample_index for row in event.rows]
        group.missing = {name: set(samples) for name in self.task_fields.values()}
        for task in self.task_fields:
            self.pending[task].update({(event.uid, sample): None for sample in samples})
            self.changed.add(ROWS)
        group.phase = q.Phase.WAITING
        self._check_ready(group)

    @_apply.register
    def _(self, event: q.FieldsPut) -> None:
        tasks = [task for task, name in self.task_fields.items() if name == event.name]
        users = set()
        for uid, sample in event.rows:
            group = self.data.groups.get(uid)
            if group is None or sample not in group.missing.get(event.name, ()):
                continue
            group.missing[event.name].discard(sample)
            users.add(uid)
            for task in tasks:
                self.pending[task].pop((uid, sample), None)
                self.data.leases.pop(q.lease_key(task, uid, sample), None)
        for uid in sorted(users):
            self._use_segment(self.data.groups[uid], event.segment)
            self._check_ready(self.data.groups[uid])

    @_apply.register
    def _(self, event: q.GroupDropped) -> None:
        self._remove_group(event.uid)
        self.ledger.drop(event.reason)

    @_apply.register
    def _(self, event: q.DispatchedAgain) -> None:
        self._end_groups(event.uids, event.reason)

    @_apply.register
    def _(self, event: q.RowsTaken) -> None:
        for uid, sample in event.rows:
            self.pending[event.task].pop((uid, sample), None)
            self.data.leases[q.lease_key(event.task, uid, sample)] = event.client
        self.data.takes[event.client] = q.Grant(event.key, rows=event.rows)

    @_apply.register
    def _(self, event: q.ChunkDecided) -> None:
        self.data.chunks.append(q.Chunk([list(share) for share in event.shares]))
        for share in event.shares:
            for uid in share:
                self._assign(uid)
        self.changed.add(CHUNKS)

    @_apply.register
    def _(self, event: q.HoleFilled) -> None:
        chunk = self.data.chunks[event.chunk]
        chunk.holes.remove(event.dp_rank)
        chunk.shares[event.dp_rank].append(event.uid)
        self._assign(event.uid)
        self.changed.add(CHUNKS)

    @_apply.register
    def _(self, event: q.TrainBegun) -> None:
        data = self.data
        data.train_key, data.train_incarnation = event.key, event.incarnation
        self._return_chunks()
        if event.step < data.version:
            # Groups of the lost branch: their policy versions will be other weights.
            lost = [u for u, g in data.groups.items() if g.engine_version > event.step]
            self._end_groups(lost, "rollback")
            self.ledger.dispatch_again(self.ledger.untrain(event.step), "rollback", is_first=True)
        elif event.step > data.version:
            self._end_groups(list(data.groups), "version_jump")
        data.version = event.step
        data.last_summary = None
        data.evals_finished = [v for v in data.evals_finished if v <= event.step]
        data.eval_claims = {v: c for v, c in data.eval_claims.items() if v <= event.step}
        self.changed |= {SLOTS, CHUNKS}

    @_apply.register
    def _(self, event: q.StepCompleted) -> None:
        data = self.data
        uids = [uid for chunk in data.chunks for share in chunk.shares for uid in share]
        self.ledger.train(event.step, uids)
        for uid in uids:
            self._remove_group(uid)
        data.chunks, data.num_assigned = [], 0
        data.version = event.step + 1
        data.last_summary = event.summary
        self.changed |= {SLOTS, CHUNKS}

    @_apply.register
    def _(self, event: q.EvalClaimed) -> None:
        self.data.eval_claims[event.version] = event.client

    @_apply.register
    def _(self, event: q.EvalFinished) -> None:
        if event.version not in self.data.evals_finished:
            self.data.evals_finished.append(event.version)
        self.data.eval_claims.pop(event.version, None)

    # -- parts of events ----------------------------------------------------------------------

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

    def _check_ready(self, group: q.Group) -> None:
        if group.phase is q.Phase.WAITING and not any(group.missing.values()):
            group.phase = q.Phase.READY
            self.data.ready_count += 1
            group.ready_order = self.data.ready_count
            self.window.set_ready(group.ticket.uid, group.deadline)
            self.changed.add(CHUNKS)

    def _assign(self, uid: str) -> None:
        group = self.data.groups[uid]
        self.window.remove(uid, group.deadline)
        group.phase = q.Phase.ASSIGNED
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
        for uid in uids:
            tickets.append(self.data.groups[uid].ticket)
            if self.data.groups[uid].phase is q.Phase.ASSIGNED:
                self._make_hole(uid)
            self._remove_group(uid)
        self.ledger.dispatch_again(tickets, reason, is_first=False)

    def _make_hole(self, uid: str) -> None:
        for chunk in self.data.chunks:
            for dp_rank, share in enumerate(chunk.shares):
                if uid in share:
                    share.remove(uid)
                    chunk.holes.append(dp_rank)

    def _remove_group(self, uid: str) -> None:
        group = self.data.groups.pop(uid)
        if group.phase is q.Phase.ASSIGNED:
            self.data.num_assigned -= 1
        else:
            self.window.remove(uid, group.deadline)
        for task in self.task_fields:
            for row in group.rows:
                self.pending[task].pop((uid, row.sample_index), None)
                self.data.leases.pop(q.lease_key(task, uid, row.sample_index), None)
        for segment in group.segments:
            self._release_segment(segment)
        self.changed |= {SLOTS, CHUNKS}

    def _use_segment(self, group: q.Group, segment: Segment) -> None:
        group.segments.append(segment)
        self._segment_users[segment.name] += 1

    def _release_segment(self, segment: Segment) -> None:
        self._segment_users[segment.name] -= 1
        if not self._segment_users[segment.name]:
            del self._segment_users[segment.name]
            self.data.garbage.setdefault(segment.node, set()).add(segment.name)
            self.changed.add(GARBAGE)

    def has_segment(self, name: str) -> bool:
        """True while a group in flight uses the segment."""
        return name in self._segment_users

    def _release_client(self, role: str, index: int) -> None:
        """Leases and claims of a process that is gone go back."""
        prefix = f"{role}/{index}/"
        for key in [k for k, client in self.data.leases.items() if client.startswith(prefix)]:
            del self.data.leases[key]
            task, uid, sample = key.split(" ")
            self.pending[task][(uid, int(sample))] = None
            self.changed.add(ROWS)
        claims = self.data.eval_claims
        for version in [v for v, client in claims.items() if client.startswith(prefix)]:
            del claims[version]
        for grants in (self.data.admissions, self.data.takes):
            for client in [c for c in grants if c.startswith(prefix)]:
                del grants[client]
        self.changed.add(SLOTS)
