"""Staging buffers of a reshard: where packed bundles lie, and how boxes get in and out of them.

A parameter may hold a box in any strided view, also with its rows spread over several axes (the
query heads inside of a fused qkv); `binding` finds the pairs of views once, a sync only copies.
"""

import itertools
import math
import typing
from collections.abc import Iterable, Sequence

import torch
import xxhash

from relax_hpc.dcs.layout import Box
from relax_hpc.dcs.packing import Bundle
from relax_hpc.errors import WeightSyncError

Held = tuple[Box, torch.Tensor]
"""A box and a view with its elements in the box's order: axis 0 of the box may be several axes of
the view, the other axes are axes of the view."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALIGN = 256  # bytes between bundles in a buffer: NCCL and vector loads like whole lines
_ROW_WORDS = 1024  # of the matrix that a GPU sums up
_PRIME = 1_099_511_628_211  # of FNV-1a: keeps the sums' order in the checksum


class Staging:
    """One buffer with room for all bundles of a rank."""

    def __init__(self, bundles: Sequence[Bundle], device: torch.device, *, is_pinned: bool) -> None:
        padded = [-(-bundle.nbytes // _ALIGN) * _ALIGN for bundle in bundles]
        starts = [0, *itertools.accumulate(padded)]
        whole = torch.empty(starts[-1], dtype=torch.uint8, device=device, pin_memory=is_pinned)
        self.data = [
            whole[start : start + bundle.nbytes]
            for start, bundle in zip(starts, bundles, strict=False)
        ]
        """Packed bytes of each bundle: uint8 [bundle.nbytes]."""
        self._bundles = bundles

    def binding(self, held: Iterable[Held], where: str) -> "Binding":
        """Pair every part of every bundle with its place in the held tensors.

        Args:
            held: Boxes and views of this rank; more than what travels is fine.
            where: Names the rank in errors.

        Raises:
            WeightSyncError: a part that no held box contains, or a view of another shape.
        """
        by_name: dict[str, list[Held]] = {}
        for box, view in held:
            by_name.setdefault(box.name, []).append((box, view.detach()))
        staged: list[torch.Tensor] = []
        outside: list[torch.Tensor] = []
        for data, bundle in zip(self.data, self._bundles, strict=True):
            for part in bundle.parts:
                found = [own for own in by_name.get(part.box.name, ()) if _holds(own[0], part.box)]
                if not found:
                    raise WeightSyncError(
                        f"{where} does not hold {part.box}, which the weight plan wants of it; "
                        "pieces and plan must be of the same layout"
                    )
                raw = data[part.offset : part.offset + part.nbytes]
                dtype = getattr(torch, part.dtype)
                own, view = found[0]
                if view.dtype == dtype:  # as words: a copy of numbers may change the bits of a NaN
                    dtype = _WORDS[dtype.itemsize]
                    view = view.view(dtype)
                packed = raw.view(dtype).view(part.box.shape)
                for pair in _views(packed, part.box, (own, view), where):
                    staged.append(pair[0])
                    outside.append(pair[1])
        return Binding(staged, outside)


class Binding:
    """Pairs of views: in a staging buffer, and in a rank's own tensors."""

    def __init__(self, staged: list[torch.Tensor], outside: list[torch.Tensor]) -> None:
        self._staged, self._outside = staged, outside

    @torch.no_grad()
    def fill(self) -> None:
        """Copy the rank's tensors into the buffer; on a GPU on the current stream."""
        if self._staged:
            torch._foreach_copy_(self._staged, self._outside, non_blocking=True)

    @torch.no_grad()
    def empty(self) -> None:
        """Copy the buffer into the rank's tensors; on a GPU on the current stream."""
        if self._staged:
            torch._foreach_copy_(self._outside, self._staged, non_blocking=True)


def checksum(data: torch.Tensor) -> int:
    """Signed 64-bit checksum of a uint8 tensor: xxh3-64 on CPUs, `weighted_sums` on a GPU."""
    if data.device.type != "cpu":
        return weighted_sums(data)
    unsigned = xxhash.xxh3_64_intdigest(data.numpy().data)
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


def weighted_sums(data: torch.Tensor) -> int:
    """Checksum of a uint8 tensor from sums alone, which a GPU makes at memory speed.

    The 64-bit words are a matrix: sums of its rows and of its columns, each multiplied by an odd
    number of its own, so that each changed word and each swap changes it. Waits for the current
    stream.
    """
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    num_rows = len(words) // _ROW_WORDS
    rows = words[: num_rows * _ROW_WORDS].view(num_rows, _ROW_WORDS)
    rest = words[num_rows * _ROW_WORDS :], data[8 * len(words) :].to(torch.int64)
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    for part in (rows.sum(1), rows.sum(0), *rest):
        weights = torch.arange(len(part), device=data.device) * 2 + 1
        total = total * _PRIME + (part * weights).sum()
    return int(total.item())


def _holds(outer: Box, inner: Box) -> bool:
    pairs = zip(outer.start, outer.stop, inner.start, inner.stop, strict=True)
    return all(a <= c and d <= b for a, b, c, d in pairs)


def _views(
    packed: torch.Tensor, box: Box, held: Held, where: str
) -> typing.Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of equal shape that together are the box: in the packed bytes, and in the held view."""
    own, view = held
    rest = len(own.shape) - 1  # axes behind the first: one to one
    num_row_axes = view.dim() - rest
    if not own.shape:
        yield packed, view.reshape(())
        return
    row_shape = view.shape[:num_row_axes]
    if (math.prod(row_shape), *view.shape[num_row_axes:]) != own.shape or num_row_axes < 1:
        raise WeightSyncError(
            f"{where}: the view of {own} has shape {list(view.shape)}; its leading axes must make "
            f"{own.shape[0]} rows, the others be {list(own.shape[1:])}"
        )
    for axis in range(rest):
        first = box.start[axis + 1] - own.start[axis + 1]
        view = view.narrow(num_row_axes + axis, first, box.shape[axis + 1])
    first_row, done = box.start[0] - own.start[0], 0
    for block in _row_blocks(view, num_row_axes, first_row, first_row + box.shape[0]):
        num_rows = math.prod(block.shape[: block.dim() - rest])
        yield packed[done : done + num_rows].view(block.shape), block
        done += num_rows


def _row_blocks(
    view: torch.Tensor, num_axes: int, first: int, behind: int
) -> typing.Iterator[torch.Tensor]:
    """Cut rows first .. behind - 1, counted over the leading axes, into rectangles, in order."""
    if first >= behind:
        return
    if num_axes == 1:
        yield view[first:behind]
        return
    inner = math.prod(view.shape[1:num_axes])
    head, tail = -(-first // inner), behind // inner
    if head > tail:  # both ends are inside of one block
        block = first // inner
        yield from _row_blocks(
            view[block], num_axes - 1, first - block * inner, behind - block * inner
        )
        return
    if first < head * inner:
        yield from _row_blocks(view[head - 1], num_axes - 1, first - (head - 1) * inner, inner)
    if head < tail:
        yield view[head:tail]
    if tail * inner < behind:
        yield from _row_blocks(view[tail], num_axes - 1, 0, behind - tail * inner)
