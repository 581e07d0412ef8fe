"""Restart policy: how often, and after which pause, a step that died starts again. Pure."""

import dataclasses

_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 60.0
_HEALTHY_S = 300.0
"""A step that lived for this long starts again without pause: it is no start-up failure."""


@dataclasses.dataclass(slots=True)
class RestartBudget:
    """Restarts of one step. `failed` says when it may start again, or that it may not.

    Progress (train: a new checkpoint) gives the whole budget back, because then the failures cost
    time but not the run.
    """

    limit: int
    used: int = 0
    quick: int = 0
    """Failures in a row of a step that lived only shortly."""
    progress: int = -1

    def failed(self, *, lived_s: float, progress: int = -1) -> float | None:
        """Count a failure.

        Args:
            lived_s: seconds from the step's start to its end.
            progress: newest checkpoint's step; -1 for roles without one.

        Returns:
            Seconds to wait before the next start, None when the budget is used up.
        """
        if progress > self.progress:
            self.progress = progress
            self.used = 0
        if self.used >= self.limit:
            return None
        self.used += 1
        if lived_s >= _HEALTHY_S:
            self.quick = 0
            return 0.0
        self.quick += 1
        return float(min(_MAX_DELAY_S, _FIRST_DELAY_S * 2 ** (self.quick - 1)))
