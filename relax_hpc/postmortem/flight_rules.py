"""What flight-recorder dumps tell: who is behind, odd or silent in which process group."""

from collections.abc import Sequence

from relax_hpc.postmortem.flight import Dump
from relax_hpc.postmortem.verdict import Finding


def flight_findings(dumps: Sequence[Dump], world_size: int | None = None) -> list[Finding]:
    """Explain a failure from the dumps of one attempt, best explanation first; [] if nothing is off.

    Args:
        dumps: of `read_dumps`; unreadable ones and missing ranks are evidence, too.
        world_size: number of ranks if something else (a log) tells it.
    """
    return []
