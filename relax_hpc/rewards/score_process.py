"""A scoring process: one JSON request per line in, one JSON answer per line out.

Started by `score_pool`; ends with its parent, at the end of its input, or by a kill.
"""

import ctypes
import functools
import json
import logging
import os
import resource
import signal
import sys
from typing import Any

from relax_hpc.rewards.gym_answer import gym_score
from relax_hpc.rewards.math_answer import is_correct

_PR_SET_PDEATHSIG = 1  # prctl(2)
_MAX_ADDRESS_SPACE = 4 * 1024**3  # bytes; sympy itself takes 0.3 GB, the rest is for one answer


def main() -> None:
    """Serve requests until the input ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the parent ended before the line above
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_ADDRESS_SPACE, _MAX_ADDRESS_SPACE))
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    # Libraries may print: keep the answers' channel for answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import_sympy()
    _write(answers, {"ready": True})
    for line in sys.stdin:
        _write(answers, answer(json.loads(line)))


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Score one request; a failure is an `error` with its reason."""
    try:
        score = _score(request)
    except Exception as err:  # noqa: BLE001 - process boundary: any failure is an invalid score
        return {"error": f"{request.get('kind')}: {type(err).__name__}: {err}"}
    return {"score": score, "accuracy": score}


def _score(request: dict[str, Any]) -> float:
    if request["kind"] == "math":
        return float(is_correct(request["text"], request["label"]))
    if request["kind"] == "gym":
        return gym_score(
            request["text"], request["task"], request["options"], int(request["index"])
        )
    raise ValueError(f"unknown kind {request['kind']!r}")


@functools.cache
def import_sympy() -> None:
    """Load what the first score would otherwise pay for."""
    import math_verify  # noqa: F401


def _write(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
