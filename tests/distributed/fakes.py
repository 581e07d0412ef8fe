"""In-process stand-ins for the transfer queue, the weight service and the metric writer."""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from relax_hpc.dcs.layout import Box, TensorSpec
from relax_hpc.records import Chunk, Row


@dataclasses.dataclass
class FakeQueue:
    """Serves rows by a function of the step; deals whole groups out to dp ranks in turn."""

    rows_of_step: Callable[[int], list[Row]]
    chunks: int = 1
    calls: list[tuple[str, int]] = dataclasses.field(default_factory=list)

    def begin_train(self, step: int) -> None:
        self.calls.append(("begin", step))

    def take_chunk(
        self, step: int, index: int, dp_rank: int, dp_size: int, timeout_s: float
    ) -> Chunk:
        assert timeout_s > 0
        rows = self.rows_of_step(step)
        uids = list(dict.fromkeys(row.uid for row in rows))
        mine = uids[index :: self.chunks][dp_rank::dp_size]
        taken = [row for uid in mine for row in rows if row.uid == uid]
        return Chunk(task="train", step=step, index=index, rows=taken)

    def complete_step(self, step: int) -> None:
        self.calls.append(("complete", step))

    def status(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(generating=3, ready=0, assigned=1)


@dataclasses.dataclass
class FakePublisher:
    """Keeps the last version's pieces."""

    version: int = -1
    num_shards: int = 0
    pieces: list[tuple[Box, str, np.ndarray]] = dataclasses.field(default_factory=list)
    specs: list[TensorSpec] = dataclasses.field(default_factory=list)

    def publish(
        self,
        version: int,
        pieces: Iterable[tuple[Box, str, np.ndarray]],
        specs: Sequence[TensorSpec],
        num_shards: int,
        shard_rank: int,
    ) -> None:
        assert 0 <= shard_rank < num_shards
        self.version, self.num_shards = version, num_shards
        self.pieces, self.specs = list(pieces), list(specs)


@dataclasses.dataclass
class FakeKeeper:
    """Resumes from nothing; notes what is saved."""

    saved: list[tuple[int, bool]] = dataclasses.field(default_factory=list)
    start: int = 0
    start_has_hf: bool = False
    damaged: tuple[int, ...] = ()

    def has_hf(self, step: int) -> bool:
        return (step, True) in self.saved or (step == self.start and self.start_has_hf)

    def save(self, step: int, with_hf: bool) -> Path:
        self.saved.append((step, with_hf))
        return Path()

    def resume(self) -> int:
        return self.start


@dataclasses.dataclass
class FakeReporter:
    """Keeps the metrics by step."""

    metrics: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)
    said: list[dict[str, typing.Any]] = dataclasses.field(default_factory=list)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics[step] = dict(metrics)

    def progress(self, **values: typing.Any) -> None:
        self.said.append(values)
