"""Requests that wait for something to change, in the order they came."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from relax_hpc.control.rpc import Caller, Responder


class Waiter:
    """One waiting request."""

    __slots__ = ("caller", "number", "request", "responder", "signal", "timer")

    def __init__(
        self, number: int, signal: str, caller: Caller, request: Any, responder: Responder
    ) -> None:
        self.number = number
        self.signal = signal
        self.caller = caller
        self.request = request
        self.responder = responder
        self.timer: asyncio.TimerHandle | None = None


class WaitingRoom:
    """Waiters by what they wait for. Whoever is answered, or whose time is over, leaves."""

    def __init__(self) -> None:
        self._waiters: dict[str, dict[int, Waiter]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return sum(len(waiters) for waiters in self._waiters.values())

    def enter(
        self,
        signal: str,
        caller: Caller,
        request: Any,
        responder: Responder,
        at_end: Callable[[Waiter], None],
    ) -> None:
        """Wait for `signal`, at most `request.wait_s` seconds; then `at_end` answers."""
        waiter = Waiter(next(self._numbers), signal, caller, request, responder)

        def end() -> None:
            self.leave(waiter)
            at_end(waiter)

        wait_s = max(request.wait_s, 0.0)
        waiter.timer = asyncio.get_running_loop().call_later(wait_s, end)
        self._waiters.setdefault(signal, {})[waiter.number] = waiter

    def waiting(self, signal: str) -> list[Waiter]:
        """Who waits for `signal`, first come first."""
        waiters = self._waiters.get(signal)
        return [] if waiters is None else list(waiters.values())

    def leave(self, waiter: Waiter) -> None:
        """The waiter was answered."""
        if waiter.timer is not None:
            waiter.timer.cancel()
        waiters = self._waiters.get(waiter.signal)
        if waiters is not None:
            waiters.pop(waiter.number, None)
            if not waiters:
                del self._waiters[waiter.signal]
