"""What every process of an engine does before anything else: die with its parent, keep the key
out of the log, and (on a CPU) find stand-ins for packages that need a GPU.

Read from the environment, all set by `relax_hpc.rollout.sglang_server`:
RELAX_SGLANG            1: this is an engine process of a run
RELAX_SGLANG_DEVICE     cpu or cuda
RELAX_SGLANG_KEY_FILE   file with the API key (mode 0600)
RELAX_SGLANG_PARENT     process id of the job step that owns the engine
RELAX_SGLANG_WEIGHTS    weight files and loader reports
"""

import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def prepare() -> None:
    """Set up this process; called from sitecustomize."""
    if "--multiprocessing-fork" in sys.orig_argv:  # a scheduler or the detokenizer
        die_with_parent(None)
    _redact_key()
    if os.environ.get("RELAX_SGLANG_DEVICE") == "cpu":
        from relax_sglang import stand_ins

        stand_ins.install()


def die_with_parent(parent: int | None) -> None:
    """SIGKILL this process when the thread that started it ends (prctl(2), PR_SET_PDEATHSIG).

    A job step that is killed with SIGKILL cannot clean up, and a server that outlives it would
    keep its port and memory. With `parent`, a parent that died before the call is noticed too.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def api_key() -> str:
    """Return the engine's API key."""
    return Path(os.environ["RELAX_SGLANG_KEY_FILE"]).read_text(encoding="ascii").strip()


def _redact_key() -> None:
    """Replace the API key in log records: SGLang logs all of its arguments when it starts."""
    key = api_key()
    make_record = logging.getLogRecordFactory()

    def factory(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        if key in str(record.msg):
            record.msg = str(record.msg).replace(key, "***")
        if record.args and key in str(record.args):
            record.msg, record.args = record.getMessage().replace(key, "***"), ()
        return record

    logging.setLogRecordFactory(factory)
