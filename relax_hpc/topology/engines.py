"""Engines near the ranks that they get weights from.

A new version of the weights goes to every engine at once, so an engine should sit under the leaf
of a source, and no source should feed more engines than the others.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from relax_hpc.errors import TopologyError
from relax_hpc.topology.fabric import Fabric, natural_key


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EnginePlace:
    """Where one engine runs."""

    index: int
    hosts: tuple[str, ...]
    first_gpu: int
    """On its (only) host; 0 for an engine of whole hosts."""
    num_gpus: int
    """On each host."""
    source: str
    """Host that it should get its weights from; empty without sources."""
    distance: int
    """Links to the source; 0 on the same host."""


def place_engines(
    fabric: Fabric,
    free_gpus: Mapping[str, int],
    *,
    num_engines: int,
    engine_gpus: int,
    sources: Sequence[str] = (),
) -> list[EnginePlace]:
    """Place engines on free hosts, the nearest to a source first.

    Args:
        fabric: where the hosts hang.
        free_gpus: host -> GPUs that no other role has; the GPUs up to that number, from 0.
        num_engines: how many.
        engine_gpus: of one engine (engine_tp). More than a host has: whole hosts, under one leaf.
        sources: hosts that hold the weights, e.g. those of one replica of the train step.

    Raises:
        TopologyError: they do not fit.
    """
    pool = _Sources(fabric, sources)
    free = [host for host, gpus in free_gpus.items() if gpus > 0]
    paths = {h: (h, *path) for h, path in zip(free, fabric.all_paths(free), strict=True)}
    hosts = sorted(free, key=lambda host: (pool.nearest(paths[host])[0], natural_key(host)))
    largest = max(free_gpus.values(), default=0)
    if not largest or engine_gpus <= largest:
        slots = _parts_of_hosts(hosts, free_gpus, engine_gpus)
    else:
        slots = _whole_hosts(fabric, hosts, free_gpus, engine_gpus, largest)
    if len(slots) < num_engines:
        raise TopologyError(
            f"{num_engines} engines of {engine_gpus} GPUs do not fit: the free GPUs of "
            f"{len(free_gpus)} hosts hold {len(slots)}"
        )
    engines = []
    for index, (members, first, count) in enumerate(slots[:num_engines]):
        source, distance = pool.take(paths[members[0]])
        engines.append(
            EnginePlace(
                index=index,
                hosts=members,
                first_gpu=first,
                num_gpus=count,
                source=source,
                distance=distance,
            )
        )
    return engines


_Slot = tuple[tuple[str, ...], int, int]


def _parts_of_hosts(hosts: Sequence[str], free: Mapping[str, int], size: int) -> list[_Slot]:
    return [
        ((host,), first, size) for host in hosts for first in range(0, free[host] - size + 1, size)
    ]


def _whole_hosts(
    fabric: Fabric, hosts: Sequence[str], free: Mapping[str, int], size: int, largest: int
) -> list[_Slot]:
    if size % largest:
        raise TopologyError(
            f"an engine of {size} GPUs does not fill hosts of {largest}; let one divide the other"
        )
    width = size // largest
    by_leaf: dict[str, list[str]] = {}
    full = [host for host in hosts if free[host] == largest]
    for host, path in zip(full, fabric.all_paths(full), strict=True):
        by_leaf.setdefault(path[0] if path else "", []).append(host)
    slots: list[_Slot] = []
    for members in by_leaf.values():
        slots += [
            (tuple(members[first : first + width]), 0, largest)
            for first in range(0, len(members) - width + 1, width)
        ]
    return slots


class _Sources:
    """Sources by what is above them, so that a thousand engines do not look at all of them."""

    def __init__(self, fabric: Fabric, sources: Sequence[str]) -> None:
        self._load: Counter[str] = Counter()
        self._below: dict[tuple[int, str], list[str]] = {}
        for source, path in zip(sources, fabric.all_paths(sources), strict=True):
            for level, place in enumerate((source, *path, "")):
                self._below.setdefault((level, place), []).append(source)

    def nearest(self, path: Sequence[str]) -> tuple[int, list[str]]:
        """Links to the nearest sources of a host, and these; `path` begins with the host."""
        for level, place in enumerate((*path, "")):
            found = self._below.get((level, place))
            if found:
                return 2 * level, found
        return 0, []

    def take(self, path: Sequence[str]) -> tuple[str, int]:
        """Return the nearest source; of equally near ones that with the fewest engines so far."""
        distance, found = self.nearest(path)
        if not found:
            return "", 0
        best = min(found, key=lambda source: self._load[source])  # the first of equals
        self._load[best] += 1
        return best, distance
