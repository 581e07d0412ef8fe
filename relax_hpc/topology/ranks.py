"""Ranks and their coordinates, in Megatron-core's order.

Megatron numbers ranks twice over the same world: the dense layers by (tp, cp, dp, pp), the experts
by (etp, ep, edp, pp). In the order `tp-cp-ep-dp-pp` the leftmost axis varies fastest. Both must
agree on the pipeline groups. Oracle: `RankGenerator` of megatron.core.parallel_state.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from relax_hpc.errors import TopologyError

Ranks = npt.NDArray[np.int64]

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
"""Megatron-core's default: TP fastest, PP slowest."""
PIPELINE_INNER_ORDER = "tp-cp-ep-pp-dp"
"""What `--use-tp-pp-dp-mapping` gives: a whole replica in consecutive ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How a world of ranks is cut. Axes: tp, cp, dp, pp (dense) and etp, ep, edp, pp (experts)."""

    world: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    etp: int = 0
    """Tensor parallel size of the experts; 0 = as the dense layers, which is Megatron's default."""
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        sizes = (self.world, self.tp, self.cp, self.ep, self.pp)
        if min(sizes) < 1 or self.etp < 0:
            raise TopologyError(f"{self}: every size must be at least 1")
        if sorted(self.order.split("-")) != sorted(DEFAULT_ORDER.split("-")):
            raise TopologyError(f"order={self.order!r}: must hold each of {DEFAULT_ORDER} once")
        dense, expert = self.tp * self.cp * self.pp, self.expert_tp * self.ep * self.pp
        for what, size in (("tp x cp x pp", dense), ("etp x ep x pp", expert)):
            if self.world % size:
                raise TopologyError(f"world={self.world} is no multiple of {what} = {size}")
        agree = self.order.endswith("pp") or self.pp == 1 or self.dp == self.expert_dp
        if not agree:
            raise TopologyError(
                f"order={self.order!r} with dp={self.dp} and edp={self.expert_dp}: dense layers "
                "and experts must agree on the stages; let the order end with pp"
            )

    @property
    def expert_tp(self) -> int:
        """Tensor parallel size of the experts."""
        return self.etp or self.tp

    @property
    def dp(self) -> int:
        """Data parallel size of the dense layers."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def expert_dp(self) -> int:
        """Data parallel size of the experts."""
        return self.world // (self.expert_tp * self.ep * self.pp)

    def dense_axes(self) -> list[tuple[str, int]]:
        """Axes of the dense layers with their sizes, fastest first."""
        size = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        return [(axis, size[axis]) for axis in self.order.split("-") if axis in size]

    def expert_axes(self) -> list[tuple[str, int]]:
        """Axes of the experts with their sizes, fastest first."""
        named = {
            "tp": ("etp", self.expert_tp),
            "ep": ("ep", self.ep),
            "dp": ("edp", self.expert_dp),
            "pp": ("pp", self.pp),
        }
        return [named[axis] for axis in self.order.split("-") if axis in named]

    def groups(self, axes: str) -> Ranks:
        """Ranks of every group that spans these axes, e.g. `tp`, `dp-cp`, `ep`, `edp`.

        Returns:
            [num_groups, group_size] int64, groups and members in Megatron's order.

        Raises:
            TopologyError: unknown axis, or dense and expert axes in one group.
        """
        wanted = axes.split("-")
        for table in (self.dense_axes(), self.expert_axes()):
            names = [name for name, _ in table]
            if set(wanted) <= set(names):
                return _groups(table, wanted)
        raise TopologyError(f"group {axes!r}: axes are tp cp dp pp, or etp ep edp pp, not mixed")

    def coordinates(self, rank: int) -> dict[str, int]:
        """Place of a rank on each axis of both numberings."""
        if not 0 <= rank < self.world:
            raise TopologyError(f"rank {rank} is not in 0..{self.world - 1}")
        found: dict[str, int] = {}
        for table in (self.dense_axes(), self.expert_axes()):
            left = rank
            for name, size in table:
                left, found[name] = divmod(left, size)
        return found

    def rank_of(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Rank with these dense coordinates.

        Raises:
            TopologyError: a coordinate outside its axis.
        """
        place = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
        rank, stride = 0, 1
        for name, size in self.dense_axes():
            if not 0 <= place[name] < size:
                raise TopologyError(f"{name}={place[name]} is not in 0..{size - 1}")
            rank += place[name] * stride
            stride *= size
        return rank


def _groups(table: list[tuple[str, int]], wanted: list[str]) -> Ranks:
    slowest_first = table[::-1]
    grid = np.arange(np.prod([size for _, size in table], dtype=np.int64)).reshape(
        [size for _, size in slowest_first]
    )
    names = [name for name, _ in slowest_first]
    inside = [i for i, name in enumerate(names) if name in wanted]
    outside = [i for i, name in enumerate(names) if name not in wanted]
    size = int(np.prod([grid.shape[i] for i in inside]))
    return grid.transpose(outside + inside).reshape(-1, size)
