"""Forward-only roles: `ref` (log-probs of the starting model) and `logprob` (of the old policy).

    transfer queue                        this role (all ranks of a replica)       weight service
    take_rows(task)  ---- rows -------->  micro-batches, forward, no gradient
      waits for put_group                   logprob: before each batch of rows  <-- newest version
    put_fields       <--- log-probs ----  of the response tokens, float32 [R]
      unblocks the train step's take_chunk

Each replica works alone: it takes rows as they come. The role ends when the queue says that all
train steps are done. `logprob` computes with the newest weights at that moment; for a sample that
is trained at version v they are of a version <= v.
"""

import dataclasses
import logging
import time
import typing
import warnings
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from relax_hpc.dcs.layout import Box, HostTensor
from relax_hpc.dcs.store import VersionId
from relax_hpc.errors import WeightSyncError
from relax_hpc.log import kv
from relax_hpc.records import Row
from relax_hpc.trainer.backend import Backend
from relax_hpc.trainer.micro_batch import build_micro_batch, cut_rows

_log = logging.getLogger(__name__)

_WAIT_S = 5.0
_FIRST_WEIGHTS_S = 600.0
_FIELD = {"ref": "ref_logprobs", "logprob": "train_logprobs"}


class RowQueue(typing.Protocol):
    """The transfer queue as a forward-only role uses it."""

    def take_rows(self, task: str, max_rows: int, timeout_s: float) -> list[Row]:
        """Lease rows that lack this task's field; [] at the end of the wait."""
        ...

    def put_fields(self, rows: Sequence[Row], name: str, arrays: Sequence[np.ndarray]) -> object:
        """Put the field of these rows."""
        ...

    def status(self) -> typing.Any:
        """Describe the queue; `.done` when all train steps are complete."""
        ...


class Subscriber(typing.Protocol):
    """The weight service as a reader uses it (dcs.client.WeightSubscriber)."""

    def wait_newer(self, have: VersionId | None, timeout_s: float) -> VersionId | None:
        """Wait for a version newer than `have`."""
        ...

    def fetch(self, version: VersionId, boxes: Iterable[Box]) -> Mapping[Box, HostTensor]:
        """Read boxes of a version: all of them or none."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForwardServices:
    """What the loop talks to; `queue` is used on leaders only. `weights` None: fixed weights."""

    queue: RowQueue
    weights: Subscriber | None
    report: typing.Callable[..., None]
    wants_stop: typing.Callable[[], bool] = lambda: False


class ForwardLoop:
    """Runs one forward-only role until the run is done. One object per rank."""

    def __init__(
        self,
        task: str,
        backend: Backend,
        services: ForwardServices,
        *,
        temperature: float,
        micro_batch_tokens: int,
        max_rows: int,
    ) -> None:
        """Make the loop.

        Args:
            task: ref or logprob.
            backend: with the starting model loaded.
            services: queue and weights.
            temperature: the one that samples were drawn with.
            micro_batch_tokens: token budget of one forward pass.
            max_rows: rows per lease; few, so that the train step gets them early.
        """
        self._task, self._backend, self._services = task, backend, services
        self._temperature, self._budget, self._max_rows = temperature, micro_batch_tokens, max_rows
        self._version: VersionId | None = None
        self._num_rows = 0

    def run(self) -> None:
        """Serve until all train steps are done (or asked to stop)."""
        place = self._backend.place
        self._refresh(_FIRST_WEIGHTS_S)
        while True:
            rows, is_over = self._take() if place.is_leader else ([], False)
            over = self._backend.share_numbers(np.array([int(is_over)]))
            if over[0]:
                _log.info("role done %s", kv(task=self._task, rows=self._num_rows))
                return
            shared = self._backend.share_rows(rows if place.is_leader else None)
            if shared:
                self._refresh(0.0)
                self._forward(shared)

    def _take(self) -> tuple[list[Row], bool]:
        """Return rows, or whether the role is over when there are none."""
        queue = self._services.queue
        if self._services.wants_stop():
            return [], True
        rows = queue.take_rows(self._task, self._max_rows, _WAIT_S)
        return rows, not rows and bool(queue.status().done)

    def _forward(self, rows: Sequence[Row]) -> None:
        backend = self._backend
        cut = cut_rows([row.num_tokens for row in rows], self._budget)
        batches = [
            build_micro_batch(rows, indices, {}, (), backend.align, backend.device)
            for indices in cut
        ]
        values = backend.forward_logprobs(batches, len(rows), self._temperature)
        self._num_rows += len(rows)
        if backend.place.is_leader:
            self._services.queue.put_fields(rows, _FIELD[self._task], values)
            self._services.report(rows=self._num_rows)

    # -- weights ---------------------------------------------------------------------------------

    def _refresh(self, timeout_s: float) -> None:
        """Load the newest weights, if this role follows the policy; all ranks load the same."""
        weights = self._services.weights
        if weights is None:
            return
        deadline = time.monotonic() + timeout_s
        while True:
            version = self._newest(weights, max(0.0, deadline - time.monotonic()))
            if version is None and self._version is None and time.monotonic() >= deadline:
                raise WeightSyncError(
                    f"role {self._task}: no weights were published in {timeout_s:g} s; look into "
                    "the log of the train step"
                )
            if version is None and self._version is not None:
                return
            if version is not None and self._load(weights, version):
                return

    def _newest(self, weights: Subscriber, timeout_s: float) -> VersionId | None:
        """The leader looks, all ranks of the replica hear; (0, 0) stands for none."""
        found = (
            weights.wait_newer(self._version, timeout_s) if self._backend.place.is_leader else None
        )
        numbers = [0, 0] if found is None else [found.incarnation, found.version]
        incarnation, version = self._backend.share_numbers(np.array(numbers))
        return VersionId(int(incarnation), int(version)) if incarnation else None

    def _load(self, weights: Subscriber, version: VersionId) -> bool:
        """Fetch and load; False: it vanished meanwhile (for any rank), ask for the newest again."""
        tensors: Mapping[Box, HostTensor] | None = None
        try:
            tensors = weights.fetch(version, self._backend.boxes())
        except WeightSyncError as err:
            _log.warning("weights vanished %s", kv(version=version.version, reason=err))
        # Ranks of a replica must not mix versions.
        is_missing = np.array([float(tensors is None)])
        if self._backend.sum_in_replica(is_missing)[0] or tensors is None:
            return False
        found = tensors
        self._backend.load_tensors(lambda box: as_torch(found[box]))
        self._version = version
        return True


def as_torch(tensor: HostTensor) -> torch.Tensor:
    """View a host tensor as torch without a copy. It may be read-only: never write to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(tensor.data)
    return flat.view(getattr(torch, tensor.dtype)).reshape(tensor.shape)
