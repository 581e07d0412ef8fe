"""In-process stand-ins for the transfer queue, the weight service and the metric writer."""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from relax_hpc.dcs.layout import Box, TensorSpec
from relax_hpc.records import Chunk, Row


@dataclasses.dataclass
class FakeQueue:
    """Serves rows by a function of the step; deals whole groups out to dp ranks in turn.

    Rows are lent: at `complete_step` their memory is overwritten, as the real queue's memory is by
    later groups, so that whoever still reads them computes something else.
    """

    rows_of_step: Callable[[int], list[Row]]
    chunks: int = 1
    calls: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    cuts: list[bytes | None] = dataclasses.field(default_factory=list)
    """What `begin_train` was given back."""
    lent: list[np.ndarray] = dataclasses.field(default_factory=list)

    def begin_train(self, step: int, cut: bytes | None = None) -> None:
        self.calls.append(("begin", step))
        self.cuts.append(cut)

    def cut_ledger(self, step: int, timeout_s: float) -> bytes:
        assert timeout_s > 0
        return f"ledger of {step}".encode()

    def take_chunk(
        self, step: int, index: int, dp_rank: int, dp_size: int, timeout_s: float
    ) -> Chunk:
        assert timeout_s > 0
        rows = self.rows_of_step(step)
        uids = list(dict.fromkeys(row.uid for row in rows))
        mine = uids[index :: self.chunks][dp_rank::dp_size]
        taken = [self._lend(row) for uid in mine for row in rows if row.uid == uid]
        return Chunk(task="train", step=step, index=index, rows=taken)

    def _lend(self, row: Row) -> Row:
        fields = {}
        for name, array in row.fields.items():
            memory = np.array(array)
            self.lent.append(memory)
            fields[name] = memory[...]
            fields[name].setflags(write=False)
        return msgspec.structs.replace(row, fields=fields)

    def complete_step(self, step: int) -> types.SimpleNamespace:
        self.calls.append(("complete", step))
        for memory in self.lent:
            memory.fill(1)
        self.lent.clear()
        return types.SimpleNamespace(uids=[f"group of {step}"])

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
        meet: Callable[[], object],
    ) -> None:
        assert 0 <= shard_rank < num_shards
        meet()
        self.version, self.num_shards = version, num_shards
        self.pieces, self.specs = list(pieces), list(specs)


@dataclasses.dataclass
class FakeKeeper:
    """Resumes from nothing; notes what is saved."""

    saved: list[tuple[int, bool]] = dataclasses.field(default_factory=list)
    start: int = 0
    start_has_hf: bool = False
    damaged: tuple[int, ...] = ()
    ledger: bytes | None = None
    """Of the checkpoint at `start`."""
    ledgers: dict[int, bytes | None] = dataclasses.field(default_factory=dict)

    def has_hf(self, step: int) -> bool:
        return (step, True) in self.saved or (step == self.start and self.start_has_hf)

    def save(self, step: int, with_hf: bool, ledger: bytes | None = None) -> Path:
        self.saved.append((step, with_hf))
        self.ledgers[step] = ledger
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
