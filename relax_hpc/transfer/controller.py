"""The queue controller: service `transfer`. One asyncio loop; metadata only.

A turn of the loop: every request that has arrived is decided, then those that wait and can go on,
then the journal is written once for all of them. A reply leaves when its events are on disk.

request -> rules (decide) -> events -> journal (append) + state (apply)
                                                          |
                                          wakes requests that wait for what changed:
   admit waits for slots       <- a step completed, a group dropped, a rollback
   take_rows waits for rows    <- a group was put, a lease returned
   take_chunk waits for chunks <- a group became ready, a step completed
   collect_free waits          <- the last group that used a block is gone

Only take_rows answers before the disk does: a lease that is lost with the controller costs work
that is done twice, never a row (put_fields accepts one result).
take_chunk is told early what its answer will be, and maps the rows while the journal is written;
its caller gets them with the answer, when the decision is on disk.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from relax_hpc.control.group_commit import Done, GroupCommit
from relax_hpc.control.identity import SUPERVISOR, Identity
from relax_hpc.control.journal import GenerationalJournal, encode_line
from relax_hpc.control.rpc import Caller, Empty, Responder, RpcServer
from relax_hpc.errors import ControlError, RelaxError
from relax_hpc.log import kv
from relax_hpc.transfer import queue_data as q
from relax_hpc.transfer import wire
from relax_hpc.transfer.ledger_cut import cut_ledger
from relax_hpc.transfer.queue_rules import QueueRules, QueueRulesConfig, client_of
from relax_hpc.transfer.queue_state import CHUNKS, READY, SLOTS, free_signal, rows_signal
from relax_hpc.transfer.waiting_room import Waiter, WaitingRoom

logger = logging.getLogger(__name__)

_ROTATE_EVENTS = 100_000
"""Start a new journal file after so many events, puts of groups counted singly: a restart replays
at most these."""


class QueueController:
    """Wire rules, state and journal to a server. Then run the server."""

    def __init__(self, server: RpcServer, identity: Identity, config: QueueRulesConfig) -> None:
        self._server = server
        self._identity = identity
        self._config = config
        self._rules = QueueRules(config, config.new_state(q.QueueData()))
        self._journal = GenerationalJournal(
            identity.run.journal, wire.SERVICE, identity.attempt, identity.incarnation
        )
        self._commit = GroupCommit(self._journal)
        self._num_events = 0
        """Since the journal file began."""
        self._room = WaitingRoom()
        self._last: list[Done] = []
        server.on_start(self._restore)
        server.on_newer(self._see)
        server.on_drained(self._settle)
        server.on_stop(self._commit.close)
        self._register()

    def _register(self) -> None:
        register = self._server.register_direct
        register("open_dataset", wire.OpenDataset, self._open_dataset)
        register("admit", wire.Admit, self._admit)
        register("put_groups", wire.PutGroups, self._put_groups)
        register("save_partial", wire.SavePartial, self._save_partial)
        register("put_fields", wire.PutFields, self._put_fields)
        register("drop_group", wire.EndGroup, self._drop_group)
        register("return_group", wire.EndGroup, self._return_group)
        register("reject_group", wire.EndGroup, self._reject_group)
        register("take_rows", wire.TakeRows, self._take_rows)
        register("begin_train", wire.BeginTrain, self._begin_train)
        register("take_chunk", wire.TakeChunk, self._take_chunk)
        register("cut_ledger", wire.CutLedger, self._cut_ledger)
        register("complete_step", wire.CompleteStep, self._complete_step)
        register("claim_eval", wire.Version, self._claim_eval)
        register("finish_eval", wire.Version, self._finish_eval)
        register("evals_pending", Empty, self._evals_pending)
        register("release_producer", wire.Producer, self._release_producer)
        register("status", Empty, self._status)
        register("collect_free", wire.CollectFree, self._collect_free)
        register("find_orphans", wire.FindOrphans, self._find_orphans)

    # -- state and journal --------------------------------------------------------------------

    async def _restore(self) -> None:
        num_events, data = 0, q.QueueData()
        state = self._config.new_state(data)
        try:
            lines = self._journal.read()
            first = next(lines, None)
            if first is not None:
                data = msgspec.json.decode(first, type=q.QueueData)
                state = self._config.new_state(data)
            decoder = msgspec.json.Decoder(q.AnyEvent)
            for num_events, line in enumerate(lines, start=1):  # noqa: B007 - logged below
                state.apply(decoder.decode(line))
        except msgspec.DecodeError as err:
            raise ControlError(
                f"the queue's journal in {self._identity.run.journal} is of another version of "
                f"relax_hpc ({err}): go on with that version, or start a new run with run.init_from"
            ) from err
        if data.attempt < self._identity.attempt:
            state.apply(q.AttemptBegun(self._identity.attempt))
        state.changed.clear()
        self._rules = QueueRules(self._config, state)
        self._journal.start(data)
        for name, (attempt, incarnation) in data.callers.items():
            role, index = name.split("/")
            self._server.seed_incarnation(role, int(index), attempt, incarnation)
        logger.info(
            "queue restored %s",
            kv(version=data.version, in_flight=len(data.groups), events=num_events),
        )

    def _see(self, caller: Caller) -> None:
        known = self._rules.state.data.callers.get(f"{caller.role}/{caller.index}", (0, 0))
        if caller.role != SUPERVISOR and (caller.attempt, caller.incarnation) > known:
            self._apply(
                [q.CallerSeen(caller.role, caller.index, caller.attempt, caller.incarnation)]
            )

    def _apply(self, events: Sequence[q.Event]) -> None:
        state, commit = self._rules.state, self._commit
        for event in events:
            line = encode_line(event)  # before it is applied: the state may keep parts of it
            state.apply_but_count(event)
            commit.append_line(line)
            self._num_events += len(event.groups) if isinstance(event, q.GroupsPut) else 1

    def _reply(self, responder: Responder, reply: msgspec.Struct | None) -> None:
        """Answer when everything decided so far is on disk; rendered now, the state goes on."""
        self._commit.when_durable(self._sender(responder, reply))

    def _reply_last(self, responder: Responder, reply: msgspec.Struct) -> None:
        """Answer a put: after those who waited for it, who are the ones in a hurry."""
        self._last.append(self._sender(responder, reply))

    def _reply_early(self, responder: Responder, reply: msgspec.Struct) -> None:
        """Like `_reply`, but what it will be goes out now: the caller prepares for it meanwhile."""
        body = msgspec.msgpack.encode(reply)
        if self._commit.is_durable:
            responder.send_encoded(body)
        else:
            responder.send_early(body)
            self._commit.when_durable(self._ender(responder, responder.confirm))

    def _sender(self, responder: Responder, reply: msgspec.Struct | None) -> Done:
        body = msgspec.msgpack.encode(Empty() if reply is None else reply)
        return self._ender(responder, lambda: responder.send_encoded(body))

    def _ender(self, responder: Responder, send: Callable[[], None]) -> Done:
        def end(failure: ControlError | None) -> None:
            if failure is None:
                send()
            else:
                responder.fail(failure)
                self._server.fail(failure)  # the state in memory is ahead of the journal

        return end

    def _settle(self) -> None:
        """At the end of a turn: let go on who can, write, and then do what can wait."""
        state = self._rules.state
        while state.changed:
            names, state.changed = state.changed, set()
            for name in sorted(names):
                self._wake(name)
        last, self._last = self._last, []
        for done in last:
            self._commit.when_durable(done)
        if self._num_events >= _ROTATE_EVENTS:
            self._num_events = 0
            self._commit.rotate_soon(self._snapshot)
        self._commit.commit()
        state.count()

    def _snapshot(self) -> q.QueueData:
        self._rules.state.count()
        return self._rules.state.data

    # -- waiting ------------------------------------------------------------------------------

    def _wake(self, name: str) -> None:
        if name == READY:
            self._decide_chunks()
        elif name == CHUNKS:
            self._retry(CHUNKS, self._try_chunk)
        elif name == SLOTS:
            self._wake_admits()
        elif name.startswith("free"):
            self._retry(name, self._try_free)
        else:
            self._retry(name, self._try_rows)

    def _retry(self, signal: str, attempt: Callable[[Caller, Any, Responder], bool]) -> None:
        """Ask again for each waiter; where one cannot go on, the later ones cannot, either."""
        for waiter in self._room.waiting(signal):
            if not self._try(waiter, attempt) and signal != CHUNKS:
                break  # every rank has a share of its own

    def _try(self, waiter: Waiter, attempt: Callable[[Caller, Any, Responder], bool]) -> bool:
        try:
            is_answered = attempt(waiter.caller, waiter.request, waiter.responder)
        except RelaxError as err:
            waiter.responder.fail(err)
            is_answered = True
        if is_answered:
            self._room.leave(waiter)
        return is_answered

    def _wake_admits(self) -> None:
        blocked: set[int] = set()
        for waiter in self._room.waiting(SLOTS):
            version = waiter.request.engine_version
            if version not in blocked and not self._try(waiter, self._try_admit):
                blocked.add(version)

    def _decide_chunks(self) -> None:
        """Decide what can be decided for those who wait; CHUNKS then answers them."""
        asked: set[int] = set()
        for waiter in self._room.waiting(CHUNKS):
            if waiter.request.index not in asked:
                asked.add(waiter.request.index)
                self._try(waiter, self._try_decide)

    # -- rollout ------------------------------------------------------------------------------

    def _open_dataset(
        self, caller: Caller, request: wire.OpenDataset, responder: Responder
    ) -> None:
        events = self._rules.open_dataset(request)
        if events and self._rules.state.data.ledger.num_prompts:
            logger.warning("data set changed %s", kv(num_prompts=request.num_prompts))
        self._apply(events)
        self._reply(responder, None)

    def _admit(self, caller: Caller, request: wire.Admit, responder: Responder) -> None:
        if not self._try_admit(caller, request, responder):
            nothing = wire.Admitted([], False)
            self._room.enter(
                SLOTS, caller, request, responder, lambda w: self._reply(w.responder, nothing)
            )

    def _try_admit(self, caller: Caller, request: wire.Admit, responder: Responder) -> bool:
        client, admissions = client_of(caller), self._rules.state.data.admissions
        grant = admissions.get(client)
        if grant is None or grant.key != request.key:
            event = self._rules.admit(caller, request)
            if event is None and self._rules.is_done:
                self._reply(responder, wire.Admitted([], True))
                return True
            if event is None:
                return False
            self._apply([event])
            grant = admissions[client]
        self._reply(responder, wire.Admitted(grant.slots, False))
        return True

    def _put_groups(self, caller: Caller, request: wire.PutGroups, responder: Responder) -> None:
        results, events = self._rules.put_groups(request.groups, time.time())
        self._apply(events)
        self._reply_last(responder, wire.StoredGroups(results))

    def _save_partial(
        self, caller: Caller, request: wire.SavePartial, responder: Responder
    ) -> None:
        reply, events = self._rules.save_partial(request)
        self._apply(events)
        self._reply(responder, reply)

    def _put_fields(self, caller: Caller, request: wire.PutFields, responder: Responder) -> None:
        reply, events = self._rules.put_fields(request)
        self._apply(events)
        self._reply_last(responder, reply)

    def _drop_group(self, caller: Caller, request: wire.EndGroup, responder: Responder) -> None:
        self._apply(self._rules.drop_group(request))
        self._reply(responder, None)

    def _return_group(self, caller: Caller, request: wire.EndGroup, responder: Responder) -> None:
        self._apply(self._rules.return_group(request))
        self._reply(responder, None)

    def _reject_group(self, caller: Caller, request: wire.EndGroup, responder: Responder) -> None:
        events = self._rules.reject_group(request)
        if events:
            logger.warning("unreadable %s", kv(uid=request.uid, reason=request.reason))
        self._apply(events)
        self._reply(responder, None)

    # -- ref, logprob -------------------------------------------------------------------------

    def _take_rows(self, caller: Caller, request: wire.TakeRows, responder: Responder) -> None:
        if not self._try_rows(caller, request, responder):
            nothing = wire.TakenRows([])
            self._room.enter(
                rows_signal(request.task),
                caller,
                request,
                responder,
                lambda w: w.responder.send(nothing),
            )

    def _try_rows(self, caller: Caller, request: wire.TakeRows, responder: Responder) -> bool:
        client, takes = client_of(caller), self._rules.state.data.takes
        grant = takes.get(client)
        if grant is None or grant.key != request.key:
            event = self._rules.take_rows(caller, request)
            if event is None:
                return False
            self._apply([event])
            grant = takes[client]
        responder.send(self._rules.rows_reply(grant.rows))  # before it is on disk: see above
        return True

    # -- train --------------------------------------------------------------------------------

    def _begin_train(self, caller: Caller, request: wire.BeginTrain, responder: Responder) -> None:
        before = self._rules.state.data.version
        events = self._rules.begin_train(caller, request)
        self._apply(events)
        self._reply(responder, None)
        if events:
            is_restored = any(isinstance(event, q.LedgerRestored) for event in events)
            logger.info(
                "train begins %s",
                kv(step=request.step, version_before=before, ledger_restored=is_restored),
            )

    def _take_chunk(self, caller: Caller, request: wire.TakeChunk, responder: Responder) -> None:
        self._try_decide(caller, request, responder)
        if not self._try_chunk(caller, request, responder):
            nothing = wire.TakenChunk(None)
            self._room.enter(
                CHUNKS, caller, request, responder, lambda w: self._reply(w.responder, nothing)
            )

    def _try_decide(self, caller: Caller, request: wire.TakeChunk, responder: Responder) -> bool:
        while events := self._rules.decide_chunk(caller, request):
            self._apply(events)
        return False

    def _try_chunk(self, caller: Caller, request: wire.TakeChunk, responder: Responder) -> bool:
        reply = self._rules.chunk_reply(caller, request)
        if reply is not None:
            self._reply_early(responder, reply)
        return reply is not None

    def _cut_ledger(self, caller: Caller, request: wire.CutLedger, responder: Responder) -> None:
        self._reply(responder, cut_ledger(self._rules.state.data, request.step))

    def _complete_step(
        self, caller: Caller, request: wire.CompleteStep, responder: Responder
    ) -> None:
        self._apply(self._rules.complete_step(caller, request))
        summary = self._rules.state.data.last_summary
        assert summary is not None
        self._reply(responder, summary)

    # -- evaluation and state -----------------------------------------------------------------

    def _claim_eval(self, caller: Caller, request: wire.Version, responder: Responder) -> None:
        answer, events = self._rules.claim_eval(caller, request.version)
        self._apply(events)
        self._reply(responder, wire.Answer(answer))

    def _finish_eval(self, caller: Caller, request: wire.Version, responder: Responder) -> None:
        self._apply([q.EvalFinished(request.version)])
        self._reply(responder, None)

    def _evals_pending(self, caller: Caller, request: Empty, responder: Responder) -> None:
        responder.send(wire.Versions(self._rules.evals_pending()))

    def _release_producer(
        self, caller: Caller, request: wire.Producer, responder: Responder
    ) -> None:
        self._apply([q.ProducerLost(request.role, request.index, request.incarnation)])
        self._reply(responder, None)

    def _status(self, caller: Caller, request: Empty, responder: Responder) -> None:
        self._rules.state.count()
        responder.send(self._rules.status(time.time()))

    # -- arenas -------------------------------------------------------------------------------

    def _collect_free(
        self, caller: Caller, request: wire.CollectFree, responder: Responder
    ) -> None:
        self._rules.state.blocks.acknowledge(request.arena, request.acked)
        if not self._try_free(caller, request, responder):
            nothing = wire.Freed([])
            self._room.enter(
                free_signal(request.arena),
                caller,
                request,
                responder,
                lambda w: w.responder.send(nothing),
            )

    def _try_free(self, caller: Caller, request: wire.CollectFree, responder: Responder) -> bool:
        blocks = self._rules.state.blocks.free_of(request.arena)
        if blocks:  # a block is reused only when its end is on disk
            self._reply(responder, wire.Freed(sorted(blocks)))
        return bool(blocks)

    def _find_orphans(
        self, caller: Caller, request: wire.FindOrphans, responder: Responder
    ) -> None:
        names, events = self._rules.find_orphans(request.names)
        self._apply(events)
        self._reply(responder, wire.Orphans(names))
