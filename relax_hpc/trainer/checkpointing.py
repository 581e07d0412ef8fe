"""Save and resume of the train step: all ranks together, one cut of model, optimizer, step and RNG,
and of the queue's ledger: which prompts the weights have been trained on.

Who does what: every rank writes its shards and digests its share of the files, rank 0 opens and
commits the folder (recovery.checkpoint). Ranks meet at reductions of the backend, so that no rank
reads or renames before all have written.
"""

import logging
import typing
from pathlib import Path

import numpy as np
import torch

from relax_hpc.errors import CheckpointError
from relax_hpc.log import kv
from relax_hpc.recovery import checkpoint
from relax_hpc.trainer.backend import Backend
from relax_hpc.trainer.cpu_device import is_cpu

_log = logging.getLogger(__name__)
_STATE = "state"
HF = "hf"
"""Sub-folder of a checkpoint with the model in Hugging Face format."""
LEDGER = "ledger.bin"
"""The transfer queue's ledger as of the checkpoint's step; absent when the queue did not answer."""


class CheckpointKeeper:
    """Saves to and resumes from `RUN/checkpoints`. Every method is called by all ranks."""

    def __init__(self, checkpoints: Path, keep: int, backend: Backend, source: Path) -> None:
        """Args: checkpoints: the folder; keep: how many stay; source: HF folder of the model."""
        self._checkpoints, self._keep = checkpoints, keep
        self._backend, self._source = backend, source
        self._damaged: tuple[int, ...] = ()
        self._ledger: bytes | None = None

    @property
    def ledger(self) -> bytes | None:
        """Ledger of the checkpoint that `resume` loaded; rank 0 only, None when it has none."""
        return self._ledger

    @property
    def damaged(self) -> tuple[int, ...]:
        """Steps of the checkpoints that `resume` skipped, newest first."""
        return self._damaged

    def save(self, step: int, with_hf: bool, ledger: bytes | None = None) -> Path:
        """Write `step_N` and remove the oldest; returns its folder.

        Args:
            step: applied optimizer steps.
            with_hf: also the model in Hugging Face format.
            ledger: the queue's ledger as of this step; on rank 0 only.

        Raises:
            CheckpointError: the disk is full, or the folder cannot be written.
        """
        try:
            return self._save(step, with_hf, ledger)
        except OSError as err:
            raise CheckpointError(
                f"checkpoint of step {step} cannot be written to {self._checkpoints} "
                f"({err.strerror}); free space or quota there"
            ) from err

    def _save(self, step: int, with_hf: bool, ledger: bytes | None) -> Path:
        place, backend = self._backend.place, self._backend
        folder = checkpoint.temporary_path_of(self._checkpoints, step)
        if place.global_rank == 0:
            checkpoint.begin(self._checkpoints, step)
            (folder / _STATE).mkdir()
            if with_hf:
                (folder / HF).mkdir()
            if ledger is not None:
                (folder / LEDGER).write_bytes(ledger)
        self._meet()
        backend.save(folder / _STATE)
        if with_hf:
            backend.export_hf(folder / HF, self._source)
        (folder / _rng_name(place.global_rank)).write_bytes(_rng_state())
        self._meet()
        checkpoint.digest_share(folder, place.global_rank, place.world_size)
        self._meet()
        final = checkpoint.path_of(self._checkpoints, step)
        if place.global_rank == 0:
            info = {"world_size": str(place.world_size), "dp_size": str(place.dp_size)}
            checkpoint.commit(self._checkpoints, step, info)
            deleted = checkpoint.retain(self._checkpoints, self._keep, saved=step)
            _log.info("checkpoint saved %s", kv(step=step, folder=final, deleted=deleted))
        self._meet()
        return final

    def resume(self) -> int:
        """Load the newest whole checkpoint and return its step; 0, nothing loaded, without one."""
        step = self._newest_whole()
        if step is None:
            if self._damaged and self._backend.place.global_rank == 0:
                _log.error(
                    "every checkpoint is damaged, training starts from step 0 %s",
                    kv(folder=self._checkpoints, steps=self._damaged),
                )
            return 0
        folder = checkpoint.path_of(self._checkpoints, step)
        self._backend.load(folder / _STATE)
        rng = folder / _rng_name(self._backend.place.global_rank)
        if rng.is_file():  # absent when the run goes on with more ranks; nothing there draws
            _set_rng_state(rng.read_bytes())
        ledger = folder / LEDGER
        if self._backend.place.global_rank == 0 and ledger.is_file():
            self._ledger = ledger.read_bytes()
        _log.info("resumed %s", kv(step=step, folder=folder))
        return step

    def has_hf(self, step: int) -> bool:
        """Whether the checkpoint of a step holds the model in Hugging Face format."""
        folder = checkpoint.path_of(self._checkpoints, step)
        has = False
        if self._backend.place.global_rank == 0 and folder.exists():
            files = checkpoint.read_manifest(folder).files
            has = any(name.startswith(f"{HF}/") for name in files)
        return self._from_rank_0(int(has)) == 1

    def _newest_whole(self) -> int | None:
        """Agree on the newest checkpoint of which every rank found its share whole."""
        candidates = checkpoint.steps(self._checkpoints)
        tried: list[int] = []
        while True:
            self._damaged = tuple(tried)
            left = [s for s in candidates if s not in tried]
            # Rank 0 decides: a listing of a shared file system may differ between nodes.
            step = self._from_rank_0(max(left, default=-1))
            if step < 0:
                return None
            if self._is_whole(checkpoint.path_of(self._checkpoints, step)):
                return step
            tried.append(step)

    def _from_rank_0(self, value: int) -> int:
        mine = value if self._backend.place.global_rank == 0 else 0
        return int(self._backend.sum_over_ranks(np.array([float(mine)]))[0])

    def _is_whole(self, folder: Path) -> bool:
        place = self._backend.place
        whole = checkpoint.is_whole_alone(folder, place.global_rank, place.world_size)
        return not self._backend.sum_over_ranks(np.array([0.0 if whole else 1.0])).any()

    def _meet(self) -> None:
        self._backend.sum_over_ranks(np.zeros(1))


def _rng_name(rank: int) -> str:
    return f"rng-{rank}.bin"


def _rng_state() -> bytes:
    states = [torch.get_rng_state()]
    if not is_cpu():
        states.append(torch.cuda.get_rng_state())
    return b"".join(
        len(data).to_bytes(8, "little") + data for data in (s.numpy().tobytes() for s in states)
    )


def _set_rng_state(data: bytes) -> None:
    states = []
    while data:
        size = int.from_bytes(data[:8], "little")
        if len(data) < 8 + size:
            raise CheckpointError(f"RNG state: {len(data) - 8} bytes, expected {size}")
        states.append(torch.tensor(np.frombuffer(data[8 : 8 + size], np.uint8)))
        data = data[8 + size :]
    setters: list[typing.Callable[[torch.Tensor], None]] = [torch.set_rng_state]
    if not is_cpu():
        setters.append(torch.cuda.set_rng_state)
    for setter, state in zip(setters, states, strict=False):  # a GPU run may go on with a CPU one
        setter(state)
