"""The supervisor: starts the steps of a run, watches them, restarts some, ends the run.

Runs on the batch host (the process that sbatch started) or, for launcher = local, on the machine.

    consumes     ends of steps (SIGCHLD), the member list (MemberWatch), signals (TERM, INT, USR2)
    produces     starts and ends of steps, state.json, logs/latest
    waits for    one of these, or the next deadline: at most a second, in `_Wakeup.wait`
    unblocked by the wake-up socket of the signal module

Order: the dcs first; the others once its control service answers. The run is done when train ended
with 0 and the other roles have ended by themselves (the queue tells them), then the dcs is stopped.

What ends a run early: a step whose restarts are used up, a step that ends with exit code 2 (wrong
use: it would fail again), no train step for `progress_timeout_s`, a signal.
"""

import dataclasses
import logging
import math
import os
import select
import shutil
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

from relax_hpc.config import Config
from relax_hpc.launcher.autopsy import Autopsy
from relax_hpc.launcher.deadline import MIN_GRACE_S, Deadline
from relax_hpc.launcher.members import MemberSource, Snapshot
from relax_hpc.launcher.slot import Slot
from relax_hpc.launcher.steps import StepBackend, StepExit, StepLaunch, tail
from relax_hpc.log import kv
from relax_hpc.recovery.lifecycle import ExitRecord, RunState, RunStatus, StepStatus, write_state
from relax_hpc.runfolder import RunFolder

_LOG = logging.getLogger(__name__)

_TICK_S = 1.0
_GRACE_S = 15.0
"""From SIGTERM to SIGKILL when a run ends; Slurm's KillWait is 30 s by default."""
_STALL_S = 15.0
"""A tick that comes later than this was not due to a member: the supervisor itself was stopped."""
_WRONG_USE = 2
"""Exit code of configuration errors: the step would fail again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Why the run ends and what the supervisor reports."""

    status: RunStatus
    cause: str
    exit_code: int
    grace_s: float = _GRACE_S


class Supervisor:
    """One attempt of one run. `run` returns the exit code."""

    def __init__(  # noqa: PLR0913 - by keyword: what one attempt consists of
        self,
        *,
        folder: RunFolder,
        config: Config,
        state: RunState,
        slots: list[Slot],
        backend: StepBackend,
        members: MemberSource,
        make_launch: Callable[[Slot, int], StepLaunch],
        newest_checkpoint: Callable[[], int],
        deadline: Deadline | None = None,
    ) -> None:
        self._folder, self._config, self._state = folder, config, state
        self._slots, self._backend, self._members = slots, backend, members
        self._make_launch, self._newest_checkpoint = make_launch, newest_checkpoint
        self._deadline = deadline
        self._autopsy = Autopsy(folder)
        self._outcome: Outcome | None = None
        self._seen = -1.0
        """Time of the last snapshot that was judged."""
        self._control_up = 0.0
        """When control began to answer after its last silence."""
        self._last_tick = self._awake_since = self._progress_at = time.monotonic()
        self._drain_until: float | None = None
        self._dirty = True

    def run(self) -> int:
        """Supervise until the run ends; state.json and the exit code say how."""
        with _Wakeup() as wakeup:
            while not self._is_over():
                self._tick(time.monotonic(), wakeup)
                self._save()
                wakeup.wait(_TICK_S)
            self._autopsy.close()
        outcome = self._outcome
        assert outcome is not None
        self._clean_shm()
        return outcome.exit_code

    @property
    def outcome(self) -> Outcome | None:
        """Why the run ended; None while it runs."""
        return self._outcome

    # -- one turn ---------------------------------------------------------------------------------

    def _tick(self, now: float, wakeup: "_Wakeup") -> None:
        if now - self._last_tick > _STALL_S:
            _LOG.warning("supervisor was stopped %s", kv(seconds=now - self._last_tick))
            self._awake_since = now
        self._last_tick = now
        self._note_signals(wakeup)
        if self._outcome is None and self._deadline is not None:
            self._heed(self._deadline)
        for slot in self._slots:
            ended = slot.poll(now)
            if ended is not None:
                self._on_exit(slot, ended, now)
        if self._autopsy.poll(now):
            self._dirty = True
        if self._outcome is None:
            self._judge(now)
        if self._outcome is None:
            self._start_due(now)
            self._check_end(now)
        if self._outcome is not None:
            self._stop_in_order(now)

    def _note_signals(self, wakeup: "_Wakeup") -> None:
        number = wakeup.take()
        if self._outcome is not None:
            if number is not None:
                self._autopsy.close()  # Slurm kills 30 s after SIGTERM: no time for it
            return
        if number is signal.SIGUSR2:
            self._stop_for_limit("the time limit is near (SIGUSR2)")
        elif number is not None:
            cause = f"{number.name} received: cancelled, preempted or at the time limit"
            self._end(Outcome(RunStatus.CANCELLED, cause, 1))

    def _heed(self, deadline: Deadline) -> None:
        if deadline.is_due(time.time()):
            self._stop_for_limit("the time limit is near: a save must fit in")

    def _stop_for_limit(self, cause: str) -> None:
        grace_s = MIN_GRACE_S if self._deadline is None else self._deadline.grace_s
        self._end(Outcome(RunStatus.REQUEUED, cause, os.EX_TEMPFAIL, grace_s))

    def _end(self, outcome: Outcome) -> None:
        """Decide the outcome; the first decision stays."""
        if self._outcome is None:
            self._outcome = outcome
            self._members.close()  # while control still answers: nothing is judged from here on
            # After SIGTERM Slurm may kill us (KillWait) before the steps are gone: say it now.
            is_cancelled = outcome.status is RunStatus.CANCELLED
            self._state.status = RunStatus.CANCELLED if is_cancelled else RunStatus.STOPPING
            self._state.cause = outcome.cause
            self._dirty = True
            level = logging.INFO if outcome.exit_code == 0 else logging.ERROR
            _LOG.log(level, "run ends %s", kv(status=outcome.status.value, cause=outcome.cause))

    def _fail(self, cause: str, exit_code: int = 1) -> None:
        self._end(Outcome(RunStatus.FAILED, cause, exit_code))

    def _is_over(self) -> bool:
        if self._outcome is None or any(slot.is_alive for slot in self._slots):
            return False
        # Only a failed run waits for its verdict, up to the post-mortem's deadline.
        return not (self._outcome.status is RunStatus.FAILED and self._autopsy.is_busy)

    def _save(self) -> None:
        if self._dirty:
            write_state(self._folder, self._state)
            self._dirty = False

    # -- ends of steps ----------------------------------------------------------------------------

    def _on_exit(self, slot: Slot, ended: StepExit, now: float) -> None:
        self._dirty = True
        cause = slot.stop_cause or ended.cause
        self._record(slot, ended, cause)
        if self._outcome is not None:
            return
        if ended.exit_code == 0 and not slot.stop_cause and slot.plan.role != "dcs":
            _LOG.info("step ended well %s", kv(step=slot.name))
            self._progress_at = now
            return
        cause = cause or "ended without being asked to"
        log = ended.log.relative_to(self._folder.path)
        _LOG.error("step failed %s", kv(step=slot.name, cause=cause, log=log))
        self._autopsy.begin(self._state.history[-1])
        for line in tail(ended.log):
            _LOG.error("%s| %s", slot.name, line)
        if ended.exit_code == _WRONG_USE:
            self._fail(
                f"{slot.name}: {cause} (wrong configuration or input), see {log}", _WRONG_USE
            )
            return
        if self._is_work_over(slot):
            _LOG.warning("step is not started again: its work is over %s", kv(step=slot.name))
            return
        self._plan_restart(slot, f"{cause}, see {log}", now)

    def _record(self, slot: Slot, ended: StepExit, cause: str) -> None:
        self._state.history.append(
            ExitRecord(
                time=time.time(),
                role=slot.plan.role,
                index=slot.plan.index,
                attempt=self._state.attempt,
                incarnation=slot.state.incarnation,
                exit_code=ended.exit_code,
                cause=cause,
                log=str(ended.log.relative_to(self._folder.path)),
            )
        )

    def _plan_restart(self, slot: Slot, cause: str, now: float) -> None:
        is_train = slot.plan.role == "train"
        progress = self._newest_checkpoint() if is_train else -1
        delay = slot.budget.failed(lived_s=now - slot.started, progress=progress)
        if delay is None:
            since = " without a new checkpoint" if is_train else ""
            self._fail(
                f"{slot.name} failed {slot.budget.used + 1} times{since}; the last time: {cause}"
            )
            return
        slot.state.restarts += 1
        slot.wait_until(now + delay)
        _LOG.warning(
            "step starts again %s",
            kv(
                step=slot.name,
                in_s=delay,
                restart=slot.budget.used,  # since the last progress: what the limit counts
                limit=slot.budget.limit,
                restarts_of_attempt=slot.state.restarts,
            ),
        )
        if is_train:
            self._revive_producers(now)

    def _is_work_over(self, slot: Slot) -> bool:
        """Whether a failed step has nothing left to do: training is done, evaluations too.

        The rollouts evaluate the last weights after the last train step. One that ended well says
        that no evaluation is left.
        """
        train = next(s for s in self._slots if s.plan.role == "train")
        if train.state.status is not StepStatus.ENDED or slot.plan.role in ("dcs", "train"):
            return False
        others = (s for s in self._slots if s is not slot and s.plan.role == "rollout")
        is_evaluated = any(s.state.status is StepStatus.ENDED for s in others)
        return slot.plan.role != "rollout" or not self._config.data.eval or is_evaluated

    def _revive_producers(self, now: float) -> None:
        """Start roles again that ended because all samples were made: train may need more."""
        for slot in self._slots:
            if slot.state.status is StepStatus.ENDED:
                slot.wait_until(now)

    # -- members ----------------------------------------------------------------------------------

    def _judge(self, now: float) -> None:
        """Compare the member list with what should be alive; end silent steps."""
        snapshot = self._members.latest()
        self._judge_control(snapshot, now)
        leader = self._slots[0]
        # A request that was sent before this start of control may have been answered by either.
        if snapshot is None or snapshot.time <= max(self._seen, leader.started):
            return
        is_first = self._seen < leader.started
        # Half: heartbeats that waited for control are no silence of the members.
        if is_first or snapshot.time - self._seen > self._config.recovery.heartbeat_timeout_s / 2:
            self._control_up = now  # members are listed again with their next heartbeat
        self._seen = snapshot.time
        for slot in self._slots:
            if slot.is_judged and snapshot.time >= slot.started:
                self._judge_members(slot, snapshot, now)
        self._judge_progress(now)

    def _judge_control(self, snapshot: Snapshot | None, now: float) -> None:
        leader = self._slots[0]
        if not leader.is_judged:
            return
        answered = snapshot is not None and snapshot.time >= leader.started
        recovery = self._config.recovery
        limit = recovery.heartbeat_timeout_s if answered else recovery.start_timeout_s
        last = snapshot.time if snapshot is not None and answered else leader.started
        silent_s = now - max(last, self._awake_since)
        if silent_s > limit:
            leader.stop(now, 0.0, f"the control service did not answer for {silent_s:.0f} s")
            self._dirty = True

    def _judge_members(self, slot: Slot, snapshot: Snapshot, now: float) -> None:
        recovery = self._config.recovery
        listed = [
            m
            for m in snapshot.members
            if (m.role, m.index) == (slot.plan.role, slot.plan.index)
            and m.incarnation == slot.state.incarnation
        ]
        seen = {m.rank: snapshot.time - m.last_seen_s for m in listed}
        if len(seen) >= slot.plan.num_tasks:
            slot.complete_at = max(slot.complete_at, min(seen.values()))
            self._note_registered(slot)
        lead = next((m for m in listed if m.rank == 0), None)
        if lead is not None and lead.progress != slot.state.progress:
            self._note_progress(slot, lead.progress, now)
        starting = slot.state.status is StepStatus.STARTING
        limit = recovery.start_timeout_s if starting else recovery.heartbeat_timeout_s
        if now - max(slot.complete_at, self._control_up, self._awake_since) > limit:
            ranks = range(slot.plan.num_tasks)
            missing = [r for r in ranks if now - seen.get(r, -math.inf) > limit]
            what = "did not register" if starting else "gave no sign of life"
            slot.stop(now, 0.0, f"rank {missing[:8]} {what} within {limit:.0f} s")
            self._dirty = True

    def _note_registered(self, slot: Slot) -> None:
        if slot.state.status is StepStatus.STARTING:
            slot.state.status = StepStatus.RUNNING
            self._dirty = True
            _LOG.info("step registered %s", kv(step=slot.name))
            if self._state.status is RunStatus.STARTING and all(
                s.state.status in (StepStatus.RUNNING, StepStatus.ENDED) for s in self._slots
            ):
                self._state.status = RunStatus.RUNNING

    def _note_progress(
        self, slot: Slot, progress: dict[str, int | float | str], now: float
    ) -> None:
        slot.state.progress = dict(progress)
        self._dirty = True
        step = progress.get("step")
        if slot.plan.role == "train" and isinstance(step, int) and step != self._state.train_step:
            self._state.train_step = step
            self._progress_at = now

    def _judge_progress(self, now: float) -> None:
        limit = self._config.recovery.progress_timeout_s
        train = next(slot for slot in self._slots if slot.plan.role == "train")
        if not train.is_judged:
            return
        since = max(self._progress_at, train.started, self._awake_since)
        if now - since > limit:
            self._fail(
                f"no train step completed for {limit:.0f} s (train step {self._state.train_step} "
                f"of {self._config.run.train_steps}{self._told_drops()}); see logs/latest/train "
                "and logs/latest/rollout"
            )

    def _told_drops(self) -> str:
        """Groups that engines dropped, by reason: the usual cause of a run that stands still."""
        told = [
            f"{slot.name} dropped {drops}"
            for slot in self._slots
            if (drops := slot.state.progress.get("dropped"))
        ]
        return "".join(f"; {text}" for text in told[:4])

    # -- starts and the end -----------------------------------------------------------------------

    def _start_due(self, now: float) -> None:
        for slot in self._slots:
            if slot.state.status is not StepStatus.WAITING or now < slot.not_before:
                continue
            if slot.plan.role != "dcs" and not self._is_control_up():
                continue
            incarnation = self._state.incarnations.get(slot.name, 0) + 1
            self._state.incarnations[slot.name] = incarnation
            self._dirty = True
            self._save()  # before the start: a successor must never use this number again
            slot.start(self._backend, self._make_launch(slot, incarnation), now)

    def _is_control_up(self) -> bool:
        leader, snapshot = self._slots[0], self._members.latest()
        return leader.is_alive and snapshot is not None and snapshot.time >= leader.started

    def _check_end(self, now: float) -> None:
        others = [slot for slot in self._slots if slot.plan.role != "dcs"]
        train = next(slot for slot in others if slot.plan.role == "train")
        if train.state.status is not StepStatus.ENDED:
            self._drain_until = None
            return
        if self._drain_until is None:
            self._drain_until = now + self._config.recovery.progress_timeout_s
            self._state.train_step = self._config.run.train_steps
        left = [slot.name for slot in others if slot.state.status is not StepStatus.ENDED]
        if left and now < self._drain_until:
            return
        if left:
            _LOG.warning("steps did not end after the last train step %s", kv(steps=left))
        self._end(Outcome(RunStatus.DONE, "", 0))

    def _stop_in_order(self, now: float) -> None:
        """Stop all steps but the dcs; the dcs when they are gone: their last words arrive."""
        assert self._outcome is not None
        others = [slot for slot in self._slots if slot.plan.role != "dcs" and slot.is_alive]
        for slot in others or self._slots:
            if slot.is_alive and slot.state.status is not StepStatus.STOPPING:
                slot.stop(now, self._outcome.grace_s, "stopped at the end of the run")
                self._dirty = True

    def _clean_shm(self) -> None:
        """Remove what a killed dcs left in this host's shared memory (else the agents do it)."""
        for node in {node for slot in self._slots for part in slot.nodes for node in part}:
            shutil.rmtree(self._folder.shm(node), ignore_errors=True)


class _Wakeup:
    """Signals as data: handlers only note the number, the wake-up socket ends the wait."""

    _NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)

    def __init__(self) -> None:
        self._noted: signal.Signals | None = None
        self._reader, self._writer = socket.socketpair()
        self._old: dict[signal.Signals, object] = {}
        self._old_fd = -1

    def __enter__(self) -> "_Wakeup":
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*self._NUMBERS, signal.SIGCHLD):
            self._old[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned
        signal.set_wakeup_fd(self._old_fd)
        self._reader.close()
        self._writer.close()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._noted = signal.Signals(number)

    def take(self) -> signal.Signals | None:
        """Return the signal that came since the last call, if any but SIGCHLD."""
        noted, self._noted = self._noted, None
        return noted

    def wait(self, timeout_s: float) -> None:
        """Return when a signal came or after the time-out."""
        ready, _, _ = select.select([self._reader], [], [], timeout_s)
        if ready:
            self._reader.recv(4096)
