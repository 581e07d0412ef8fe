"""Settings of glibc that rollout tasks start with: they cannot be changed later."""

import re
from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
_STREAMING = "glibc.cpu.x86_non_temporal_threshold=1048576"
"""memcpy writes pieces of 1 MiB past the cache: large fields are copied and hashed at 0.92 of the
speed of one large memcpy instead of 0.79 (docs/transfer.md). By default glibc does so from about
the size of the last level cache on. Where it knows no such name it ignores it.
"""


def copy_environment(*known: Mapping[str, str]) -> dict[str, str]:
    """Return `GLIBC_TUNABLES` with streaming copies added; {} if somebody chose their threshold.

    Args:
        known: environments that the task gets, the strongest first: the site's, the user's.
    """
    told = next((environ[VARIABLE] for environ in known if VARIABLE in environ), "")
    if re.search(r"\bx86_non_temporal_threshold=", told):
        return {}
    return {VARIABLE: f"{told}:{_STREAMING}" if told else _STREAMING}
