"""Settings of steps that make the next failure readable. `docs/postmortem.md` explains each.

Only what costs nothing while all is well; a variable that the user or the site has set, under its
old or its new name, is left alone. Left out on purpose: TORCH_NCCL_DESYNC_DEBUG (a store write per
collective and rank), TORCH_DISTRIBUTED_DEBUG=DETAIL (an extra collective before each),
NCCL_DEBUG=INFO (megabytes per rank): for the second time that something fails.
"""

from collections.abc import Mapping
from pathlib import Path

TRACE_NAME = "nccl_trace_rank_"
"""torch appends the global rank. Post-mortem knows dumps by this name."""


def recorder_environment(prefix: Path, *known: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that none of the environments `known` has.

    Args:
        prefix: of the flight recorder's dump files; its folder exists and all nodes see it.
        known: environments that go before: the user's, the site's.
    """
    settings = {
        # Entries per rank, about 1 KB each in host memory; some hundred train steps deep.
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): str(prefix),
        ("NCCL_DEBUG",): "WARN",
        # Python's stacks of all threads at SIGSEGV, SIGABRT, SIGBUS; no cost before.
        ("PYTHONFAULTHANDLER",): "1",
    }
    return {
        names[0]: value
        for names, value in settings.items()
        if not any(name in environ for name in names for environ in known)
    }
