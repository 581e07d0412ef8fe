"""A flag that signals set: handlers do nothing else, the loop looks at it between chunks."""

import os
import signal
import types


class StopFlag:
    """Set by any of its signals. Make it in the main thread."""

    def __init__(self, *signals: signal.Signals) -> None:
        self._number = 0
        for number in signals:
            signal.signal(number, self._set)

    def _set(self, number: int, frame: types.FrameType | None) -> None:
        del frame
        self._number = number

    @property
    def is_set(self) -> bool:
        """True after the first signal."""
        return self._number != 0

    @property
    def exit_code(self) -> int:
        """75 (try again) after SIGUSR2, else 128 + the signal's number, as a shell would say."""
        return os.EX_TEMPFAIL if self._number in (0, signal.SIGUSR2) else 128 + self._number
