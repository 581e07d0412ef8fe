"""Post-mortems of steps that died: `relax-hpc postmortem` as a child process with a deadline.

    consumes     the logs and dumps of one start of one step
    produces     ExitRecord.verdict (state.json, `relax-hpc status`), RUN/postmortem/STEP.html
    waits for    nothing: `poll` looks; whoever ends the run waits at most `DEADLINE_S`

A process of its own: it may crash, hang or eat memory on whatever a dead job wrote, and the
supervisor goes on restarting steps.
"""

import collections
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO

import msgspec

from relax_hpc.launcher import child
from relax_hpc.log import kv
from relax_hpc.recovery.lifecycle import ExitRecord
from relax_hpc.runfolder import RunFolder

_LOG = logging.getLogger(__name__)

DEADLINE_S = 60.0
"""For one step; logs of a thousand ranks take half of it."""
_MAX_WAITING = 4
"""Steps that die while one is examined; of more only the first are: they are echoes."""
_HAS_ANSWER = (0, 1)
"""Exit codes of `relax-hpc postmortem`: a verdict, undetermined."""


class _Verdict(msgspec.Struct):
    confidence: str
    sentence: str
    class_: str = msgspec.field(name="class")


class _Report(msgspec.Struct):
    verdict: _Verdict


@dataclasses.dataclass(slots=True)
class _Case:
    record: ExitRecord
    step: str
    logs: list[str]


class Autopsy:
    """Examines dead steps, one at a time. Used by one thread."""

    def __init__(
        self,
        folder: RunFolder,
        deadline_s: float = DEADLINE_S,
        program: Sequence[str] = (sys.executable, "-m", "relax_hpc.cli", "postmortem"),
    ) -> None:
        self._folder, self._deadline_s, self._program = folder, deadline_s, program
        self._waiting: collections.deque[_Case] = collections.deque()
        self._case: _Case | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._until = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a verdict is still to come."""
        return self._process is not None or bool(self._waiting)

    def begin(self, record: ExitRecord) -> None:
        """Ask for the verdict on an end of a step; `poll` writes it into the record."""
        step = f"{record.index}-i{record.incarnation}"
        logs = self._folder.logs(record.attempt, record.role)
        files = [str(path) for path in sorted(logs.glob(f"{step}-*"))]
        if files and len(self._waiting) < _MAX_WAITING:
            self._waiting.append(_Case(record, f"{record.role}-{step}", files))

    def poll(self, now: float) -> bool:
        """Go on, without waiting; True when a record has got its verdict.

        Args:
            now: time.monotonic().
        """
        if self._process is None:
            if self._waiting:
                self._start(self._waiting.popleft(), now)
            return False
        code = self._process.poll()
        if code is None and now < self._until:
            return False
        self._end_process()
        if code is None:
            _LOG.warning("post-mortem took too long %s", kv(seconds=self._deadline_s))
        return code is not None and self._note(code)

    def close(self) -> None:
        """Drop everything: the run was cancelled, or nobody will read it."""
        self._waiting.clear()
        self._end_process()

    def _start(self, case: _Case, now: float) -> None:
        folder = self._folder.path / "postmortem"
        page = str(folder / f"{case.step}.html")
        program = [*self._program, "--json", "--html", page, "--", *case.logs]
        try:
            folder.mkdir(exist_ok=True)
            self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _note
            self._process = subprocess.Popen(
                child.command(program, signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as err:  # a full disk, no more processes: the run goes on without
            _LOG.warning("no post-mortem %s", kv(step=case.step, reason=err))
            return
        self._case, self._until = case, now + self._deadline_s

    def _end_process(self) -> None:
        """End the process group and reap the process."""
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._process = None

    def _note(self, code: int) -> bool:
        assert self._case is not None
        assert self._output is not None
        record = self._case.record
        try:
            with self._output as output:
                output.seek(0)
                verdict = msgspec.json.decode(output.read(), type=_Report).verdict
        except (OSError, msgspec.MsgspecError) as err:
            _LOG.warning("post-mortem failed %s", kv(step=self._case.step, code=code, reason=err))
            return False
        if code not in _HAS_ANSWER:
            return False
        said = f"{verdict.sentence} ({verdict.confidence}: {verdict.class_})"
        # Names in it come from logs; `status` prints it on terminals.
        record.verdict = ascii(said)[1:-1] if not (said.isascii() and said.isprintable()) else said
        _LOG.error("post-mortem %s", kv(step=self._case.step, verdict=record.verdict))
        return True
