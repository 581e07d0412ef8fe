"""What travels between two ranks of a plan, packed: one bundle of bytes per pair of ranks.

Both ends compute the same bundles from the same plan, so that no message says what is in it.
Torch-free.
"""

import dataclasses
import typing
from collections.abc import Sequence

import msgspec
import xxhash

from relax_hpc.dcs.layout import Box, itemsize
from relax_hpc.dcs.plan import Plan, Transfer


class Part(typing.NamedTuple):
    """One box inside of a bundle."""

    box: Box
    dtype: str
    offset: int
    """First byte in the bundle; a multiple of the element's size."""
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Bundle:
    """Boxes that one rank sends as one, without a gap between them."""

    parts: tuple[Part, ...]
    nbytes: int
    peers: tuple[int, ...]
    """Ranks of the other side, ascending. Receivers that want the same boxes share a bundle; an
    incoming bundle has one peer."""


def outgoing(plan: Plan, rank: int) -> list[Bundle]:
    """Bundles that trainer rank `rank` sends; each pair of ranks occurs once."""
    peers_of: dict[tuple[Box, ...], list[int]] = {}
    for peer, boxes in _by_peer(plan.from_source(rank)).items():
        peers_of.setdefault(tuple(boxes), []).append(peer)
    dtypes = _dtypes(plan)
    return [_bundle(boxes, dtypes, peers) for boxes, peers in peers_of.items()]


def incoming(plan: Plan, rank: int) -> list[Bundle]:
    """Bundles that engine rank `rank` receives: one for each trainer rank that sends to it."""
    dtypes = _dtypes(plan)
    by_peer = _by_peer(plan.to_destination(rank))
    return [_bundle(boxes, dtypes, [peer]) for peer, boxes in by_peer.items()]


def plan_digest(plan: Plan) -> int:
    """xxh3-64 of everything that decides what travels: equal digests, equal bundles.

    Stronger than `Plan.key`, which hashes what the plan was made from: two releases may make
    different plans of that.
    """
    rows = (plan.item, plan.source, plan.destination, plan.first, plan.count)
    items = [(item.tensors.tobytes(), item.box) for item in plan.items]
    whole = (plan.key, items, [row.tobytes() for row in rows])
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(whole))


def _by_peer(transfers: Sequence[Transfer]) -> dict[int, list[Box]]:
    found: dict[int, list[Box]] = {}
    for peer, box in transfers:
        found.setdefault(peer, []).append(box)
    return dict(sorted(found.items()))


def _dtypes(plan: Plan) -> dict[str, str]:
    return {spec.name: spec.dtype for spec in plan.engine.specs}


def _bundle(boxes: Sequence[Box], dtypes: dict[str, str], peers: Sequence[int]) -> Bundle:
    # Large elements first: every part is aligned without padding, which would be sent, too.
    ordered = sorted(boxes, key=lambda box: -itemsize(dtypes[box.name]))
    parts, offset = [], 0
    for box in ordered:
        dtype = dtypes[box.name]
        nbytes = box.size * itemsize(dtype)
        parts.append(Part(box, dtype, offset, nbytes))
        offset += nbytes
    return Bundle(tuple(parts), offset, tuple(peers))
