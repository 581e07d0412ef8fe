"""Logging of job steps: one line per record, key=value, with host, rank and role in front."""

import logging
import os
import socket
import sys
import time

_FORMAT = "%(asctime)s %(levelname).1s {place} {role} %(module)s %(message)s"


class _UtcFormatter(logging.Formatter):
    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.exc_info else text.replace("\n", " | ")


def setup_logging(role: str, role_rank: int = 0, local_rank: int = 0) -> None:
    """Log to stderr: INFO and up from rank 0 of a role, WARNING and up from the others.

    RELAX_LOG_LEVEL (a level name) overrides the level of every rank.
    """
    default = "INFO" if role_rank == 0 else "WARNING"
    level = os.environ.get("RELAX_LOG_LEVEL", default)
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    place = f"{host}:{local_rank}".replace("%", "%%")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_UtcFormatter(_FORMAT.format(place=place, role=f"{role}/{role_rank}")))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def kv(**fields: object) -> str:
    """Render fields as `key=value`; values with blanks are quoted. For log messages."""
    return " ".join(f"{key}={_quote(value)}" for key, value in fields.items())


def _quote(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return repr(text) if not text or any(c.isspace() or c == '"' for c in text) else text
