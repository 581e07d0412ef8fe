"""Does a service still turn its loop? A process that exists but does not answer is dead too."""

import logging
import threading
import time

from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import PING, Empty, RpcClient
from relax_hpc.errors import ControlError
from relax_hpc.log import kv

logger = logging.getLogger(__name__)


class Pulse:
    """Pings one service from a daemon thread; `look` says for how long it has been silent.

    Silence is counted in looks, each worth `max_look_s` at most: a watcher that was stopped itself
    (SIGSTOP, a suspended node) does not take its own absence for the service's.
    """

    def __init__(
        self, identity: Identity, service: str, *, interval_s: float, max_look_s: float
    ) -> None:
        """Start to ping.

        Args:
            identity: of the process that watches.
            service: name of the service.
            interval_s: pause between an answer and the next ping.
            max_look_s: longest time between two looks that counts as silence.
        """
        self._service, self._interval_s, self._max_look_s = service, interval_s, max_look_s
        self._client = RpcClient(identity.run, service, identity)
        self._stopping = threading.Event()
        self._num_answers = self._num_seen = 0
        self._silent_s, self._looked = 0.0, time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"pulse-{service}", daemon=True)
        self._thread.start()

    @property
    def has_answered(self) -> bool:
        """True once it answered: until then it is still starting."""
        return self._num_answers > 0

    def look(self) -> float:
        """Return the seconds of silence since the last answer. Call it often, from one thread."""
        now = time.monotonic()
        self._silent_s += min(now - self._looked, self._max_look_s)
        self._looked = now
        if self._num_answers != self._num_seen:
            self._num_seen = self._num_answers
            self._silent_s = 0.0
        return self._silent_s

    def stop(self) -> None:
        """Ping no more; a ping that waits ends with the process."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                # Long: an answer that comes late is a sign of life as well, and `look` judges.
                self._client.call(PING, Empty(), Empty, timeout_s=60.0, why="does it live?")
            except ControlError as err:
                logger.warning("ping failed %s", kv(service=self._service, note=str(err)))
            else:
                if self._num_answers == 0:
                    logger.info("service answers %s", kv(service=self._service))
                self._num_answers += 1
            self._stopping.wait(self._interval_s)
        self._client.close()
