"""Sharing equal units of work among sources: evenly by bytes, then inside of cells.

Whole numbers only, no random choice: every process gets the same.
"""

import numpy as np


def fill_up(loads: np.ndarray, nbytes: int, units: int) -> np.ndarray:
    """Give equal units to sources so that the largest load is as small as can be.

    Args:
        loads: Bytes that each source has to send already, [sources].
        nbytes: Of one unit, > 0.
        units: Number of units.

    Returns:
        Units of each source, int64 [sources].
    """
    order = np.sort(loads)
    # Level to which k lowest sources are filled by all units; the true k is the last that fits.
    levels = (np.cumsum(order) + units * nbytes) // np.arange(1, len(order) + 1)
    level = levels[np.flatnonzero(levels >= order)[-1]]
    shares: np.ndarray = np.maximum((level - loads) // nbytes, 0)
    while (left := units - int(shares.sum())) > 0:  # what whole units leave of the level
        shares[np.argsort(loads + shares * nbytes, kind="stable")[:left]] += 1
    return shares


def match(
    shares: np.ndarray, wants: np.ndarray, source_cell: np.ndarray, destination_cell: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Match shares and wants inside of each cell: lay both on one line and cut it at all ends.

    Args:
        shares: Units that each source gives, [sources].
        wants: Units that each destination still needs, [destinations].
        source_cell: Cell (node, switch) of each source.
        destination_cell: Cell of each destination.

    Returns:
        Per segment: source, destination, units, and how many units of the destination come before
        in this call. None: no cell has both.
    """
    cells, inverse = np.unique(np.concatenate([source_cell, destination_cell]), return_inverse=True)
    ours, theirs = inverse[: len(shares)], inverse[len(shares) :]
    supply = np.bincount(ours, weights=shares, minlength=len(cells)).astype(np.int64)
    demand = np.bincount(theirs, weights=wants, minlength=len(cells)).astype(np.int64)
    matched = np.minimum(supply, demand)
    if not matched.any():
        return None
    sources, source_ends = _line(shares, ours, matched)
    destinations, destination_ends = _line(wants, theirs, matched)
    ends = np.union1d(source_ends, destination_ends)
    ends = ends[ends > 0]
    count = np.diff(ends, prepend=0)
    source = np.searchsorted(source_ends, ends, side="left")
    destination = np.searchsorted(destination_ends, ends, side="left")
    before = np.concatenate([[0], destination_ends[:-1]])[destination]
    return sources[source], destinations[destination], count, ends - count - before


def _line(
    amounts: np.ndarray, cell: np.ndarray, matched: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Order by cell, take no more of each cell than was matched; (order, ends on the line)."""
    order = np.argsort(cell, kind="stable")
    amount, of_cell = amounts[order], cell[order]
    total = np.bincount(cell, weights=amounts, minlength=len(matched)).astype(np.int64)
    before_cell = np.concatenate([[0], np.cumsum(total)[:-1]])
    before = np.cumsum(amount) - amount - before_cell[of_cell]
    taken = np.clip(matched[of_cell] - before, 0, amount)
    return order, np.cumsum(taken)
