"""The rollout loop against a queue, a weight service and an engine in this process."""

import asyncio
import collections
import dataclasses
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from relax_hpc.config import Config, config_from_tree
from relax_hpc.dcs.store import VersionId
from relax_hpc.errors import (
    DeadlineError,
    EngineError,
    RelaxError,
    StaleIncarnationError,
    TransferError,
    WeightSyncError,
)
from relax_hpc.records import (
    Completion,
    FinishReason,
    Prompt,
    PromptSlot,
    RewardResult,
    Sample,
)
from relax_hpc.rollout import loop as loop_module
from relax_hpc.rollout.engine import NO_VERSION, GenerateRequest
from relax_hpc.rollout.group import GroupMaker, sample_seed
from relax_hpc.rollout.loop import LoopParts, RolloutLoop, max_groups

NUM_PROMPTS = 50
GROUP_SIZE = 4


def make_config(**rollout: Any) -> Config:
    staleness = rollout.get("max_staleness", 1)
    tree: dict[str, Any] = {
        "run": {
            "name": "t",
            "train_steps": 6,
            "mode": "async" if staleness else "async_on_policy",
        },
        "model": {"path": "m"},
        "data": {"train": "a.jsonl"},
        "rollout": {
            "groups_per_step": 4,
            "group_size": GROUP_SIZE,
            "max_response_tokens": 8,
            **rollout,
        },
        "train": {"chunks_per_step": 1},
        "recovery": {"progress_timeout_s": 30.0},
    }
    return config_from_tree(tree, "test")


class Service:
    """Queue, trainer and weight service in one: trains B groups, publishes, until train_steps."""

    def __init__(self, config: Config, evals: tuple[int, ...] = ()) -> None:
        rollout = config.rollout
        self.batch, self.staleness = rollout.groups_per_step, rollout.max_staleness
        self.steps = config.run.train_steps
        self.version = 0
        self.incarnation = 1
        self.published = [VersionId(1, 0)]
        self.vanished: set[VersionId] = set()
        self.slots: dict[str, PromptSlot] = {}
        self.groups: list[tuple[int, PromptSlot, list[Sample]]] = []
        self.ready: list[tuple[PromptSlot, list[Sample]]] = []
        self.dropped: collections.Counter[str] = collections.Counter()
        self.returned: collections.Counter[str] = collections.Counter()
        self.blocked_s = 0.0
        self.archived: list[tuple[str, list[Sample]]] = []
        self.lengths: dict[str, list[list[int]]] = collections.defaultdict(list)
        """By reason, the response tokens of each group that was dropped or returned."""
        self.again: list[int] = []
        self.next_prompt = 0
        self.dispatches: collections.Counter[int] = collections.Counter()
        self.evals = list(evals)
        self.claims: list[int] = []
        self.admitted_with: list[int] = []
        self.changed = threading.Condition(threading.RLock())
        self.is_replaced = False
        self.progress: dict[str, Any] = {}
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.on_put: Callable[[], bool] = lambda: True
        self.auto_train = True

    # -- queue
    @property
    def done(self) -> bool:
        return self.version >= self.steps

    def admit(self, engine_version: int, max_groups: int, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while True:
                slots = [] if self.done else self._grant(engine_version, max_groups)
                left = deadline - time.monotonic()
                if slots or self.done or left <= 0:
                    return _Admission(slots, self.done)
                self.changed.wait(left)

    def _grant(self, engine_version: int, max_groups: int) -> list[PromptSlot]:
        granted = []
        while len(granted) < max_groups and self._feasible(engine_version + self.staleness):
            index = self.again.pop(0) if self.again else self.next_prompt % NUM_PROMPTS
            self.next_prompt += 1
            self.dispatches[index] += 1
            slot = PromptSlot(
                uid=f"0.{index}.{self.dispatches[index]}",
                prompt_index=index,
                epoch=0,
                deadline_version=engine_version + self.staleness,
            )
            self.slots[slot.uid] = slot
            self.admitted_with.append(engine_version)
            granted.append(slot)
        return granted

    def _feasible(self, new_deadline: int) -> bool:
        deadlines = [s.deadline_version for s in self.slots.values()]
        deadlines += [s.deadline_version for s, _ in self.ready] + [new_deadline]
        return all(
            sum(d <= k for d in deadlines) <= (k - self.version + 1) * self.batch
            for k in range(new_deadline, max(deadlines) + 1)
        ) and (new_deadline >= self.version)

    def put_group(self, slot: PromptSlot, samples: list[Sample]) -> bool:
        if not self.on_put():
            return False
        with self.changed:
            self._free(slot)
            self.ready.append((slot, samples))
            self.train()
        return True

    def arena_stats(self) -> types.SimpleNamespace:
        self.blocked_s += 1.5
        return types.SimpleNamespace(used=3 << 20, blocked_s=self.blocked_s)

    def offer(self, slot: PromptSlot, samples: list[Sample]) -> bool:
        self.archived.append((slot.uid, samples))
        return True

    def train(self) -> None:
        while self.auto_train and len(self.ready) >= self.batch and not self.done:
            self.ready.sort(key=lambda r: r[0].deadline_version)
            for slot, samples in self.ready[: self.batch]:
                self.groups.append((self.version, slot, samples))
            del self.ready[: self.batch]
            self.version += 1
            self.published.append(VersionId(self.incarnation, self.version))
        self.changed.notify_all()

    def _free(self, slot: PromptSlot) -> None:
        if self.slots.pop(slot.uid, None) is None:
            raise TransferError(f"slot {slot.uid} is not known")
        self.changed.notify_all()

    def drop_group(
        self, slot: PromptSlot, reason: str, response_tokens: Sequence[int] = ()
    ) -> None:
        with self.changed:
            self._free(slot)
            self.dropped[reason] += 1
            self.lengths[reason].append(list(response_tokens))

    def return_group(
        self, slot: PromptSlot, reason: str, response_tokens: Sequence[int] = ()
    ) -> None:
        with self.changed:
            self._free(slot)
            self.returned[reason] += 1
            self.lengths[reason].append(list(response_tokens))
            self.again.append(slot.prompt_index)

    def claim_eval(self, version: int) -> bool:
        is_first = version not in self.claims
        self.claims.append(version)
        return is_first

    def finish_eval(self, version: int) -> None:
        self.evals.remove(version)

    def evals_pending(self) -> list[int]:
        return list(self.evals)

    # -- weights
    def wait_newer(self, have: VersionId | None, timeout_s: float) -> VersionId | None:
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while True:
                newest = max(self.published, default=None)
                if newest is not None and (have is None or newest > have):
                    return newest
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self.changed.wait(left)

    def fetch(self, version: VersionId) -> Mapping[str, Any]:
        if version in self.vanished or version not in self.published:
            self.vanished.discard(version)
            raise WeightSyncError(f"{version} vanished")
        return {"version": version}

    # -- membership and metrics
    def report(self, **progress: Any) -> None:
        self.progress |= progress

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics.append((step, dict(metrics)))


@dataclasses.dataclass
class _Admission:
    slots: list[PromptSlot]
    done: bool


class FakeEngine:
    """Tokens from the seed, after a short while; records what happened."""

    def __init__(self) -> None:
        self.version = NO_VERSION
        self.requests: list[tuple[int, GenerateRequest]] = []
        self.fail: Callable[[GenerateRequest], bool] = lambda request: False
        self.abort_next = 0
        self.delay_s = 0.002
        self.updates: list[int] = []
        self.refuse_updates = 0
        self.is_healthy = True

    async def start(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> Completion:
        assert self.version != NO_VERSION
        self.requests.append((self.version, request))
        first = self.version
        await asyncio.sleep(self.delay_s)
        if self.fail(request):
            raise EngineError("the request failed")
        tokens = [int(t) for t in np.random.default_rng(request.seed).integers(0, 10, 3)]
        reason = FinishReason.STOP
        if self.abort_next > 0:
            self.abort_next -= 1
            reason = FinishReason.ABORT
        return Completion(
            token_ids=tokens,
            logprobs=[-0.5] * 3,
            token_versions=[first, first, self.version],
            finish_reason=reason,
        )

    async def update_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        assert tensors["version"].version == version
        if self.refuse_updates > 0:
            self.refuse_updates -= 1
            raise EngineError("bad weights")
        self.updates.append(version)
        self.version = version

    async def abort(self, request_id: str) -> None: ...

    async def healthy(self) -> bool:
        return self.is_healthy

    async def close(self) -> None: ...


class FakeTokenizer:
    eos_token_id = 1
    chat_template = None

    def encode(self, text: str) -> list[int]:
        return [int(c) for c in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(str(t) for t in token_ids)

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


async def varied(prompt: Prompt, text: str, reason: FinishReason) -> RewardResult:
    """Right for an even digit sum: most groups vary."""
    accuracy = float(sum(map(int, text)) % 2 == 0)
    return RewardResult(2 * accuracy - 1, accuracy)


@dataclasses.dataclass
class World:
    config: Config
    service: Service
    engine: FakeEngine
    reward: Any = varied

    async def run(self, timeout_s: float = 30.0) -> None:
        maker = GroupMaker(
            engine=self.engine,
            reward=self.reward,
            tokenizer=FakeTokenizer(),
            stop_token_ids=(1,),
            rollout=self.config.rollout,
            algorithm=self.config.algorithm,
            seed=self.config.run.seed,
            deadline_s=self.config.recovery.progress_timeout_s,
        )
        prompts = [
            Prompt(token_ids=[2, 3, i], label=str(i), text="", metadata={})
            for i in range(NUM_PROMPTS)
        ]
        service: Any = self.service
        parts = LoopParts(
            engine=self.engine,
            maker=maker,
            queue=service,
            admit=service.admit,
            weights=service,
            progress=service,
            metrics=service,
            train_prompts=prompts,
            eval_prompts=prompts[:10],
            archive=service,
        )
        await asyncio.wait_for(RolloutLoop(self.config, parts).run(), timeout_s)


def make_world(evals: tuple[int, ...] = (), **rollout: Any) -> World:
    config = make_config(**rollout)
    return World(config, Service(config, evals), FakeEngine())


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_whole_run(staleness: int) -> None:
    world = make_world(max_staleness=staleness)
    asyncio.run(world.run())
    service = world.service
    assert service.version == 6
    assert len(service.groups) == 6 * 4
    archived = dict(service.archived)
    assert len(archived) == len(service.archived) >= 6 * 4
    assert all(archived[slot.uid] is samples for _, slot, samples in service.groups)
    for step, slot, samples in service.groups:
        assert len(samples) == GROUP_SIZE
        for index, sample in enumerate(samples):
            versions = sample.fields["token_versions"]
            assert step - versions.min() <= staleness
            fields = {k: (v.dtype.name, v.shape) for k, v in sample.fields.items()}
            assert fields == {
                "tokens": ("int32", (6,)),
                "rollout_logprobs": ("float32", (3,)),
                "token_versions": ("int32", (3,)),
                "loss_mask": ("uint8", (3,)),
                "reward": ("float32", ()),
                "accuracy": ("float32", ()),
            }
            seed = sample_seed(0, slot.uid, index)
            expected = np.random.default_rng(seed).integers(0, 10, 3)
            assert sample.fields["tokens"].tolist() == [2, 3, slot.prompt_index, *expected]
        assert len({float(s.fields["accuracy"]) for s in samples}) == 2
    assert set(service.dropped) <= {"uninformative"}
    assert all(group == [3] * GROUP_SIZE for group in service.lengths["uninformative"])
    assert not service.returned
    assert service.progress["groups"] >= 24
    names = {name for _, metrics in service.metrics for name in metrics}
    told = [m for _, m in service.metrics if "rollout/put_blocked_s_sum" in m]
    assert all(m["rollout/put_blocked_s_sum"] == 1.5 for m in told), "since the last time"
    assert all(m["rollout/shm_used_mb"] == 3.0 for m in told) and len(told) >= 2
    assert {"rollout/tokens_per_s", "rollout/groups_put_sum", "rollout/accuracy_mean"} <= names


def test_seeds_are_a_pure_function_and_distinct() -> None:
    seeds = {
        sample_seed(run, f"{epoch}.{index}.1", sample)
        for run in range(3)
        for epoch in range(3)
        for index in range(100)
        for sample in range(8)
    }
    assert len(seeds) == 3 * 3 * 100 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(7, "0.1.2", 3) == 2416810184091617345  # reruns repeat, also next year


def test_the_first_request_comes_after_the_first_weights() -> None:
    world = make_world()
    world.service.published = []

    async def scenario() -> None:
        running = asyncio.create_task(world.run())
        await asyncio.sleep(0.3)
        assert not world.service.admitted_with
        with world.service.changed:
            world.service.published = [VersionId(1, 0)]
            world.service.changed.notify_all()
        await running

    asyncio.run(scenario())
    assert min(world.service.admitted_with) == 0


def test_evaluations_pin_their_version_and_count_once() -> None:
    world = make_world(evals=(0, 2, 6))
    world.engine.delay_s = 0.01
    asyncio.run(world.run())
    assert world.service.evals == []
    evals = {step: m for step, m in world.service.metrics if "eval/accuracy" in m}
    assert {0, 6} <= set(evals)
    assert all(m["eval/samples"] == 10 for m in evals.values())
    by_prompt = collections.defaultdict(set)
    for version, request in world.engine.requests:
        if request.request_id.startswith("eval."):
            assert (request.temperature, version in evals) == (0.0, True)
            by_prompt[request.request_id].add(request.seed)
    assert all(len(seeds) == 1 for seeds in by_prompt.values())


def test_an_evaluation_of_another_engine_is_waited_for() -> None:
    world = make_world(evals=(6,))
    world.service.claims = [6]  # somebody else has it

    async def scenario() -> None:
        running = asyncio.create_task(world.run())
        while not world.service.done:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert not running.done()
        world.service.finish_eval(6)
        await running

    asyncio.run(scenario())
    assert not any("eval/accuracy" in m for _, m in world.service.metrics)


def test_a_released_evaluation_is_taken_over() -> None:
    world = make_world(evals=(6,))
    world.service.claims = [6]

    async def scenario() -> None:
        running = asyncio.create_task(world.run())
        while not world.service.done:
            await asyncio.sleep(0.01)
        world.service.claims = []  # its engine died
        await running

    asyncio.run(scenario())
    assert [step for step, m in world.service.metrics if "eval/accuracy" in m] == [6]


def test_a_run_that_drops_everything_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Dynamic sampling on a model that is never right: no weights, no step, but words."""
    monkeypatch.setattr(loop_module, "TALLY_S", 0.05)
    caplog.set_level("INFO")
    world = make_world()

    async def wrong(prompt: Prompt, text: str, reason: FinishReason) -> RewardResult:
        return RewardResult(-1.0, 0.0)

    world.reward = wrong

    async def scenario() -> None:
        running = asyncio.create_task(world.run())
        async with asyncio.timeout(25):
            while "groups were all dropped" not in caplog.text:
                await asyncio.sleep(0.01)
            while not any("rollout/accuracy_mean" in m for _, m in world.service.metrics):
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())
    assert "the last 64 groups were all dropped (uninformative: 64; mean accuracy 0.000)" in (
        caplog.text
    )
    assert "groups so far version=0 put=0" in caplog.text
    assert world.service.progress["dropped"].startswith("uninformative:")
    counts = [m.get("rollout/groups_drop_uninformative_sum", 0) for _, m in world.service.metrics]
    assert sum(counts) > 0


def test_failed_groups_go_back_with_a_reason() -> None:
    world = make_world()
    world.engine.fail = lambda r: r.request_id in ("0.1.1/2", "0.3.1/0")
    asyncio.run(world.run())
    assert world.service.returned == {"generation_failed": 2}
    assert {world.service.dispatches[1], world.service.dispatches[3]} == {2}
    assert len(world.service.groups) == 24


def test_a_prompt_that_always_fails_is_dropped() -> None:
    world = make_world()
    world.engine.fail = lambda r: r.token_ids[-1] == 1
    asyncio.run(world.run())
    assert world.service.returned == {"generation_failed": 2}
    assert world.service.dropped["generation_failed"] == 1
    assert len(world.service.groups) == 24


def test_an_engine_that_fails_everything_ends_the_step() -> None:
    world = make_world()
    world.engine.fail = lambda r: True
    with pytest.raises(EngineError, match=r"in a row.*the request failed"):
        asyncio.run(world.run())
    assert world.service.returned["generation_failed"] >= 8


def test_a_dead_engine_ends_the_step_at_once() -> None:
    world = make_world()
    world.engine.fail = lambda r: True
    world.engine.is_healthy = False
    with pytest.raises(EngineError, match="the engine is gone: the request failed"):
        asyncio.run(world.run())
    assert world.service.returned["generation_failed"] >= 1


def test_aborted_groups_go_back() -> None:
    world = make_world()
    world.engine.abort_next = 3
    asyncio.run(world.run())
    assert world.service.returned["aborted"] >= 1
    assert all(
        s.finish_reason is FinishReason.STOP for _, _, group in world.service.groups for s in group
    )


def test_an_invalid_reward_is_never_a_number() -> None:
    async def sometimes(prompt: Prompt, text: str, reason: FinishReason) -> RewardResult:
        if prompt.label in ("1", "2"):
            return RewardResult(0.0, 0.0, valid=False, reason="sandbox is down")
        return await varied(prompt, text, reason)

    world = make_world()
    world.reward = sometimes
    asyncio.run(world.run())
    assert world.service.dropped["invalid_reward"] == 2
    assert not {slot.prompt_index for _, slot, _ in world.service.groups} & {1, 2}


def test_a_group_that_nobody_wants_does_not_end_the_loop() -> None:
    """The train step was rolled back, or the queue held this engine for dead."""
    world = make_world()
    answers = iter([False, True, False])
    world.service.on_put = lambda: next(answers, True)
    asyncio.run(world.run())
    assert world.service.version == 6
    counted = sum(m.get("rollout/groups_drop_unwanted_sum", 0) for _, m in world.service.metrics)
    assert counted == 2


@pytest.mark.parametrize(
    "error",
    [
        DeadlineError("dcs is gone"),
        StaleIncarnationError("a newer one runs"),
        TransferError("shared memory is full"),
    ],
)
def test_a_dead_queue_ends_the_step(error: RelaxError) -> None:
    world = make_world()

    def on_put() -> bool:
        raise error

    world.service.on_put = on_put
    with pytest.raises(type(error)):
        asyncio.run(world.run())


def test_weights_come_while_all_puts_wait_for_memory() -> None:
    """An arena is full until a step is trained; the engine must not miss its weights for that."""
    world = make_world(max_staleness=9, max_concurrent_groups=40)
    service, put_again = world.service, threading.Event()

    def on_put() -> bool:
        assert put_again.wait(15), "the new version was not loaded while puts waited"
        return True

    async def scenario() -> None:
        running = asyncio.create_task(world.run())
        while service.progress.get("running", 0) < 40:
            await asyncio.sleep(0.01)
        with service.changed:
            service.incarnation = 2
            service.published.append(VersionId(2, 0))  # of a train step that came back
            service.changed.notify_all()
        while len(world.engine.updates) < 2:
            await asyncio.sleep(0.01)
        put_again.set()
        await running

    service.on_put = on_put
    asyncio.run(scenario())
    assert service.version == 6


def test_being_replaced_ends_the_step() -> None:
    world = make_world()
    world.service.auto_train = False

    async def scenario() -> None:
        running = asyncio.create_task(world.run())
        await asyncio.sleep(0.2)
        world.service.is_replaced = True
        await running

    with pytest.raises(StaleIncarnationError):
        asyncio.run(scenario())


def test_vanished_versions_and_refused_updates_are_tried_again() -> None:
    world = make_world()
    world.engine.refuse_updates = 2
    world.service.vanished = {VersionId(1, 1), VersionId(1, 2)}
    asyncio.run(world.run())
    assert world.service.version == 6
    assert len(world.service.vanished) < 2
    assert world.engine.refuse_updates == 0


def test_weights_that_never_load_end_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_MAX_WEIGHT_FAILURES", 2)
    world = make_world()
    world.engine.refuse_updates = 1000
    with pytest.raises(EngineError, match="bad weights"):
        asyncio.run(world.run())


def test_an_unhealthy_engine_ends_the_step() -> None:
    world = make_world()
    world.engine.refuse_updates, world.engine.is_healthy = 1000, False
    with pytest.raises(EngineError, match="bad weights"):
        asyncio.run(world.run())


def test_a_rollback_of_the_trainer_is_followed() -> None:
    world = make_world()
    world.service.auto_train = False

    async def scenario() -> None:
        running = asyncio.create_task(world.run())
        await asyncio.sleep(0.1)
        with world.service.changed:
            world.service.published.append(VersionId(1, 3))
            world.service.changed.notify_all()
        await asyncio.sleep(0.2)
        with world.service.changed:
            world.service.published.append(VersionId(2, 2))
            world.service.incarnation, world.service.version = 2, 2
            world.service.changed.notify_all()
        await asyncio.sleep(0.2)
        with world.service.changed:
            world.service.auto_train = True
            world.service.train()
        await running

    asyncio.run(scenario())
    assert world.engine.updates[:3] == [0, 3, 2]
    assert world.engine.version in (5, 6)


def test_a_train_step_that_dies_after_its_last_update_gets_groups_again() -> None:
    world = make_world(evals=(6,))
    service = world.service
    service.claims = [6]  # keeps the loop alive: another engine evaluates

    async def scenario() -> None:
        running = asyncio.create_task(world.run())
        while not service.done or world.engine.version != 6:
            await asyncio.sleep(0.01)
        with service.changed:
            service.incarnation, service.version = 2, 3
            service.published.append(VersionId(2, 3))
            service.train()
        while not service.done:
            await asyncio.sleep(0.01)
        service.finish_eval(6)
        await running

    asyncio.run(scenario())
    assert len(service.groups) == (6 + 3) * 4


def test_an_evaluated_version_is_not_skipped() -> None:
    """Versions 1 and 2 are published while the engine has 0; 1 waits for its evaluation."""
    choose = loop_module._choose
    assert choose(VersionId(1, 0), VersionId(1, 2), [1]) == VersionId(1, 1)
    assert choose(None, VersionId(1, 1), [0]) == VersionId(1, 0)
    assert choose(VersionId(1, 1), VersionId(1, 2), [0, 1]) == VersionId(1, 2)
    assert choose(VersionId(1, 5), VersionId(2, 3), [4]) == VersionId(2, 3)
    assert choose(VersionId(1, 0), VersionId(1, 2), []) == VersionId(1, 2)


def test_a_cancelled_loop_ends() -> None:
    """SIGTERM: the step cancels the loop while everything is in flight."""
    world = make_world()
    world.engine.delay_s = 1000.0

    async def scenario() -> None:
        running = asyncio.create_task(world.run(2000))
        await asyncio.sleep(0.2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_max_groups_is_the_share_of_the_window() -> None:
    assert max_groups(make_config()) == 8
    assert max_groups(make_config(max_concurrent_groups=3)) == 3
    tree = dataclasses.asdict(make_config())
    tree["rollout"]["num_engines"] = 3
    tree["resources"]["rollout"]["ranks"] = 3
    assert max_groups(config_from_tree(tree, "test")) == 3


def test_concurrency_stays_within_the_limit() -> None:
    world = make_world(max_concurrent_groups=2, max_staleness=2)
    running, most = 0, 0
    original = world.engine.generate

    async def counted(request: GenerateRequest) -> Completion:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await original(request)
        finally:
            running -= 1

    world.engine.generate = counted  # type: ignore[method-assign]
    asyncio.run(world.run())
    assert most <= 2 * GROUP_SIZE * 2  # an old and a new poll may both be granted
