"""A whole version cut into chunks, the units that travel between clusters; pure functions.

    tensors of a version, in the order of their specs       |--a--|-b-|------ c -------|d|
    chunks of at most chunk_bytes, filled with segments     |--- 0 ---|--- 1 ---|-- 2 ---|

Both sides cut alike from the specs alone, so a chunk is named by its number. A small tensor shares
its chunk with others, a large one lies in several. Each segment is encoded by itself (delta.py).
"""

import typing
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
import xxhash

from relax_hpc.dcs.delta import (
    HEAD_BYTES,
    Head,
    base_is_needed,
    check_width,
    decode,
    encode,
    read_head,
)
from relax_hpc.dcs.layout import HostTensor, TensorSpec, itemsize
from relax_hpc.errors import WeightSyncError


class Segment(typing.NamedTuple):
    """Bytes start .. stop - 1 of a tensor."""

    tensor: int
    """Index into the specs."""
    start: int
    stop: int


class Content(msgspec.Struct, frozen=True, array_like=True):
    """What a version holds: its tensors in order, and the xxh3-64 of the bytes of each."""

    specs: list[TensorSpec]
    checksums: list[int]

    @property
    def digest(self) -> int:
        """xxh3-64 of it all: equal digests, equal weights."""
        return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(self))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs)


Tensors = Mapping[str, HostTensor]


def content_of(tensors: Tensors) -> Content:
    """Describe whole tensors, in the order of the mapping."""
    return Content(
        [TensorSpec(name, t.dtype, t.shape) for name, t in tensors.items()],
        [xxhash.xxh3_64_intdigest(t.data.data) for t in tensors.values()],
    )


def cut(specs: Sequence[TensorSpec], chunk_bytes: int) -> list[list[Segment]]:
    """Cut the tensors into chunks: every byte exactly once, elements whole, in order.

    Args:
        specs: the tensors.
        chunk_bytes: most bytes of a chunk; a multiple of 8.
    """
    chunks: list[list[Segment]] = []
    room = 0
    for index, spec in enumerate(specs):
        check_width(width := itemsize(spec.dtype, spec.name))
        start, end = 0, spec.nbytes
        while start < end:
            if room < width:
                chunks.append([])
                room = chunk_bytes
            count = min(end - start, room // width * width)
            chunks[-1].append(Segment(index, start, start + count))
            start, room = start + count, room - count
    return chunks


def max_encoded_bytes(chunk: Sequence[Segment]) -> int:
    """Most bytes that a chunk takes on the wire."""
    return sum(HEAD_BYTES + s.stop - s.start for s in chunk)


def encode_chunk(
    specs: Sequence[TensorSpec],
    chunk: Sequence[Segment],
    base: Tensors | None,
    new: Tensors,
    *,
    deflate: bool,
) -> bytes:
    """Encode a chunk of `new` against `base` (None: all of it). The same bytes each time."""
    parts: list[bytes | memoryview] = []
    for index, start, stop in chunk:
        spec = specs[index]
        old = None if base is None else base[spec.name].data[start:stop]
        width = itemsize(spec.dtype, spec.name)
        parts += encode(old, new[spec.name].data[start:stop], width, deflate=deflate)
    return b"".join(parts)


def decode_tensors(
    content: Content,
    chunks: Sequence[Sequence[Segment]],
    read: Callable[[int], bytes],
    base: Tensors | None,
) -> Iterator[tuple[TensorSpec, np.ndarray]]:
    """Decode tensor after tensor; each is whole and has the checksum of its content.

    Args:
        content: what must come out.
        chunks: `cut` of its specs.
        read: number of a chunk -> its encoded bytes; asked once for each, in order.
        base: the tensors that it was encoded against; None: none.

    Yields:
        Each spec with its bytes, uint8 [nbytes]; memory of one tensor and one chunk is in use.

    Raises:
        WeightSyncError: a chunk is damaged, needs a base that there is not, or a tensor has
            another checksum than it should; names the tensor.
    """
    segments = _decoded_segments(content.specs, chunks, read)
    for index, spec in enumerate(content.specs):
        width = itemsize(spec.dtype, spec.name)
        old = None if base is None else base[spec.name].data
        out = np.empty(spec.nbytes, dtype=np.uint8)
        filled = 0
        while filled < spec.nbytes:
            segment, head, body = next(segments)
            assert (segment.tensor, segment.start) == (index, filled)
            part, filled = out[segment.start : segment.stop], segment.stop
            if base_is_needed(head):
                if old is None:
                    raise WeightSyncError(f"weights {spec.name}: a delta without a base")
                part[:] = old[segment.start : segment.stop]
            decode(head, body, part, width)
        seen = xxhash.xxh3_64_intdigest(out.data)
        if seen != content.checksums[index]:
            raise WeightSyncError(
                f"weights {spec.name}: checksum {seen:016x} after decoding, the source's is "
                f"{content.checksums[index]:016x}"
            )
        yield spec, out
    next(segments, None)  # the last chunk must end with its last segment


def _decoded_segments(
    specs: Sequence[TensorSpec],
    chunks: Sequence[Sequence[Segment]],
    read: Callable[[int], bytes],
) -> Iterator[tuple[Segment, Head, memoryview]]:
    for number, chunk in enumerate(chunks):
        data = memoryview(read(number))
        at = 0
        for segment in chunk:
            spec = specs[segment.tensor]
            nbytes = segment.stop - segment.start
            head = read_head(data[at:], nbytes, itemsize(spec.dtype, spec.name))
            at += HEAD_BYTES + head.body_bytes
            yield segment, head, data[at - head.body_bytes : at]
        if at != len(data):
            raise WeightSyncError(
                f"weight chunk {number}: {len(data)} bytes, its segments have {at}"
            )
