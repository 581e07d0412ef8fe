"""When an attempt must stop so that its last checkpoint is whole before the time limit.

Slurm's warning (`--signal=B:USR2@N`) comes a fixed time before the end, and up to a minute early. A
save may take longer than that: this clock counts from the job's end by the saves that were seen.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from relax_hpc import slurm
from relax_hpc.errors import ConfigError, SlurmError
from relax_hpc.log import kv
from relax_hpc.metrics.metric import SAVE_SPAN, read_spans
from relax_hpc.runfolder import RunFolder

_LOG = logging.getLogger(__name__)

MARGIN_S = 60.0
"""On top of a save: to stop the other steps, and for a requeue to reach slurmctld."""
MIN_GRACE_S = 60.0
_READ_INTERVAL_S = 30.0
"""Between two looks at the spans of the run."""


def save_p95_s(durations_s: Sequence[float]) -> float:
    """Return the 95th percentile of durations (nearest rank); 0.0 without any."""
    ordered = sorted(durations_s)
    return ordered[math.ceil(0.95 * len(ordered)) - 1] if ordered else 0.0


def saves_of(folder: RunFolder) -> list[float]:
    """Return how long the checkpoints of a run took, in seconds."""
    spans = read_spans(folder)
    return [
        span.end - span.start
        for writer, found in spans.items()
        for span in found
        if writer.startswith("train-") and span.name == SAVE_SPAN and span.end >= span.start
    ]


class Deadline:
    """The end of a Slurm job, and when to begin to stop. Used by one thread.

    Args:
        end: Unix time of the job's end; None = it has none.
        saves: durations of the saves so far, in seconds.
        ask_end: asks Slurm for the end, which an operator may have moved; None = no answer.
    """

    def __init__(
        self,
        end: float | None,
        saves: Callable[[], Sequence[float]],
        ask_end: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._end, self._saves, self._ask_end = end, saves, ask_end
        self._save_s, self._read_at = 0.0, -math.inf

    @property
    def grace_s(self) -> float:
        """Time that steps get to stop: a save and half of the margin."""
        return max(MIN_GRACE_S, self._save_s + MARGIN_S / 2)

    @property
    def stop_at(self) -> float:
        """Unix time at which to begin: the end less a save and the margin; never = inf."""
        return math.inf if self._end is None else self._end - (self._save_s + MARGIN_S)

    def is_due(self, now: float) -> bool:
        """Say whether to begin to stop. Slurm is asked once more before, not at every call.

        Args:
            now: Unix time.
        """
        if self._end is not None and now - self._read_at >= _READ_INTERVAL_S:
            self._read_at, self._save_s = now, save_p95_s(self._saves())
        if now < self.stop_at:
            return False
        end = self._ask_end()
        if end is not None and end != self._end:
            _LOG.info("the job's end was moved %s", kv(old=self._end, new=end))
            self._end = end
        return now >= self.stop_at


def job_deadline(environ: Mapping[str, str], job_id: str, folder: RunFolder) -> Deadline:
    """Return the deadline of the job that this process runs in.

    Slurm says the end in SLURM_JOB_END_TIME; where it does not, scontrol is asked once.

    Args:
        environ: of the batch script.
        job_id: to ask scontrol for; empty without Slurm.
        folder: the run.
    """
    end: float | None = None
    if job_id:
        told = environ.get("SLURM_JOB_END_TIME", "")
        end = float(told) if told.isdigit() else _asked_end(job_id)
    return Deadline(end, lambda: saves_of(folder), lambda: _asked_end(job_id))


def _asked_end(job_id: str) -> float | None:
    try:
        told = [fields.get("EndTime", "") for fields in slurm.show_job(job_id)]
    except (SlurmError, ConfigError) as err:
        _LOG.warning("the job's end is not known %s", kv(job=job_id, error=err))
        return None
    ends = [end for text in told if (end := parse_time(text)) is not None]
    return min(ends, default=None)  # components of a het job may end apart


def parse_time(text: str) -> float | None:
    """Read a time as scontrol prints it, local and without zone; None for Unknown."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None
