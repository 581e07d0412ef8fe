"""Judgements of the supervisor with a clock to advance: members, steps and states are made up."""

import signal
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.control.registry import MemberInfo
from relax_hpc.launcher.allocation import local_allocation
from relax_hpc.launcher.deadline import Deadline
from relax_hpc.launcher.members import Snapshot
from relax_hpc.launcher.plan import build_plan
from relax_hpc.launcher.policy import RestartBudget
from relax_hpc.launcher.site import Site
from relax_hpc.launcher.slot import Slot
from relax_hpc.launcher.steps import StepExit, StepHandle, StepLaunch
from relax_hpc.launcher.supervisor import Supervisor, _Wakeup
from relax_hpc.recovery.lifecycle import RunState, RunStatus, StepState, StepStatus
from relax_hpc.runfolder import RunFolder, open_run_folder
from tests.launcher_samples import SMALL, config_of

CONFIG = config_of(SMALL, recovery__heartbeat_timeout_s=60.0)
PLAN = build_plan(CONFIG, Site(name="test"))


class Handle:
    """A step that ends when it is told how, or with SIGKILL."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.ended: StepExit | None = None

    def end(self, exit_code: int, cause: str = "") -> None:
        self.ended = StepExit(exit_code=exit_code, cause=cause, log=self.log)

    def poll(self) -> StepExit | None:
        return self.ended

    def terminate(self) -> None:
        self.end(0)

    def kill(self) -> None:
        self.end(128 + signal.SIGKILL, "rank 0 ended by SIGKILL")


class World:
    """A supervisor and all that it sees, by the clock of the test."""

    def __init__(self, folder: RunFolder, evaluates: bool = False) -> None:
        self.now = 1000.0
        self.checkpoint = -1
        self.silent_since: dict[str, float] = {}
        self.left: set[str] = set()
        self.progress: dict[str, dict[str, str]] = {}
        self.handles: dict[str, Handle] = {}
        self.folder = folder
        allocation = local_allocation(PLAN)
        self.state = RunState(name="t", run=str(folder.path), launcher="local", train_steps=6)
        self.slots = []
        for step in PLAN.steps:
            state = StepState(
                role=step.role, index=step.index, partitions=[], nodes=["local"], tasks=1, gpus=0
            )
            self.state.steps.append(state)
            budget = RestartBudget(3)
            nodes = allocation.node_names(step)
            self.slots.append(Slot(plan=step, nodes=nodes, state=state, budget=budget))
        self.supervisor = Supervisor(
            folder=folder,
            config=config_of(SMALL, data__eval="e.jsonl") if evaluates else CONFIG,
            state=self.state,
            slots=self.slots,
            backend=self,
            members=self,
            make_launch=self._launch,
            newest_checkpoint=lambda: self.checkpoint,
        )
        self.supervisor._last_tick = self.supervisor._awake_since = self.now
        self.supervisor._progress_at = self.now

    def _launch(self, slot: Slot, incarnation: int) -> StepLaunch:
        return StepLaunch(
            plan=slot.plan,
            nodes=slot.nodes,
            run=self.folder,
            attempt=1,
            incarnation=incarnation,
            address_prefix="127.",
            extra_environment={},
            program=("x",),
        )

    def start(self, launch: StepLaunch) -> StepHandle:
        self.handles[launch.plan.name] = Handle(launch.log("rank0"))
        return self.handles[launch.plan.name]

    def close(self) -> None:
        pass

    def latest(self) -> Snapshot:
        members = []
        for slot in self.slots:
            if slot.name in self.left or slot.handle is None:
                continue
            for rank in range(slot.plan.num_tasks):
                silent = self.silent_since.get(f"{slot.name}-{rank}", self.now)
                progress = self.progress.get(slot.name, {})
                members.append(_member(slot, rank, self.now - silent, progress))
        return Snapshot(self.now, tuple(members))

    def run_for(self, seconds: float) -> None:
        with _Wakeup() as wakeup:
            end = self.now + seconds
            while self.now < end:
                self.now += 2.0
                self.supervisor._tick(self.now, wakeup)

    def slot(self, name: str) -> Slot:
        return next(slot for slot in self.slots if slot.name == name)


def _member(slot: Slot, rank: int, silent_s: float, progress: dict[str, str]) -> MemberInfo:
    values: dict[str, Any] = {
        "role": slot.plan.role,
        "index": slot.plan.index,
        "rank": rank,
        "node": "local",
        "pid": 1,
        "attempt": 1,
        "incarnation": slot.state.incarnation,
        "address_info": {},
        "progress": progress,
        "last_seen_s": silent_s,
        "progress_age_s": silent_s,
    }
    return MemberInfo(**values)


@pytest.fixture
def world(tmp_path: Path) -> World:
    one = World(open_run_folder(tmp_path / "run-1"))
    one.run_for(20)
    assert {slot.state.status for slot in one.slots} == {StepStatus.RUNNING}
    return one


def test_a_silent_member_is_found_after_one_heartbeat_timeout(world: World) -> None:
    world.silent_since["rollout-1-0"] = world.now
    world.run_for(58)
    assert world.slot("rollout-1").state.incarnation == 1
    assert not world.state.history
    world.run_for(10)
    assert [h.cause for h in world.state.history] == ["rank [0] gave no sign of life within 60 s"]


def test_a_run_that_stands_still_says_what_the_engines_dropped(world: World) -> None:
    world.progress["rollout-1"] = {"dropped": "uninformative:120"}
    world.run_for(1900)
    assert world.supervisor.outcome is not None
    assert "no train step completed for 1800 s" in world.supervisor.outcome.cause
    assert "rollout-1 dropped uninformative:120" in world.supervisor.outcome.cause


def end_training(world: World) -> None:
    world.handles["train-0"].end(0)
    world.run_for(4)
    assert world.slot("train-0").state.status is StepStatus.ENDED


def test_a_rollout_that_is_silent_after_training_is_not_started_again(world: World) -> None:
    end_training(world)
    world.silent_since["rollout-0-0"] = world.now
    world.run_for(80)
    assert world.slot("rollout-0").state.status is StepStatus.ENDED
    assert world.state.incarnations["rollout-0"] == 1
    world.handles["rollout-1"].end(0)
    world.run_for(10)
    outcome = world.supervisor.outcome
    assert outcome is not None
    assert (outcome.status, outcome.exit_code) == ("done", 0)


def test_a_rollout_may_be_needed_for_the_last_evaluation(tmp_path: Path) -> None:
    world = World(open_run_folder(tmp_path / "run-2"), evaluates=True)
    world.run_for(20)
    end_training(world)
    world.handles["rollout-0"].end(1, "rank 0 ended with exit code 1")
    world.run_for(10)
    assert world.state.incarnations["rollout-0"] == 2  # nobody has evaluated yet
    world.handles["rollout-1"].end(0)
    world.run_for(4)
    world.handles["rollout-0"].end(1, "rank 0 ended with exit code 1")
    world.run_for(10)
    assert world.state.incarnations["rollout-0"] == 2  # rollout-1 ended well: it is done
    assert world.supervisor.outcome is not None


def test_the_log_counts_restarts_as_the_limit_does(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    for checkpoint in (1, 2, 3):
        world.checkpoint = checkpoint
        world.handles["train-0"].end(1, "rank 0 ended with exit code 1")
        world.run_for(10)
    told = [r.getMessage() for r in caplog.records if "step starts again" in r.getMessage()]
    assert ["restart=1 limit=3" in line for line in told] == [True] * 3
    assert "restarts_of_attempt=3" in told[-1]


def test_the_silent_rank_of_several_is_named(world: World) -> None:
    world.silent_since["train-0-1"] = world.now
    world.run_for(70)
    assert world.state.history[0].cause == "rank [1] gave no sign of life within 60 s"


class Signals:
    """What the supervisor's wake-up would have noted, one signal a tick."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = list(numbers)

    def take(self) -> signal.Signals | None:
        return self._numbers.pop(0) if self._numbers else None


def test_signals_during_a_save_do_not_cut_it_short(world: World) -> None:
    """USR2, then USR2 and SIGTERM (Slurm sends TERM to all at the limit): the first one counts."""
    stubborn = world.handles["train-0"]
    stubborn.terminate = lambda: None  # type: ignore[method-assign]  # it saves
    kills: list[float] = []
    stubborn.kill = lambda: kills.append(world.now)  # type: ignore[method-assign]
    signals: Any = Signals(signal.SIGUSR2, signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM)
    began = world.now
    for _ in range(50):
        world.now += 1.0
        world.supervisor._tick(world.now, signals)
    assert kills == []
    outcome = world.supervisor.outcome
    assert outcome is not None and outcome.status is RunStatus.REQUEUED
    assert outcome.grace_s >= 60.0
    for _ in range(30):
        world.now += 1.0
        world.supervisor._tick(world.now, signals)
    assert kills and kills[0] - began >= 60.0


def test_the_jobs_end_stops_the_run_in_time_for_a_slow_save(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = {"now": 0.0}
    monkeypatch.setattr("relax_hpc.launcher.supervisor.time.time", lambda: clock["now"])
    world.supervisor._deadline = Deadline(10_000.0, lambda: [500.0])
    clock["now"] = 9_439.0
    world.run_for(5)
    assert world.supervisor.outcome is None
    clock["now"] = 9_440.0
    world.run_for(2)
    outcome = world.supervisor.outcome
    assert outcome is not None and outcome.status is RunStatus.REQUEUED
    assert outcome.grace_s == 530.0 and outcome.exit_code == 75


def test_a_save_that_fails_near_the_limit_does_not_stop_the_next_attempt(world: World) -> None:
    world.handles["train-0"].terminate = (  # type: ignore[method-assign]
        lambda: world.handles["train-0"].end(1, "disk full")
    )
    signals: Any = Signals(signal.SIGUSR2)
    for _ in range(10):
        world.now += 1.0
        world.supervisor._tick(world.now, signals)
    assert world.supervisor.outcome is not None
    assert world.supervisor.outcome.status is RunStatus.REQUEUED
    assert world.state.history[-1].role in ("train", "rollout", "dcs")
