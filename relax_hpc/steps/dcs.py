"""The dcs step: control plane, sample queue, weights. `python -m relax_hpc.steps.dcs`.

    every task                    task 0 of the first dcs step also leads:
      node agent (thread)           control   registry, heartbeats, keys   child process
      weight keeper (thread)        transfer  queue controller             child process
      membership                    weights   weight coordinator           child process

The services are processes of their own, so that none waits for another's GIL. They die with task 0
(parent-death signal) and task 0 ends when one of them dies, or does not answer a ping for
`recovery.heartbeat_timeout_s`: the fault domain is the step, and the next incarnation adopts
journals and shared memory.

End: srun and scancel send SIGTERM to every process. That may be the end of the run, or the
aftermath of one killed task, where shared memory must stay for the next incarnation. So the tasks
agree first: rank 0 asks every agent of the step whether it lives, and publishes the verdict.

Exit codes: 0 ended in order; 1 something failed; 2 wrong configuration; 143 ended by SIGTERM, and
shared memory was left for the next incarnation.
"""

import argparse
import ctypes
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from relax_hpc.config import RecoveryConfig, config_from_json
from relax_hpc.control import registry
from relax_hpc.control.identity import Identity
from relax_hpc.control.pulse import Pulse
from relax_hpc.control.registry import MemberInfo, Membership, Registry, members
from relax_hpc.control.rpc import PING, Empty, RpcClient, RpcServer
from relax_hpc.dcs import coordinator
from relax_hpc.dcs.coordinator import WeightCoordinator
from relax_hpc.dcs.keeper import WeightKeeper
from relax_hpc.errors import ControlError, DeadlineError, StaleIncarnationError
from relax_hpc.log import kv, setup_logging
from relax_hpc.rollout import sglang_shm
from relax_hpc.steps.ending import run_step
from relax_hpc.transfer import wire
from relax_hpc.transfer.agent import NodeAgent
from relax_hpc.transfer.controller import QueueController
from relax_hpc.transfer.leftovers import reap_dead_runs
from relax_hpc.transfer.queue_rules import QueueRulesConfig

_log = logging.getLogger(__name__)

_TERMINATED = 128 + signal.SIGTERM
_PR_SET_PDEATHSIG = 1
_SERVICES = (registry.SERVICE, wire.SERVICE, coordinator.SERVICE)
_ENDING = {signal.SIGTERM, signal.SIGINT}
_WATCHED = {*_ENDING, signal.SIGCHLD}
_TICK_S = 1.0
_PULSE_S = 3.0
"""Between two pings of a service."""
_PING_S = 3.0
_AGREE_S = 10.0
"""For the verdict of the end, and for the other tasks to leave: within Slurm's KillWait (30 s)."""
_SERVICE_END_S = 8.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one task of the step, or one of its services; returns the exit code."""
    parser = argparse.ArgumentParser(prog="relax_hpc.steps.dcs", description="The dcs step.")
    parser.add_argument("--service", choices=_SERVICES, help="internal: run this service only")
    parser.add_argument("--parent", type=int, help="internal: process id of the task")
    options = parser.parse_args(arguments)
    name = "dcs" if options.service is None else f"dcs-{options.service}"

    def body(identity: Identity) -> int:
        setup_logging(name, identity.rank, identity.local_rank)
        if options.service is not None:
            return _run_service(options.service, options.parent, identity)
        return DcsTask(identity).run()

    return run_step(name, body)


# ---------------------------------------------------------------------------------------------
# A service process
# ---------------------------------------------------------------------------------------------


def _run_service(name: str, parent: int | None, identity: Identity) -> int:
    """Serve until the task closes our standard input; the task handles the step's signals."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    _die_with(parent)
    server = RpcServer(identity.run, name, identity)
    _build_service(name, server, identity)
    threading.Thread(target=_stop_at_end_of_input, args=(server,), daemon=True).start()
    server.run()
    return 0


def _build_service(name: str, server: RpcServer, identity: Identity) -> None:
    if name == registry.SERVICE:
        Registry(server, identity)
    elif name == wire.SERVICE:
        text = identity.run.config.read_text(encoding="utf-8")
        config = config_from_json(text, str(identity.run.config))
        QueueController(server, identity, QueueRulesConfig.from_config(config))
    else:
        WeightCoordinator(server, identity)


def _stop_at_end_of_input(server: RpcServer) -> None:
    sys.stdin.buffer.read()
    server.stop()


def _die_with(parent: int | None) -> None:
    """Get SIGKILL when the task dies, however it dies (prctl(2), PR_SET_PDEATHSIG)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise ControlError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if parent is not None and os.getppid() != parent:  # it died before the call took effect
        raise ControlError(f"task {parent} of the dcs step ended while its service started")


@dataclasses.dataclass(frozen=True, slots=True)
class _Service:
    name: str
    process: "subprocess.Popen[bytes]"
    pulse: Pulse

    def check(self, recovery: RecoveryConfig) -> None:
        """Look at it; call it every `_TICK_S`.

        Raises:
            ControlError: it has ended, or does not answer.
        """
        code, pid = self.process.poll(), self.process.pid
        if code is not None:
            raise ControlError(
                f"service {self.name} (pid {pid}) ended with {code}; its last lines above say why"
            )
        # It replays its journal and waits for disks before its first answer.
        has_answered = self.pulse.has_answered
        limit_s = recovery.heartbeat_timeout_s if has_answered else recovery.start_timeout_s
        if self.pulse.look() > limit_s:
            raise ControlError(
                f"service {self.name} (pid {pid}) did not answer a ping for {limit_s:g} s: it is "
                "stopped or hangs (a slow disk under the run folder?); the step starts again"
            )


def _start_services(identity: Identity) -> list[_Service]:
    program = [sys.executable, "-m", "relax_hpc.steps.dcs", "--parent", str(os.getpid())]
    return [
        _Service(
            name,
            subprocess.Popen([*program, "--service", name], stdin=subprocess.PIPE),
            Pulse(identity, name, interval_s=_PULSE_S, max_look_s=2 * _TICK_S),
        )
        for name in _SERVICES
    ]


def _stop_services(services: Sequence[_Service]) -> None:
    """Ask all to end (end of input), then make sure."""
    for service in services:
        service.pulse.stop()
        if service.process.stdin is not None:
            service.process.stdin.close()
    deadline = time.monotonic() + _SERVICE_END_S
    for service in services:
        try:
            service.process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            _log.warning("service killed %s", kv(service=service.name, waited_s=_SERVICE_END_S))
            service.process.kill()
            service.process.wait()


# ---------------------------------------------------------------------------------------------
# A task
# ---------------------------------------------------------------------------------------------


class DcsTask:
    """One task of the step: the agent of its node, and the services when it leads."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        text = identity.run.config.read_text(encoding="utf-8")
        config = config_from_json(text, str(identity.run.config))
        self._recovery = config.recovery
        self._services: list[_Service] = []
        self._membership = Membership(identity)
        self._control = RpcClient(identity.run, registry.SERVICE, identity)
        self._agent = NodeAgent(identity, config.transfer)
        self._keeper = WeightKeeper(identity)

    def run(self) -> int:
        """Serve until SIGTERM or a failure; returns the exit code."""
        # Blocked before threads and children exist: they inherit it, and sigtimedwait gets them.
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        if self._identity.rank == 0 and self._identity.index == 0:
            self._services = _start_services(self._identity)
        is_orderly = False
        try:
            reap_dead_runs()
            self._keeper.register(self._agent.data)
            self._agent.start()
            self._keeper.start()
            if self._join():
                self._watch()
            is_orderly = self._agree()
        finally:
            self._keeper.stop()
            if is_orderly:
                self._remove_engines_memory()
            self._agent.close(remove=is_orderly)
            if is_orderly:  # else the next incarnation replaces us, or control is gone
                self._leave()
            _stop_services(self._services)
        _log.info("dcs task ends %s", kv(orderly=is_orderly))
        return 0 if is_orderly else _TERMINATED

    def _remove_engines_memory(self) -> None:
        """Remove what engines that were killed left outside of this run's folder in shm."""
        for record in self._identity.run.shm(self._identity.node).glob(sglang_shm.RECORDS):
            sglang_shm.remove(record)

    def _join(self) -> bool:
        """Register; False when SIGTERM came first. Looks at the services between short tries."""
        deadline = time.monotonic() + self._recovery.start_timeout_s
        while True:
            try:
                self._membership.join({"node": self._identity.node}, timeout_s=2.0)
            except DeadlineError:
                if time.monotonic() > deadline:
                    raise
            else:
                return True
            if self._is_asked_to_end(0.0):
                return False

    def _watch(self) -> None:
        while not self._is_asked_to_end(_TICK_S):
            continue

    def _is_asked_to_end(self, wait_s: float) -> bool:
        """Wait for a signal; True for SIGTERM or SIGINT.

        Raises:
            ControlError: a part of the task has ended or hangs.
        """
        info = signal.sigtimedwait(_WATCHED, wait_s)
        # Not "anything but SIGCHLD": a wait that a SIGSTOP carried past its time-out returns an
        # uninitialised siginfo_t (CPython 3.11).
        if info is not None and info.si_signo in _ENDING:
            _log.info("asked to end %s", kv(signal=signal.Signals(info.si_signo).name))
            return True
        for service in self._services:
            service.check(self._recovery)
        if not self._agent.server.is_running:
            raise ControlError(f"the agent of node {self._identity.node} has ended; see above")
        if self._membership.is_replaced:
            raise StaleIncarnationError("a newer dcs step is registered: this one must end")
        return False

    # -- the end ------------------------------------------------------------------------------

    def _agree(self) -> bool:
        """Is this the end of the whole step, so that shared memory may go?"""
        me = self._identity
        key = f"dcs/{me.index}/{me.attempt}.{me.incarnation}/end"
        try:
            if me.rank == 0:
                verdict = "remove" if self._is_step_alive() else "keep"
                self._membership.publish(key, verdict, timeout_s=_PING_S)
            else:
                members(self._control, timeout_s=_PING_S)  # dead with rank 0: no need to wait long
                verdict = self._membership.wait_for(key, _AGREE_S, "verdict of rank 0 on the end")
        except ControlError as err:
            _log.warning("shared memory is kept %s", kv(reason=err))
            return False
        return verdict == "remove"

    def _is_step_alive(self) -> bool:
        """Do all tasks of this step answer? If one was killed, the step will be started again."""
        me = self._identity
        tasks = [
            m
            for m in members(self._control, timeout_s=_PING_S)
            if (m.role, m.index, m.incarnation) == (me.role, me.index, me.incarnation)
        ]
        if len(tasks) < me.world:
            _log.warning("tasks are missing %s", kv(registered=len(tasks), world=me.world))
            return False
        return all(self._answers(task) for task in tasks)

    def _answers(self, task: MemberInfo) -> bool:
        agent = RpcClient(self._identity.run, wire.agent_service(task.node), self._identity)
        try:
            agent.call(PING, Empty(), Empty, timeout_s=_PING_S, why="does the task live?")
        except ControlError as err:
            _log.warning("task is dead %s", kv(rank=task.rank, node=task.node, reason=err))
            return False
        finally:
            agent.close()
        return True

    def _leave(self) -> None:
        """Leave; the leader lets the other tasks read the verdict and leave before it."""
        if self._services:
            self._wait_for_others()
        self._membership.leave(timeout_s=_PING_S)

    def _wait_for_others(self) -> None:
        me, deadline = self._identity, time.monotonic() + _AGREE_S
        while time.monotonic() < deadline:
            try:
                known = members(self._control, timeout_s=_PING_S)
            except ControlError as err:
                _log.warning("others are not waited for %s", kv(reason=err))
                return
            others = [
                m for m in known if m.role == me.role and (m.index, m.rank) != (me.index, me.rank)
            ]
            if not others:
                return
            time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
