"""The queue controller: service `transfer`. One asyncio loop; metadata only.

request -> rules (decide) -> events -> state (apply) + journal (append) -> reply when on disk
                                          |
                                          +-> wakes requests that wait for what changed:
   admit waits for slots       <- a step completed, a group dropped, a rollback
   take_rows waits for rows    <- a group was put, a lease returned
   take_chunk waits for chunks <- a group became ready, a step completed
   collect_free waits          <- the last group that used a block is gone
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from relax_hpc.control.identity import SUPERVISOR, Identity
from relax_hpc.control.journal import GenerationalJournal, GroupCommit
from relax_hpc.control.rpc import Caller, Empty, RpcServer
from relax_hpc.errors import ControlError
from relax_hpc.log import kv
from relax_hpc.transfer import queue_data as q
from relax_hpc.transfer import wire
from relax_hpc.transfer.ledger_cut import cut_ledger
from relax_hpc.transfer.queue_rules import QueueRules, QueueRulesConfig, client_of
from relax_hpc.transfer.queue_state import CHUNKS, READY, ROWS, SLOTS, free_signal

logger = logging.getLogger(__name__)

_ROTATE_EVENTS = 100_000
"""Start a new journal file after so many events: a restart replays at most these."""

Reply = TypeVar("Reply")


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
        self._num_rotated = 0
        self._signals: dict[str, asyncio.Event] = {}
        server.on_start(self._restore)
        server.on_newer(self._see)
        self._register()

    def _register(self) -> None:
        register = self._server.register
        register("open_dataset", wire.OpenDataset, self._open_dataset)
        register("admit", wire.Admit, self._admit)
        register("put_groups", wire.PutGroups, self._put_groups)
        register("save_partial", wire.SavePartial, self._save_partial)
        register("put_fields", wire.PutFields, self._put_fields)
        for name in ("drop_group", "return_group", "reject_group"):
            register(name, wire.EndGroup, self._end_group(name))
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
        lines = self._journal.read()
        first = next(lines, None)
        data = q.QueueData() if first is None else msgspec.json.decode(first, type=q.QueueData)
        state = self._config.new_state(data)
        num_events = 0
        for num_events, line in enumerate(lines, start=1):  # noqa: B007 - logged below
            state.apply(msgspec.json.decode(line, type=q.AnyEvent))
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
        state = self._rules.state
        for event in events:
            self._commit.append(event)
            state.apply(event)
        if CHUNKS in state.changed:
            state.changed.add(READY)
        for name in state.changed:
            signal = self._signals.pop(name, None)
            if signal is not None:
                signal.set()
        state.changed.clear()

    async def _durable(self) -> None:
        try:
            await self._commit.flushed()
        except ControlError as err:
            self._server.fail(err)  # the state in memory is ahead of the journal
            raise

    async def _wait(
        self, name: str, wait_s: float, ask: Callable[[], Awaitable[Reply | None]]
    ) -> Reply | None:
        """Ask again whenever `name` changed, until there is an answer or the time is over."""
        deadline = time.monotonic() + wait_s
        while True:
            signal = self._signals.setdefault(
                name, asyncio.Event()
            )  # taken before asking: no change is missed
            answer = await ask()
            left_s = deadline - time.monotonic()
            if answer is not None or left_s <= 0:
                return answer
            try:
                await asyncio.wait_for(signal.wait(), left_s)
            except TimeoutError:
                return await ask()

    # -- rollout ------------------------------------------------------------------------------

    async def _open_dataset(self, caller: Caller, request: wire.OpenDataset) -> None:
        self._apply(self._rules.open_dataset(request))
        await self._durable()

    async def _admit(self, caller: Caller, request: wire.Admit) -> wire.Admitted:
        async def ask() -> wire.Admitted | None:
            grant = self._rules.state.data.admissions.get(client_of(caller))
            if grant is None or grant.key != request.key:
                event = self._rules.admit(caller, request)
                if event is None and self._rules.is_done:
                    await self._durable()
                    return wire.Admitted([], True)
                if event is None:
                    return None
                self._apply([event])
                grant = self._rules.state.data.admissions[client_of(caller)]
            await self._durable()
            return wire.Admitted(grant.slots, False)

        reply = await self._wait(SLOTS, request.wait_s, ask)
        return wire.Admitted([], False) if reply is None else reply

    async def _put_groups(self, caller: Caller, request: wire.PutGroups) -> wire.StoredGroups:
        results, now = [], time.time()
        for group in request.groups:
            reply, events = self._rules.put_group(group, now)
            self._apply(events)
            results.append(reply)
        await self._durable()
        return wire.StoredGroups(results)

    async def _save_partial(self, caller: Caller, request: wire.SavePartial) -> wire.Stored:
        reply, events = self._rules.save_partial(request)
        self._apply(events)
        await self._durable()
        return reply

    async def _put_fields(self, caller: Caller, request: wire.PutFields) -> wire.Stored:
        reply, events = self._rules.put_fields(request)
        self._apply(events)
        await self._durable()
        return reply

    def _end_group(self, name: str) -> Callable[[Caller, wire.EndGroup], Awaitable[None]]:
        async def handler(caller: Caller, request: wire.EndGroup) -> None:
            rules = self._rules
            decide = {
                "drop_group": rules.drop_group,
                "return_group": rules.return_group,
                "reject_group": rules.reject_group,
            }[name]
            events = decide(request)
            if events and name == "reject_group":
                logger.warning("unreadable %s", kv(uid=request.uid, reason=request.reason))
            self._apply(events)
            await self._durable()

        return handler

    # -- ref, logprob -------------------------------------------------------------------------

    async def _take_rows(self, caller: Caller, request: wire.TakeRows) -> wire.TakenRows:
        async def ask() -> wire.TakenRows | None:
            grant = self._rules.state.data.takes.get(client_of(caller))
            if grant is None or grant.key != request.key:
                event = self._rules.take_rows(caller, request)
                if event is None:
                    return None
                self._apply([event])
                grant = self._rules.state.data.takes[client_of(caller)]
            await self._durable()
            return self._rules.rows_reply(grant.rows)

        reply = await self._wait(ROWS, request.wait_s, ask)
        return wire.TakenRows([]) if reply is None else reply

    # -- train --------------------------------------------------------------------------------

    async def _begin_train(self, caller: Caller, request: wire.BeginTrain) -> None:
        before = self._rules.state.data.version
        events = self._rules.begin_train(caller, request)
        self._apply(events)
        await self._durable()
        if events:
            logger.info("train begins %s", kv(step=request.step, version_before=before))

    async def _take_chunk(self, caller: Caller, request: wire.TakeChunk) -> wire.TakenChunk:
        async def ask() -> wire.TakenChunk | None:
            while events := self._rules.decide_chunk(caller, request):
                self._apply(events)
            reply = self._rules.chunk_reply(caller, request)
            if reply is not None:
                await self._durable()
            return reply

        reply = await self._wait(READY, request.wait_s, ask)
        return wire.TakenChunk(None) if reply is None else reply

    async def _cut_ledger(self, caller: Caller, request: wire.CutLedger) -> wire.LedgerCut:
        cut = cut_ledger(self._rules.state.data, request.step)
        await self._durable()
        return cut

    async def _complete_step(self, caller: Caller, request: wire.CompleteStep) -> wire.StepSummary:
        self._apply(self._rules.complete_step(caller, request))
        summary = self._rules.state.data.last_summary
        await self._durable()
        await self._rotate()
        assert summary is not None
        return summary

    async def _rotate(self) -> None:
        if self._commit.num_appended - self._num_rotated >= _ROTATE_EVENTS:
            self._num_rotated = self._commit.num_appended
            await self._commit.rotate(lambda: self._rules.state.data)

    # -- evaluation and state -----------------------------------------------------------------

    async def _claim_eval(self, caller: Caller, request: wire.Version) -> wire.Answer:
        answer, events = self._rules.claim_eval(caller, request.version)
        self._apply(events)
        await self._durable()
        return wire.Answer(answer)

    async def _finish_eval(self, caller: Caller, request: wire.Version) -> None:
        self._apply([q.EvalFinished(request.version)])
        await self._durable()

    async def _evals_pending(self, caller: Caller, request: Empty) -> wire.Versions:
        return wire.Versions(self._rules.evals_pending())

    async def _release_producer(self, caller: Caller, request: wire.Producer) -> None:
        self._apply([q.ProducerLost(request.role, request.index, request.incarnation)])
        await self._durable()

    async def _status(self, caller: Caller, request: Empty) -> wire.QueueStatus:
        return self._rules.status(time.time())

    # -- node agents --------------------------------------------------------------------------

    async def _collect_free(self, caller: Caller, request: wire.CollectFree) -> wire.Freed:
        self._rules.state.blocks.acknowledge(request.arena, request.acked)

        async def ask() -> wire.Freed | None:
            found = sorted(self._rules.state.blocks.free_of(request.arena))
            await self._durable()  # a block is reused only when its end is on disk
            return wire.Freed(found) if found else None

        reply = await self._wait(free_signal(request.arena), request.wait_s, ask)
        return wire.Freed([]) if reply is None else reply

    async def _find_orphans(self, caller: Caller, request: wire.FindOrphans) -> wire.Orphans:
        blocks = self._rules.state.blocks
        names = [name for name in request.names if not blocks.has_extent(name)]
        for name in names:
            blocks.forget_extent(name)
        await self._durable()
        return wire.Orphans(names)
