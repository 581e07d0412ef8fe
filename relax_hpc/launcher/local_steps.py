"""Steps as child processes of this machine (`launcher = "local"`): the srun of a workstation.

Like `srun --kill-on-bad-exit=1`: the first task that fails ends the others. Each task leads a
process group of its own, which is killed when the task ends, so that engine servers and data
workers do not outlive it; and each task dies with the supervisor (PR_SET_PDEATHSIG).
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping

from relax_hpc.control.identity import LocalPlace
from relax_hpc.launcher import child
from relax_hpc.launcher.steps import StepExit, StepHandle, StepLaunch, describe_end


class LocalBackend:
    """Starts steps on this machine."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)

    def start(self, launch: StepLaunch) -> StepHandle:
        """Start one process per task."""
        return _LocalHandle(launch, self._environ)


class _LocalHandle:
    def __init__(self, launch: StepLaunch, environ: Mapping[str, str]) -> None:
        self._launch = launch
        self._first: StepExit | None = None
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        for place in _places(launch):
            self._running[place.rank] = _spawn(launch, place, environ)

    def poll(self) -> StepExit | None:
        for rank, process in list(self._running.items()):
            if not _has_ended(process):
                continue
            _signal_group(process, signal.SIGKILL)  # before wait: the zombie still holds the id
            code = process.wait()
            del self._running[rank]
            if code != 0 and self._first is None:
                self._first = self._describe(rank, code)
                self.kill()
        if self._running:
            return None
        return self._first or StepExit(exit_code=0, cause="", log=self._launch.log("rank0"))

    def terminate(self) -> None:
        for process in self._running.values():
            process.terminate()

    def kill(self) -> None:
        for process in self._running.values():
            _signal_group(process, signal.SIGKILL)

    def _describe(self, rank: int, code: int) -> StepExit:
        shell_code = code if code >= 0 else 128 - code
        return StepExit(
            exit_code=shell_code,
            cause=f"rank {rank} {describe_end(shell_code)}{self._launch.told_cause(rank)}",
            log=self._launch.log(f"rank{rank}"),
        )


def _places(launch: StepLaunch) -> list[LocalPlace]:
    places = []
    for part, nodes in zip(launch.plan.parts, launch.nodes, strict=True):
        for node in nodes:
            for local_rank in range(part.tasks_per_node):
                places.append((local_rank, node))
    return [
        LocalPlace(rank=rank, world=len(places), local_rank=local_rank, node=node)
        for rank, (local_rank, node) in enumerate(places)
    ]


def _spawn(
    launch: StepLaunch, place: LocalPlace, environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    environment = {**environ, **launch.environment(place)}
    with launch.log(f"rank{place.rank}").open("ab") as log:
        return subprocess.Popen(
            child.command(list(launch.program), signal.SIGKILL),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, options) is not None


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself a moment ago
        os.killpg(process.pid, number)
