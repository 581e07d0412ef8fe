"""From reads to tensors: views where one mapped piece has all of a wanted box, else one copy."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from relax_hpc.dcs.layout import Box, HostTensor, TensorSpec, itemsize
from relax_hpc.dcs.pull import PullPlan, Read
from relax_hpc.dcs.store import Piece, ShardManifest
from relax_hpc.errors import WeightSyncError


class Assembly:
    """The wanted boxes of a plan while they are filled.

    Args:
        plan: What is wanted.
        mapped: Indices of the shards whose reads come through `view`; all others come to `place`.
    """

    def __init__(self, plan: PullPlan, mapped: Collection[int] = ()) -> None:
        self._plan = plan
        self._arrays: dict[int, np.ndarray] = {}
        viewed = {
            read.target
            for shard in mapped
            for read in plan.reads[shard]
            if read.box == plan.wanted[read.target]
        }
        for target, (box, dtype) in enumerate(zip(plan.wanted, plan.dtypes, strict=True)):
            if target not in viewed:
                self._arrays[target] = np.empty(box.shape, dtype=_word(dtype, box.name))

    def view(self, shard: int, manifest: ShardManifest, data: np.ndarray) -> None:
        """Take a mapped shard's reads: no copy where one of them is all of its wanted box.

        Args:
            shard: Its index in the plan.
            manifest: Of the shard.
            data: All its bytes, uint8 [manifest.nbytes]; what is read of it was verified.
        """
        for read in self._plan.reads[shard]:
            part = piece_part(manifest.pieces[read.piece], data, read.box)
            if read.box == self._plan.wanted[read.target]:
                self._arrays[read.target] = part
            else:
                self._slot(read.target, read.box)[...] = part

    def place(self, read: Read, data: np.ndarray) -> None:
        """Copy the verified bytes of one read to their place; several threads may at once.

        Args:
            read: One of the plan, or a part of it.
            data: uint8 [its bytes], C order of the box.
        """
        slot = self._slot(read.target, read.box)
        slot[...] = data.view(slot.dtype).reshape(slot.shape)

    def tensors(self) -> list[HostTensor]:
        """Return the wanted boxes in the plan's order, read-only; all reads must have come."""
        for copy in self._plan.copies:
            self._slot(copy.target, copy.box)[...] = self._slot(copy.source, copy.box)
        boxes = zip(self._plan.wanted, self._plan.dtypes, strict=True)
        return [_tensor(box, dtype, self._arrays[i]) for i, (box, dtype) in enumerate(boxes)]

    def _slot(self, target: int, box: Box) -> np.ndarray:
        index = _slices_in(box, self._plan.wanted[target])
        slot: np.ndarray = self._arrays[target][index]
        return slot


def piece_part(piece: Piece, data: np.ndarray, box: Box) -> np.ndarray:
    """View a box of a piece: the box's shape, elements as unsigned words of their size.

    Args:
        piece: Of a shard.
        data: All bytes of the shard, uint8 [nbytes].
        box: Inside of the piece's.
    """
    raw = data[piece.offset : piece.offset + piece.nbytes]
    words = raw.view(_word(piece.dtype, piece.box.name)).reshape(piece.box.shape)
    part: np.ndarray = words[_slices_in(box, piece.box)]
    return part


def check_dtypes(specs: Sequence[TensorSpec], manifest: ShardManifest) -> None:
    """Refuse pieces whose dtype is not their tensor's: nobody converts weights silently."""
    dtypes = {spec.name: spec.dtype for spec in specs}
    for piece in manifest.pieces:
        expected = dtypes.get(piece.box.name, piece.dtype)  # unknown names: see check_coverage
        if piece.dtype != expected:
            raise WeightSyncError(
                f"weights {piece.box} of {manifest.version} are {piece.dtype} in the shard of rank "
                f"{manifest.rank}, but the tensor is {expected}"
            )


def _word(dtype: str, name: str) -> np.dtype:
    return np.dtype(f"u{itemsize(dtype, name)}")  # bits of one element, whatever it is


def _slices_in(box: Box, outer: Box) -> tuple[Any, ...]:
    """Index of a box in an array of the elements of an outer one; a view also of a scalar."""
    edges = zip(box.start, box.stop, outer.start, strict=True)
    return (*(slice(a - first, b - first) for a, b, first in edges), ...)


def _tensor(box: Box, dtype: str, words: np.ndarray) -> HostTensor:
    if words.flags.c_contiguous:
        words = words.reshape(-1)
    data = words.view(np.uint8)  # of a part of a piece: strided, its last axis is contiguous
    data.flags.writeable = False
    return HostTensor(dtype, box.shape, data)
