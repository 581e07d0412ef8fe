"""A daemon thread that tells the registry every 2 s that its process lives and how far it is."""

import logging
import threading
from collections.abc import Callable

from relax_hpc.errors import RelaxError, StaleIncarnationError
from relax_hpc.log import kv

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0


class Heartbeat:
    """Calls `beat` every interval until stopped; a failed beat is logged, never raised."""

    def __init__(self, beat: Callable[[], None], interval_s: float = INTERVAL_S) -> None:
        self._beat = beat
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self.is_replaced = False
        """True when a newer incarnation took this role: the process must end."""

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self._beat()
            except StaleIncarnationError as err:
                self.is_replaced = True
                logger.error("replaced %s", kv(note=str(err)))
                return
            except RelaxError as err:  # the dcs step may be restarting: the next beat tries again
                logger.warning("heartbeat failed %s", kv(note=str(err)))
