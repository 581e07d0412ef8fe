"""A placement for others to read: the host file of srun, and the rank map.

Nobody derives ranks from a node list. `SLURM_JOB_NODELIST` is sorted, and in a step with
`--distribution=arbitrary` neither it nor `SLURM_NODEID` follows the file; the first host of the
list need not hold rank 0. Who wants to know where a rank is reads the rank map.
"""

import re
from collections.abc import Sequence

import msgspec

from relax_hpc.errors import TopologyError
from relax_hpc.topology.fabric import Fabric, FabricKind
from relax_hpc.topology.place import Placement
from relax_hpc.topology.ranks import Shape

FORMAT = 1
"""Of the rank map's JSON."""


def host_file(placement: Placement) -> str:
    """Return the text of `SLURM_HOSTFILE`: one host a line, in rank order.

    The plainest form that srun has always read; `host*8`, commas and comments are read too, but
    bracket ranges are not.

    Raises:
        TopologyError: a host name that srun would not read.
    """
    for host in placement.hosts:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", host):
            raise TopologyError(f"host {host!r} cannot stand in a host file of srun")
    return "".join(f"{host}\n" * placement.per_node for host in placement.hosts)


def arbitrary_options(num_tasks: int) -> list[str]:
    """Options of srun that go with the host file.

    No `--nodes`: fatal beside it since Slurm 23.11. Set SLURM_HOSTFILE in the environment of this
    one srun only: sbatch and salloc read it too, and a nested job would silently become arbitrary.
    """
    return [f"--ntasks={num_tasks}", "--distribution=arbitrary"]


def can_use_arbitrary(fabric: Fabric, slurm_version: tuple[int, int]) -> bool:
    """Tell whether this Slurm takes a host file: 26.05 and later refuse it with topology/block."""
    return fabric.kind is not FabricKind.BLOCK or slurm_version < (26, 5)


def parse_host_file(text: str) -> list[str]:
    """Read a host file as srun does: the host of each rank.

    Raises:
        TopologyError: a line that begins with a blank, or bracket ranges.
    """
    hosts: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].rstrip()
        for word in words.split(",") if words else []:
            match = re.fullmatch(r"([A-Za-z0-9][^\s\[\]*]*)(?:\*(\d+))?", word)
            if match is None:
                raise TopologyError(
                    f"host file, line {number}: {word!r}; srun reads `host` or `host*4`, from the "
                    "first character on and without brackets"
                )
            hosts += [match[1]] * int(match[2] or 1)
    return hosts


class RankPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where one rank runs."""

    host: str
    local_rank: int
    """Position among the ranks of its host, in rank order; ranks of a host may be interleaved."""
    gpu: int
    """Index of its GPU on the host, as nvidia-smi counts."""
    leaf: str
    """Switch or block above the host; empty if no topology is known."""


class ShapeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The shape in the rank map."""

    world: int
    tp: int
    cp: int
    ep: int
    pp: int
    etp: int
    order: str

    def shape(self) -> Shape:
        """Return it as the shape that computes groups and coordinates."""
        return Shape(**msgspec.structs.asdict(self))


class RankMap(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher publishes and every rank reads."""

    format: int
    attempt: int
    shape: ShapeRecord
    ranks: list[RankPlace]
    """By global rank."""
    spares: list[str]

    def to_json(self) -> str:
        """Render for the run folder."""
        return msgspec.json.encode(self).decode() + "\n"

    def rank_of(self, host: str, local_rank: int) -> int:
        """Global rank of a task.

        Raises:
            TopologyError: the map has no such task.
        """
        for rank, place in enumerate(self.ranks):
            if place.local_rank == local_rank and place.host == host:
                return rank
        raise TopologyError(f"rank map: no rank {local_rank} on {host}")

    def check(self, rank: int, host: str) -> RankPlace:
        """Return the place of a rank that runs on this host.

        Raises:
            TopologyError: it should run elsewhere, so groups would not be where they were planned.
        """
        if not 0 <= rank < len(self.ranks):
            raise TopologyError(f"rank {rank} is not in the rank map of {len(self.ranks)} ranks")
        place = self.ranks[rank]
        if place.host.casefold() != host.casefold():
            raise TopologyError(
                f"rank {rank} runs on {host}, the rank map of attempt {self.attempt} says "
                f"{place.host}; was srun given the host file (SLURM_HOSTFILE)?"
            )
        return place

    def hosts(self) -> list[str]:
        """Hosts in the order of their first ranks: `previous` of the next `place_ranks`."""
        return list(dict.fromkeys(place.host for place in self.ranks))


def rank_map(
    placement: Placement, fabric: Fabric, *, attempt: int, gpu_order: Sequence[int] = ()
) -> RankMap:
    """Make the rank map of a placement.

    Args:
        placement: of the role.
        fabric: it was placed on.
        attempt: of the job; a map of another attempt is stale.
        gpu_order: GPU of each local rank (`devices.local_gpu_order`); empty = in turn.
    """
    shape = placement.shape
    gpus = list(gpu_order) or list(range(placement.per_node))
    if len(gpus) < placement.per_node:
        raise TopologyError(f"{placement.per_node} ranks a node, but GPUs {gpus} only")
    paths = fabric.all_paths(placement.hosts)
    return RankMap(
        format=FORMAT,
        attempt=attempt,
        shape=ShapeRecord(
            world=shape.world,
            tp=shape.tp,
            cp=shape.cp,
            ep=shape.ep,
            pp=shape.pp,
            etp=shape.etp,
            order=shape.order,
        ),
        ranks=[
            RankPlace(host, local, gpus[local], path[0] if path else "")
            for host, path in zip(placement.hosts, paths, strict=True)
            for local in range(placement.per_node)
        ],
        spares=list(placement.spares),
    )


def read_rank_map(text: str | bytes) -> RankMap:
    """Read a published rank map.

    Raises:
        TopologyError: not a rank map, or of a format that this version does not know.
    """
    try:
        found = msgspec.json.decode(text, type=RankMap)
    except msgspec.DecodeError as err:
        raise TopologyError(f"rank map cannot be read: {err}") from err
    if found.format != FORMAT:
        raise TopologyError(f"rank map has format {found.format}, this version reads {FORMAT}")
    if len(found.ranks) != found.shape.world:
        raise TopologyError(
            f"rank map has {len(found.ranks)} ranks, its shape says {found.shape.world}"
        )
    return found
