"""A process that does one round of work for each line it reads, and its handle.

    bench                             side (any interpreter)
      ask({"work": "text", ...}) --->   handler(**request) -> dict
                                 <---   one line of JSON on the standard output
      close()                    --->   end of input: the side ends by itself

Both ends have deadlines: a side that does not answer is killed with all that it started, and one
whose bench is dead ends with its input.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MARK = "RELAX_BENCH_ID"
"""Environment variable that every process of a benchmark inherits: so leftovers are found."""
_END_S = 30.0
_ORPHAN_S = 10.0

Answer = dict[str, Any]


class SideError(RuntimeError):
    """A side failed; holds what it said last."""


class Side:
    """Handle of a side: started at once, asked in turns, ended by `close`."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self._name = name
        self._log = log
        # Not a session of its own: Linux would give each session an equal share of the cores.
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                env=dict(environment), process_group=0,
            )  # fmt: skip
        self._pending = b""

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, **request: Any) -> None:
        """Ask for something; `receive` gets the answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as err:
            raise self._error("has ended") from err

    def receive(self, timeout_s: float = 120.0) -> Answer:
        """Wait for the next answer.

        Raises:
            SideError: it failed, ended, or did not answer in time.
        """
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                raise self._error(f"did not answer in {timeout_s:g} s")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise self._error("has ended")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise self._error(f"failed: {answer['error']}")
        return answer

    def ask(self, timeout_s: float = 120.0, **request: Any) -> Answer:
        """Send and receive."""
        self.send(**request)
        return self.receive(timeout_s)

    def close(self) -> None:
        """End the side; what does not end by itself is killed with its children."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_END_S)

    def _error(self, what: str) -> SideError:
        lines = self._log.read_text(errors="replace").splitlines()[-12:]
        return SideError("\n".join([f"{self._name} (pid {self.pid}) {what}; {self._log}:", *lines]))


def serve(handlers: Mapping[str, Callable[..., Answer]]) -> None:
    """Answer the lines of the standard input until its end; `do` names the handler."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries that print do not spoil the answers
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = handlers[request.pop("do")](**request)
        except Exception as err:  # noqa: BLE001 - a process boundary: the bench raises it
            answer = {"error": f"{type(err).__name__}: {err}"}
        answers.write(json.dumps(answer) + "\n")


def _end_with(bench: int) -> None:
    """End this process some seconds after its bench, if it still waits for something then."""
    while os.getppid() == bench:
        time.sleep(1.0)
    time.sleep(_ORPHAN_S)
    os._exit(1)


def end_leftovers(mark: str) -> list[str]:
    """End what still carries our mark (a killed side's children); returns their commands."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in entry.joinpath("environ").read_bytes().split(b"\0"):
                command = entry.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append(f"{entry.name} {command[:120].strip()}")
                os.kill(int(entry.name), signal.SIGKILL)
    return found
