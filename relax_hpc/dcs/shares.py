"""Sharing equal boxes among ranks that all hold them: each publishes its part of the bytes."""

from collections.abc import Sequence

from relax_hpc.dcs.layout import Box


def share(
    boxes: Sequence[Box], element_bytes: Sequence[int], part: int, parts: int
) -> list[tuple[int, Box]]:
    """Say what one of several ranks with the same boxes publishes.

    The boxes lie on one line of bytes, which is cut into equal parts; a row (along the first axis
    that is longer than 1) belongs to the part where it begins. So the parts differ by a row at
    most, and few boxes are cut.

    Args:
        boxes: What all of them hold, in the same order everywhere.
        element_bytes: Of each box.
        part: Which rank asks, 0 .. parts - 1.
        parts: Number of ranks.

    Returns:
        (index into boxes, box inside of it), in the order of the boxes. Boxes without elements are
        in no part. All parts together are every element once.
    """
    total = sum(box.size * each for box, each in zip(boxes, element_bytes, strict=True))
    low, high = total * part // parts, total * (part + 1) // parts
    found, at = [], 0
    for index, (box, each) in enumerate(zip(boxes, element_bytes, strict=True)):
        nbytes = box.size * each
        if nbytes and at < high and at + nbytes > low:
            axis = next((i for i, length in enumerate(box.shape) if length > 1), 0)
            rows = box.shape[axis] if box.shape else 1
            row_bytes = nbytes // rows
            first, behind = (min(max(-(-(x - at) // row_bytes), 0), rows) for x in (low, high))
            if first < behind:
                found.append((index, _rows(box, axis, first, behind)))
        at += nbytes
    return found


def _rows(box: Box, axis: int, first: int, behind: int) -> Box:
    if not box.start:
        return box
    start, stop = list(box.start), list(box.stop)
    start[axis], stop[axis] = box.start[axis] + first, box.start[axis] + behind
    return Box(box.name, tuple(start), tuple(stop))
