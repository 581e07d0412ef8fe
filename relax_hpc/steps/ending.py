"""How every step ends: an error in the log, its sentence for the supervisor, an exit code."""

import logging
from collections.abc import Callable
from pathlib import Path

from relax_hpc.control.identity import Identity
from relax_hpc.errors import RelaxError
from relax_hpc.log import kv
from relax_hpc.runfolder import write_atomic

_log = logging.getLogger(__name__)

_MAX_CHARACTERS = 1000


def run_step(name: str, body: Callable[[Identity], int]) -> int:
    """Run a step's body as the process boundary; returns the exit code.

    A RelaxError is logged in one line, and its sentence written to `cause_file` for the supervisor;
    anything else is a bug, whose traceback is in the log only.
    """
    identity = None
    try:
        identity = Identity.from_env()
        return body(identity)
    except RelaxError as err:
        _log.error("%s step failed %s", name, kv(error=type(err).__name__, reason=err))
        if identity is not None:
            _write_cause(cause_file(identity), err)
        return err.exit_code
    except Exception:  # noqa: BLE001 - the process boundary: logged, the supervisor restarts us
        _log.exception("%s step failed", name)
        return 1


def cause_file(identity: Identity) -> Path:
    """RUN/logs/attempt_N/ROLE/INDEX-iK-rankR.cause: beside the log of this start."""
    name = f"{identity.index}-i{identity.incarnation}-rank{identity.rank}.cause"
    return identity.run.logs(identity.attempt, identity.role) / name


def sentence(error: RelaxError) -> str:
    """Render an error as one line: the first line, and the last where the end of a log follows."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    text = " ".join([lines[0], *lines[1:][-1:]]) if lines else type(error).__name__
    # Names of files may be no valid Unicode.
    return text[:_MAX_CHARACTERS].encode(errors="backslashreplace").decode()


def _write_cause(path: Path, error: RelaxError) -> None:
    """Write it; the first of a start's processes that fails (a service of dcs) has the cause."""
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, sentence(error) + "\n")
    except OSError as err:  # a full disk may be the very cause; the log has the sentence as well
        _log.warning("cause not written %s", kv(path=path, reason=err))
