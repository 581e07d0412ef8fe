"""From shards to whole tensors: bit-exact, without a copy where one piece is the whole tensor."""

from collections.abc import Iterable, Sequence

import numpy as np

from relax_hpc.dcs.layout import HostTensor, TensorSpec, itemsize
from relax_hpc.dcs.store import Piece, ShardManifest
from relax_hpc.errors import WeightSyncError


def assemble(
    specs: Sequence[TensorSpec], shards: Iterable[tuple[ShardManifest, np.ndarray]]
) -> dict[str, HostTensor]:
    """Put the pieces of all shards together.

    Args:
        specs: The whole canonical tensors; the coordinator proved that the shards cover them.
        shards: Manifest and bytes (uint8 [nbytes]) of each shard, checksums already verified.

    Returns:
        Every tensor of `specs` by name. A tensor that is one piece is a view of the shard's bytes.

    Raises:
        WeightSyncError: a piece has another dtype than its tensor, or a tensor has no piece.
    """
    found: dict[str, list[tuple[Piece, np.ndarray]]] = {}
    for manifest, data in shards:
        for piece in manifest.pieces:
            raw = data[piece.offset : piece.offset + piece.nbytes]
            found.setdefault(piece.box.name, []).append((piece, raw))
    return {spec.name: _one_tensor(spec, found.get(spec.name, [])) for spec in specs}


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


def _one_tensor(spec: TensorSpec, pieces: list[tuple[Piece, np.ndarray]]) -> HostTensor:
    filled = [(piece, raw) for piece, raw in pieces if piece.nbytes]
    if len(filled) == 1 and filled[0][0].box == spec.whole():
        return HostTensor(spec.dtype, spec.shape, filled[0][1])
    if spec.size and not filled:
        raise WeightSyncError(f"no shard holds a piece of {spec.name}; was coverage checked?")
    word = np.dtype(f"u{itemsize(spec.dtype, spec.name)}")  # bits of one element, whatever it is
    whole = np.empty(spec.shape, dtype=word)
    for piece, raw in filled:
        whole[piece.box.slices] = raw.view(word).reshape(piece.box.shape)
    data = whole.reshape(-1).view(np.uint8)
    data.flags.writeable = False
    return HostTensor(spec.dtype, spec.shape, data)
