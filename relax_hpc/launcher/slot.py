"""One step's place in the run: its present start, its end (asked for, then forced), its next start.

    WAITING --start--> STARTING --all registered--> RUNNING --poll--> gone: ENDED, or WAITING again
                          |                            |
                          +---------- stop ----------> STOPPING: SIGTERM, then SIGKILL, until gone

A successor starts only when `poll` said that every process of the step is gone.
"""

import dataclasses
import logging
import time

from relax_hpc.errors import SlurmError
from relax_hpc.launcher.plan import StepPlan
from relax_hpc.launcher.policy import RestartBudget
from relax_hpc.launcher.steps import StepBackend, StepExit, StepHandle, StepLaunch
from relax_hpc.log import kv
from relax_hpc.recovery.lifecycle import StepState, StepStatus

_LOG = logging.getLogger(__name__)

_KILL_AGAIN_S = 10.0
_GONE_TIMEOUT_S = 180.0
"""From the first SIGKILL until the step must be gone; beyond it a task hangs in the kernel."""


@dataclasses.dataclass(slots=True)
class Slot:
    """Runtime of one planned step. Times are time.monotonic()."""

    plan: StepPlan
    nodes: tuple[tuple[str, ...], ...]
    state: StepState
    budget: RestartBudget
    handle: StepHandle | None = None
    not_before: float = 0.0
    started: float = 0.0
    complete_at: float = 0.0
    """When all of its members were last known to be alive: the oldest of their last heartbeats."""
    stop_cause: str = ""
    """Why the supervisor ends this start: silence, a missing registration."""
    _kill_at: float = 0.0
    _gone_by: float = 0.0

    @property
    def name(self) -> str:
        """`ROLE-INDEX`."""
        return self.plan.name

    @property
    def is_alive(self) -> bool:
        """Whether processes of the step may exist."""
        return self.handle is not None

    @property
    def is_judged(self) -> bool:
        """Whether its members are expected to be alive (not while it is being ended)."""
        return self.state.status in (StepStatus.STARTING, StepStatus.RUNNING)

    def start(self, backend: StepBackend, launch: StepLaunch, now: float) -> None:
        """Start the step."""
        launch.log("").parent.mkdir(parents=True, exist_ok=True)
        self.state.status = StepStatus.STARTING
        self.state.incarnation = launch.incarnation
        self.state.started = time.time()
        self.state.progress = {}
        self.started = self.complete_at = now
        self.stop_cause = ""
        self.handle = backend.start(launch)
        nodes = sum(map(len, self.nodes))
        _LOG.info(
            "step started %s",
            kv(step=launch.step_name, tasks=self.plan.num_tasks, nodes=nodes),
        )

    def stop(self, now: float, grace_s: float, cause: str) -> None:
        """Begin to end the step: SIGTERM now, SIGKILL after the grace (0: at once)."""
        if self.handle is None or self.state.status is StepStatus.STOPPING:
            return
        self.state.status = StepStatus.STOPPING
        self.stop_cause = cause
        self._kill_at = now + grace_s
        self._gone_by = self._kill_at + _GONE_TIMEOUT_S
        if grace_s > 0:
            self.handle.terminate()

    def poll(self, now: float) -> StepExit | None:
        """Return how the step ended, once; force the end of a step that is being stopped.

        Raises:
            SlurmError: it cannot be ended.
        """
        if self.handle is None:
            return None
        if self.state.status is StepStatus.STOPPING and now >= self._kill_at:
            if now > self._gone_by:
                nodes = ",".join(node for part in self.nodes for node in part)
                raise SlurmError(
                    f"step {self.name} is there {_GONE_TIMEOUT_S:.0f} s after SIGKILL: a task "
                    f"hangs in the kernel (file system, GPU driver) on {nodes}"
                )
            self._kill_at = now + _KILL_AGAIN_S
            self.handle.kill()
        ended = self.handle.poll()
        if ended is not None:
            self.handle = None
            self.state.status = StepStatus.ENDED
        return ended

    def wait_until(self, when: float) -> None:
        """Plan the next start."""
        self.state.status = StepStatus.WAITING
        self.not_before = when
