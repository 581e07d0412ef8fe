"""The summary of a finished run: what `RelaxJob.result()` returns."""

import time
from typing import Any

from relax_hpc.metrics.metric import read_metrics
from relax_hpc.recovery.lifecycle import RunState
from relax_hpc.runfolder import RunFolder


def summarise(folder: RunFolder, state: RunState) -> dict[str, Any]:
    """Return run folder, train steps, minutes since the first start, each metric's last value."""
    last: dict[str, tuple[int, float]] = {}
    for record in read_metrics(folder):
        for name, value in record.metrics.items():
            if value is not None and (name not in last or record.step >= last[name][0]):
                last[name] = (record.step, value)
    return {
        "run": str(folder.path),
        "job_id": state.job_id,
        "attempts": state.attempt,
        "train_steps": state.train_step,
        "minutes": round((time.time() - state.started) / 60, 3),
        "metrics": {name: value for name, (_, value) in sorted(last.items())},
    }
