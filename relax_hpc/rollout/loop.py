"""The rollout loop of one engine: weights in, slots in, groups out, evaluations between.

    loop       consumes             produces            waits for               woken by
    weights    a newer version      the engine's new    the weight service,     a commit
               (whole)              version; evals      its own evaluation
    admission  slots (with prompt)  a task per slot     room, a slot            a finished group,
                                                                                a train step, a new
                                                                                engine version
    group      a slot               n samples, or the   the engine, the reward  its requests
                                    slot with a reason

The weights loop evaluates in line: that is what pins the engine to the evaluated version, while
groups go on under it (admission grants them only as long as they can still be trained). All waits
for other steps are long-polls with deadlines in threads; a restart of the dcs step makes
them late, not wrong, since every call is idempotent.

The end: admission says done (all train steps complete) and no evaluation is pending. Groups that
still run are of no use then and are cancelled. Done is not final before that: a train step that
dies after its last update comes back with an older version, and needs groups again.
"""

import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import logging
import time
import typing
from collections.abc import Callable, Mapping, Sequence

from relax_hpc.config import Config
from relax_hpc.dcs.layout import HostTensor
from relax_hpc.dcs.store import VersionId
from relax_hpc.errors import (
    DeadlineError,
    EngineError,
    StaleIncarnationError,
    WeightSyncError,
)
from relax_hpc.log import kv
from relax_hpc.records import PromptSlot, Sample
from relax_hpc.rollout.engine import Engine
from relax_hpc.rollout.evaluation import evaluate
from relax_hpc.rollout.group import GroupMaker, GroupResult, Prompts, Verdict
from relax_hpc.rollout.tally import DropStreak, Tally

log = logging.getLogger(__name__)

_Result = typing.TypeVar("_Result")

POLL_S = 2.0
"""Length of one long-poll for slots."""
TICK_S = 2.0
"""Length of one long-poll for weights: also how soon the end and a freed evaluation are seen."""
GENERATION_FAILED = "generation_failed"
"""Reason of a group whose generation failed, as the queue counts it."""
_MAX_POLLS = 8
"""Admissions that wait at the same time, one per engine version of the last POLL_S seconds."""
_MAX_PROMPT_FAILURES = 3
"""Failed generations of one prompt before it is dropped: else a prompt that breaks engines would
be dispatched for ever."""
_MAX_FAILURES_IN_A_ROW = 16
"""Groups in a row that fail to generate before the step gives up and is restarted."""
TALLY_S = 30.0
"""Between two looks at the counts, in log, metrics and progress: also when no weights come."""
UNWANTED = "unwanted"
"""Reason of a group that was finished too late: the queue had dispatched its prompt again."""
_MAX_WEIGHT_FAILURES = 10
"""Updates in a row that fail (version vanished, engine refused) before the step gives up."""


class Admit(typing.Protocol):
    """`TransferQueue.admit`, callable by several threads at the same time."""

    def __call__(self, engine_version: int, max_groups: int, timeout_s: float) -> "Admission":
        """Ask for slots; none in time is an empty answer."""
        ...


class Admission(typing.Protocol):
    """Answer of `admit`."""

    @property
    def slots(self) -> Sequence[PromptSlot]:
        """Granted slots."""
        ...

    @property
    def done(self) -> bool:
        """All train steps are complete."""
        ...


class Memory(typing.Protocol):
    """What the loop tells of `transfer.ArenaStats`."""

    @property
    def used(self) -> int:
        """Bytes of groups that are put and not trained yet."""
        ...

    @property
    def blocked_s(self) -> float:
        """Time that puts waited for memory so far."""
        ...


class Queue(typing.Protocol):
    """What the loop uses of `transfer.TransferQueue`. Blocking, thread-safe."""

    def arena_stats(self) -> Memory | None:
        """Return the shared memory of what this engine put; None before the first put."""
        ...

    def put_group(self, slot: PromptSlot, samples: list[Sample]) -> bool:
        """Hand in a group; False: nobody wants it any more."""
        ...

    def drop_group(
        self, slot: PromptSlot, reason: str, response_tokens: Sequence[int] = ()
    ) -> None:
        """Free the slot; the prompt is used up."""
        ...

    def return_group(
        self, slot: PromptSlot, reason: str, response_tokens: Sequence[int] = ()
    ) -> None:
        """Free the slot; the prompt is dispatched again."""
        ...

    def claim_eval(self, version: int) -> bool:
        """Ask to be the one that runs an evaluation."""
        ...

    def finish_eval(self, version: int) -> None:
        """Tell that it is done."""
        ...

    def evals_pending(self) -> list[int]:
        """Versions whose evaluation is not finished, claimed ones included."""
        ...


class Archive(typing.Protocol):
    """What the loop uses of `transfer.GroupArchive`."""

    def offer(self, slot: PromptSlot, samples: list[Sample]) -> object:
        """Archive a group soon, or drop and count it; never blocks."""
        ...


class Weights(typing.Protocol):
    """What the loop uses of `dcs.WeightSubscriber`. Blocking, one call at a time."""

    def wait_newer(self, have: VersionId | None, timeout_s: float) -> VersionId | None:
        """Wait for a version newer than `have`."""
        ...

    def fetch(self, version: VersionId) -> Mapping[str, HostTensor]:
        """Read a whole, verified version."""
        ...


class Progress(typing.Protocol):
    """What the loop uses of `control.Membership`."""

    @property
    def is_replaced(self) -> bool:
        """A newer incarnation of this engine runs."""
        ...

    def report(self, **progress: int | float | str) -> None:
        """Note progress; never blocks."""
        ...


class Metrics(typing.Protocol):
    """What the loop uses of `metrics.MetricWriter`."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoopParts:
    """Everything that the loop talks to."""

    engine: Engine
    maker: GroupMaker
    queue: Queue
    admit: Admit
    weights: Weights
    progress: Progress
    metrics: Metrics
    train_prompts: Prompts
    eval_prompts: Prompts = ()
    archive: Archive | None = None


class RolloutLoop:
    """Drives one started engine until the run is done. Made and run once, on one asyncio loop."""

    def __init__(self, config: Config, parts: LoopParts) -> None:
        self._config, self._parts = config, parts
        self._max_groups = max_groups(config)
        self._tally = Tally()
        self._drop_streak = DropStreak(max(64, 4 * config.rollout.groups_per_step))
        self._version: VersionId | None = None
        self._version_changed = asyncio.Event()
        self._is_done = False
        self._groups: set[asyncio.Task[None]] = set()
        self._group_failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._prompt_failures: collections.Counter[int] = collections.Counter()
        self._failures_in_a_row = 0
        self._blocked_s = 0.0
        # Long-polls occupy a thread each: admissions, and the weights.
        self._threads = concurrent.futures.ThreadPoolExecutor(24, "rollout-call")
        # Puts wait while the arena is full: weights must come all the same.
        self._put_threads = concurrent.futures.ThreadPoolExecutor(8, "rollout-put")

    async def run(self) -> None:
        """Serve until all train steps and evaluations are complete.

        Raises:
            EngineError: the engine broke, or most of what it should generate fails.
            ControlError: the dcs step did not come back in time, or this step was replaced.
            WeightSyncError: no version could be loaded.
        """
        try:
            await self._load_first()
            admission = asyncio.create_task(self._keep_full())
            weights = asyncio.create_task(self._follow_weights())
            tally = asyncio.create_task(self._tell_regularly())
            try:
                # The weights loop ends when the run does, the other three only by failing.
                ends = [weights, admission, tally, self._group_failure]
                done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for end in done:
                    end.result()
            finally:
                await _cancel([admission, weights, tally, *self._groups])
            self._log_tally()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._put_threads.shutdown(wait=False, cancel_futures=True)

    async def _call(self, function: Callable[..., _Result], *args: object) -> _Result:
        """Run a blocking client call in a thread."""
        call = functools.partial(function, *args)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    # -- weights and evaluation -----------------------------------------------------------------

    async def _load_first(self) -> None:
        """Load a version before the first slot is asked for.

        Raises:
            DeadlineError: the train step published none in time.
        """
        deadline = time.monotonic() + self._config.recovery.progress_timeout_s
        while self._version is None:
            if time.monotonic() > deadline:
                raise DeadlineError(
                    "no weights were published within recovery.progress_timeout_s="
                    f"{self._config.recovery.progress_timeout_s:g} s; see the log of the train step"
                )
            self._check_place()
            newest = await self._call(self._parts.weights.wait_newer, None, TICK_S)
            if newest is not None:
                await self._update(newest)

    async def _follow_weights(self) -> None:
        """Load each newer version; evaluate those that are due; return at the end of the run."""
        give_up = float("inf")
        while True:
            self._check_place()
            await self._evaluate_if_due()
            if not self._is_done:
                give_up = float("inf")
            else:
                give_up = min(give_up, time.monotonic() + self._config.recovery.progress_timeout_s)
                if not await self._call(self._parts.queue.evals_pending):
                    return
                if time.monotonic() > give_up:
                    raise DeadlineError(
                        "training is done, but evaluations stay unfinished: the last weights did "
                        f"not come (have {self._version}); see the log of the train step"
                    )
            newest = await self._call(self._parts.weights.wait_newer, self._version, TICK_S)
            if newest is not None and newest != self._version:
                await self._update(newest)

    async def _update(self, newest: VersionId) -> None:
        """Load the oldest version that is to be evaluated, else the newest one.

        The versions between are kept by the weight service for a while only; when the wanted one
        is gone, the newest at that time is as good: the evaluation says which version it saw.
        """
        pending = await self._call(self._parts.queue.evals_pending)
        wanted: VersionId | None = _choose(self._version, newest, pending)
        for failures in itertools.count(1):
            if wanted is None:  # it vanished, and nothing newer is there yet
                return
            try:
                await self._load(wanted)
                return
            except (WeightSyncError, EngineError) as err:
                # The engine still serves the old version: nothing to undo, trying again is safe.
                log.warning("weights not loaded %s", kv(version=wanted, reason=err))
                if failures == _MAX_WEIGHT_FAILURES or not await self._parts.engine.healthy():
                    raise
                await asyncio.sleep(0.2 * failures)
            wanted = await self._call(self._parts.weights.wait_newer, self._version, TICK_S)

    async def _load(self, version: VersionId) -> None:
        started = time.monotonic()
        tensors = await self._call(self._parts.weights.fetch, version)
        self._log_tally()
        await self._parts.engine.update_weights(version.version, tensors)
        self._version = version
        seconds = time.monotonic() - started
        self._version_changed.set()
        self._parts.metrics.log(version.version, {"rollout/update_weights_s": seconds})
        self._report()
        log.info("weights loaded %s", kv(version=version.version, seconds=seconds))

    async def _evaluate_if_due(self) -> None:
        """Run what is pending up to the loaded version, unless another engine does."""
        version = self._parts.engine.version
        claimed = [
            wanted
            for wanted in await self._call(self._parts.queue.evals_pending)
            if wanted <= version and await self._call(self._parts.queue.claim_eval, wanted)
        ]
        if not claimed:
            return
        log.info("evaluation begins %s", kv(version=version, prompts=len(self._parts.eval_prompts)))
        started = time.monotonic()
        metrics = await evaluate(self._parts.maker, self._parts.eval_prompts, self._config.rollout)
        metrics["eval/seconds"] = time.monotonic() - started
        self._parts.metrics.log(version, metrics)
        for wanted in claimed:
            await self._call(self._parts.queue.finish_eval, wanted)
        log.info("evaluation done %s", kv(version=version, **metrics))

    # -- admission ------------------------------------------------------------------------------

    async def _keep_full(self) -> None:
        """Keep the engine full of groups; ends only by failing or being cancelled.

        A poll that waits with an old engine version may never be granted anything (on-policy: the
        old version's step is full), so a new version starts a poll beside it; slots of the old
        one, should they come, are as good.
        """
        polls: dict[asyncio.Task[Admission], int] = {}
        try:
            while True:
                if self._is_done:
                    await asyncio.sleep(TICK_S)
                self._check_place()
                self._version_changed.clear()
                version = self._parts.engine.version
                room = self._max_groups - len(self._groups)
                is_new = version not in polls.values() and len(polls) < _MAX_POLLS
                if room > 0 and is_new:
                    poll = self._call(self._parts.admit, version, room, POLL_S)
                    polls[asyncio.create_task(poll)] = version
                await self._wait_for_change([*polls], is_full=room <= 0)
                for ended in [p for p in polls if p.done()]:
                    del polls[ended]
                    self._take(ended.result())
        finally:
            await _cancel([*polls])

    async def _wait_for_change(self, polls: "list[asyncio.Task[Admission]]", is_full: bool) -> None:
        """Wait until a poll ended, the engine has another version, or a full engine has room."""
        changed = asyncio.create_task(self._version_changed.wait())
        wake: set[asyncio.Task[typing.Any]] = {*polls, changed}
        if is_full:
            wake |= self._groups
        try:
            await asyncio.wait(wake, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()

    def _take(self, admission: Admission) -> None:
        self._is_done = admission.done
        for slot in admission.slots:
            task = asyncio.create_task(self._run_group(slot))
            self._groups.add(task)
            task.add_done_callback(self._group_ended)

    def _group_ended(self, task: "asyncio.Task[None]") -> None:
        self._groups.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._group_failure.done():
            self._group_failure.set_exception(error)

    # -- groups ---------------------------------------------------------------------------------

    async def _run_group(self, slot: PromptSlot) -> None:
        """Generate the group of a slot and hand it in, or hand the slot back with a reason."""
        prompt = self._parts.train_prompts[slot.prompt_index]
        try:
            result = await self._parts.maker.make(slot, prompt)
            self._failures_in_a_row = 0
        except EngineError as err:
            result = self._failed(slot, err)
        if not await self._hand_in(slot, result):
            result = dataclasses.replace(result, verdict=Verdict.DROP, reason=UNWANTED, samples=[])
        self._tally.add(result)
        if result.reason != UNWANTED and (warning := self._drop_streak.add(result)):
            log.warning("%s", warning)
        self._report()
        if result.reason == GENERATION_FAILED and not await self._parts.engine.healthy():
            raise EngineError(f"the engine is gone: {result.detail}")
        if self._failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
            raise EngineError(
                f"{self._failures_in_a_row} groups in a row could not be generated, the last one: "
                f"{result.detail}"
            )

    async def _hand_in(self, slot: PromptSlot, result: GroupResult) -> bool:
        """False: the queue has dispatched the prompt again meanwhile, the group is of no use."""
        queue, is_wanted = self._parts.queue, True
        lengths = [len(completion.token_ids) for completion in result.completions]
        if result.verdict is Verdict.PUT:
            put = functools.partial(queue.put_group, slot, result.samples)
            loop = asyncio.get_running_loop()
            is_wanted = await loop.run_in_executor(self._put_threads, put)
            if is_wanted and self._parts.archive is not None:
                self._parts.archive.offer(slot, result.samples)
        elif result.verdict is Verdict.DROP:
            await self._call(queue.drop_group, slot, result.reason, lengths)
        else:
            await self._call(queue.return_group, slot, result.reason, lengths)
        if result.detail:
            log.warning(
                "group not trained %s",
                kv(uid=slot.uid, verdict=result.verdict, reason=result.reason, why=result.detail),
            )
        return is_wanted

    def _failed(self, slot: PromptSlot, error: EngineError) -> GroupResult:
        self._failures_in_a_row += 1
        self._prompt_failures[slot.prompt_index] += 1
        is_hopeless = self._prompt_failures[slot.prompt_index] >= _MAX_PROMPT_FAILURES
        return GroupResult(
            verdict=Verdict.DROP if is_hopeless else Verdict.RETURN,
            reason=GENERATION_FAILED,
            detail=str(error),
        )

    # -- progress -------------------------------------------------------------------------------

    def _report(self) -> None:
        self._parts.progress.report(
            version=self._parts.engine.version,
            tokens=self._tally.num_tokens,
            groups=self._tally.num_groups,
            running=len(self._groups),
            # For the supervisor's sentence when no train step completes.
            dropped=self._tally.describe_drops(),
        )

    async def _tell_regularly(self) -> None:
        while True:
            await asyncio.sleep(TALLY_S)
            self._log_tally()

    def _log_tally(self) -> None:
        log.info(
            "groups so far %s",
            kv(
                version=self._parts.engine.version,
                put=self._tally.num_groups,
                running=len(self._groups),
                dropped=self._tally.describe_drops() or "none",
            ),
        )
        metrics = self._tally.take() | self._memory_metrics()
        if metrics:
            self._parts.metrics.log(self._parts.engine.version, metrics)

    def _memory_metrics(self) -> dict[str, float]:
        """Back-pressure: how full the arena is, and how long puts waited since the last call."""
        memory = self._parts.queue.arena_stats()
        if memory is None:
            return {}
        blocked_s, self._blocked_s = memory.blocked_s - self._blocked_s, memory.blocked_s
        return {"rollout/shm_used_mb": memory.used / 2**20, "rollout/put_blocked_s_sum": blocked_s}

    def _check_place(self) -> None:
        if self._parts.progress.is_replaced:
            raise StaleIncarnationError(
                "a newer incarnation of this engine runs; this one ends without a word to the queue"
            )


def max_groups(config: Config) -> int:
    """Groups that one engine generates at a time: its share of the admission capacity."""
    rollout = config.rollout
    if rollout.max_concurrent_groups > 0:
        return rollout.max_concurrent_groups
    capacity = (rollout.max_staleness + 1) * rollout.groups_per_step
    return -(-capacity // rollout.num_engines)


def _choose(have: VersionId | None, newest: VersionId, pending: Sequence[int]) -> VersionId:
    """The oldest version between `have` and `newest` that waits for its evaluation, else newest."""
    candidates = (VersionId(newest.incarnation, wanted) for wanted in sorted(pending))
    between = (c for c in candidates if c < newest and (have is None or c > have))
    return next(between, newest)


async def _cancel(tasks: Sequence["asyncio.Task[typing.Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
