"""The forward-only loop on a fake backend: fields, weights that vanish, end of the run."""

import dataclasses
import types
from typing import Any

import numpy as np
import pytest
import torch

from relax_hpc.dcs.layout import Box, HostTensor
from relax_hpc.dcs.store import VersionId
from relax_hpc.errors import WeightSyncError
from relax_hpc.trainer.megatron_compat import import_megatron

import_megatron()

from relax_hpc.trainer import forward_only  # noqa: E402
from relax_hpc.trainer.forward_only import ForwardLoop, ForwardServices, as_torch  # noqa: E402
from tests.distributed.tiny_models import make_rows  # noqa: E402
from tests.unit.trainer.test_train_loop import FakeBackend  # noqa: E402


class ForwardBackend(FakeBackend):
    """Answers with the row's number of response tokens; notes which weights were loaded."""

    def share_numbers(self, values: np.ndarray) -> np.ndarray:
        return values

    def sum_in_replica(self, values: np.ndarray) -> np.ndarray:
        return values

    def boxes(self) -> list[Box]:
        return [Box("w", (1,), (2,))]

    def load_tensors(self, read: Any) -> None:
        self.log.append(float(read(Box("w", (1,), (2,)))))

    def forward_logprobs(self, batches: Any, num_rows: int, temperature: float) -> Any:
        spans = {span.row: span.size for batch in batches for span in batch.spans}
        assert sorted(spans) == list(range(num_rows))
        return [np.full(spans[i], temperature, np.float32) for i in range(num_rows)]


@dataclasses.dataclass
class Queue:
    batches: list[Any]
    put: list[Any] = dataclasses.field(default_factory=list)

    def take_rows(self, task: str, max_rows: int, timeout_s: float) -> Any:
        return self.batches.pop(0) if self.batches else []

    def put_fields(self, rows: Any, name: str, arrays: Any) -> None:
        self.put.append((name, [len(array) for array in arrays]))

    def status(self) -> Any:
        return types.SimpleNamespace(done=not self.batches)


@dataclasses.dataclass
class Weights:
    """Versions that appear one per question; some vanish before they are read."""

    versions: list[int]
    vanished: set[int] = dataclasses.field(default_factory=set)

    def wait_newer(self, have: VersionId | None, timeout_s: float) -> VersionId | None:
        assert timeout_s >= 0
        return VersionId(1, self.versions.pop(0)) if self.versions else None

    def fetch(self, version: VersionId, boxes: list[Box]) -> dict[Box, HostTensor]:
        if version.version in self.vanished:
            raise WeightSyncError("gone")
        whole = np.array([0, version.version], np.float32)
        whole.flags.writeable = False
        return {
            box: HostTensor("float32", box.shape, whole[box.slices].view(np.uint8)) for box in boxes
        }


def run(task: str, queue: Queue, weights: Weights | None) -> list[Any]:
    log: list[Any] = []
    services = ForwardServices(queue=queue, weights=weights, report=lambda **values: None)
    loop = ForwardLoop(
        task,
        ForwardBackend(log),  # type: ignore[arg-type]
        services,
        temperature=0.5,
        micro_batch_tokens=30,
        max_rows=4,
    )
    loop.run()
    return log


@pytest.mark.parametrize(
    ("task", "field"), [("ref", "ref_logprobs"), ("logprob", "train_logprobs")]
)
def test_every_row_gets_its_field(task: str, field: str) -> None:
    batches = [make_rows(1, 2), [], make_rows(2, 1)]
    sizes = [[r.num_tokens - r.num_prompt_tokens for r in rows] for rows in batches if rows]
    queue = Queue(batches)
    run(task, queue, Weights([0]) if task == "logprob" else None)
    assert queue.put == [(field, s) for s in sizes]


def test_newest_weights_are_loaded_before_rows() -> None:
    queue = Queue([make_rows(1, 1), make_rows(2, 1), make_rows(3, 1)])
    assert run("logprob", queue, Weights([0, 3, 4, 6], vanished={3})) == [0.0, 4.0, 6.0]


def test_no_weights_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_only, "_FIRST_WEIGHTS_S", 0.05)
    with pytest.raises(WeightSyncError, match="no weights were published"):
        run("logprob", Queue([]), Weights([]))


def test_host_tensor_as_torch() -> None:
    data = torch.arange(6, dtype=torch.bfloat16).view(torch.uint8).numpy()
    data.flags.writeable = False
    seen = as_torch(HostTensor("bfloat16", (2, 3), data))
    assert torch.equal(seen, torch.arange(6, dtype=torch.bfloat16).reshape(2, 3))


def test_a_box_that_is_viewed_in_a_larger_piece_as_torch() -> None:
    whole = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    words = whole.view(torch.uint8).numpy()
    seen = as_torch(HostTensor("bfloat16", (2, 3), words[1:3, 4:10]))
    assert torch.equal(seen, whole[1:3, 2:5])
    assert seen.data_ptr() == words[1:, 4:].ctypes.data, "no copy"
