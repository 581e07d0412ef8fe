"""Checkpoints whose duration is noted: the supervisor stops that long before the job's end."""

import typing

from relax_hpc.metrics.metric import SAVE_SPAN
from relax_hpc.metrics.writers import MetricWriter

if typing.TYPE_CHECKING:
    from relax_hpc.trainer.loop import Keeper


class TimedKeeper:
    """A keeper that writes a span around each save."""

    def __init__(self, keeper: "Keeper", writer: MetricWriter) -> None:
        self._keeper, self._writer = keeper, writer

    def save(self, step: int, with_hf: bool, ledger: bytes | None = None) -> object:
        """Write a checkpoint and how long that took."""
        with self._writer.span(SAVE_SPAN, step):
            return self._keeper.save(step, with_hf, ledger)

    def resume(self) -> int:
        """Load the newest whole checkpoint; return its step or 0."""
        return self._keeper.resume()

    def has_hf(self, step: int) -> bool:
        """Whether the checkpoint of a step holds the model in Hugging Face format."""
        return self._keeper.has_hf(step)

    @property
    def damaged(self) -> tuple[int, ...]:
        """Steps of the checkpoints that `resume` skipped."""
        return self._keeper.damaged

    @property
    def ledger(self) -> bytes | None:
        """Ledger of the checkpoint that `resume` loaded; rank 0 only."""
        return self._keeper.ledger
