"""Shards in memory for tests of what is pulled: pieces of whole tensors, as ranks publish them."""

import numpy as np
import xxhash

from relax_hpc.dcs.store import Piece, ShardManifest, VersionId

VERSION = VersionId(1, 7)


def make_shard(rank, node, boxes, tensors, dtype="bfloat16"):
    """Return (manifest, bytes) of a shard that holds these boxes; 64-byte aligned pieces.

    Args:
        boxes: What it holds.
        tensors: name -> whole array of words of the dtype's size.
    """
    pieces, parts, offset = [], [], 0
    for box in boxes:
        raw = np.ascontiguousarray(tensors[box.name][box.slices]).reshape(-1).view(np.uint8)
        checksum = xxhash.xxh3_64_intdigest(raw.data)
        pieces.append(Piece(box, dtype, offset, raw.nbytes, checksum))
        padding = -raw.nbytes % 64
        parts += [raw, np.zeros(padding, np.uint8)]
        offset += raw.nbytes + padding
    data = np.concatenate(parts) if parts else np.empty(0, np.uint8)
    manifest = ShardManifest(
        version=VERSION, rank=rank, node=node, nbytes=data.nbytes, pieces=pieces
    )
    return manifest, data


def owned_boxes(layout, choose):
    """Boxes by rank of a layout, where `choose(ranks)` says who of the holders publishes each."""
    held = {rank: [] for rank in range(layout.num_ranks)}
    for rank in range(layout.num_ranks):
        held[rank] = layout.boxes_of(rank)
    owners = {}
    for rank, boxes in held.items():
        for box in boxes:
            owners.setdefault(box, []).append(rank)
    published = {rank: [] for rank in held}
    for box, ranks in owners.items():
        for rank in choose(ranks):
            published[rank].append(box)
    return published
