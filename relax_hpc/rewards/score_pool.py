"""Worker processes that score one answer at a time and can be killed.

Symbolic mathematics on a model's output may run for ever or take all memory, in C code that no
signal or thread interrupts. So it is done in child processes with a wall-clock limit; one that is
over its limit is killed and replaced, and the pool keeps its capacity.

    ScorePool.score  --JSON line on stdin-->  python -m relax_hpc.rewards.score_process
                     <--JSON line on stdout-
"""

import asyncio
import json
import logging
import math
import os
import sys
from typing import Any

from relax_hpc.errors import RelaxError
from relax_hpc.log import kv
from relax_hpc.records import RewardResult

_logger = logging.getLogger(__name__)

_MAX_WORKERS = 4
_START_TIMEOUT_S = 120.0
"""Imports sympy from a shared file system that a thousand nodes may be reading at once."""


def invalid(reason: str) -> RewardResult:
    """Return a result that says why there is no score."""
    return RewardResult(score=math.nan, accuracy=math.nan, valid=False, reason=reason)


class ScoreProcessDiedError(RelaxError):
    """A worker ended without an answer (killed, or out of memory)."""


class ScorePool:
    """Up to `num_workers` scoring processes, started when needed.

    Use from one event loop; any number of tasks may call `score` at the same time.
    """

    def __init__(self, timeout_s: float, num_workers: int = 0) -> None:
        """Remember limits; nothing is started here.

        Args:
            timeout_s: wall-clock limit of one score, without the wait for a free worker.
            num_workers: processes; 0 = one per usable CPU, at most 4.
        """
        if num_workers == 0:
            num_workers = min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
        self._timeout_s = timeout_s
        self._free = asyncio.Semaphore(num_workers)
        self._idle: list[_ScoreProcess] = []

    async def score(self, request: dict[str, Any]) -> RewardResult:
        """Score one request; `valid=False` with the reason when the limit is over or it fails."""
        async with self._free:
            try:
                return await self._ask(request)
            except ScoreProcessDiedError as err:
                # Once more is safe: scoring has no side effects. Twice: it is the answer's fault.
                _logger.warning("score worker died, trying once more %s", kv(cause=err))
            try:
                return await self._ask(request)
            except ScoreProcessDiedError as err:
                return invalid(str(err))

    async def close(self) -> None:
        """End the idle processes."""
        while self._idle:
            await self._idle.pop().kill()

    async def _ask(self, request: dict[str, Any]) -> RewardResult:
        worker = self._idle.pop() if self._idle else await _ScoreProcess.start()
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await worker.ask(request)
        except TimeoutError:
            await worker.kill()
            return invalid(f"no score within {self._timeout_s:g} s")
        except BaseException:
            # Also when cancelled: its late answer must not be read as that of the next request.
            await worker.kill()
            raise
        self._idle.append(worker)
        if "error" in answer:
            return invalid(str(answer["error"]))
        return RewardResult(score=float(answer["score"]), accuracy=float(answer["accuracy"]))


class _ScoreProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> "_ScoreProcess":
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "relax_hpc.rewards.score_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        worker = cls(process)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await worker._read()  # its "ready" line: imports are not part of a score's limit
        except TimeoutError as err:
            await worker.kill()
            raise ScoreProcessDiedError(
                f"score worker pid={process.pid} did not start within {_START_TIMEOUT_S:g} s"
            ) from err
        except BaseException:  # cancelled: nobody else knows this process
            await worker.kill()
            raise
        return worker

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as err:
            raise self._died() from err
        return await self._read()

    async def kill(self) -> None:
        if self._process.returncode is None:
            try:
                self._process.kill()
            except ProcessLookupError:
                _logger.debug("score worker had already ended %s", kv(pid=self._process.pid))
        await self._process.wait()

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _died(self) -> ScoreProcessDiedError:
        code = self._process.returncode
        return ScoreProcessDiedError(f"score worker pid={self._process.pid} ended, code {code}")
