"""What a weight sync will move: the figures of a plan, for people and as JSON."""

import time
import typing

from relax_hpc.dcs.architectures import Model
from relax_hpc.dcs.engine_layout import EngineParallel, engine_layout
from relax_hpc.dcs.plan import Placement, plan
from relax_hpc.dcs.trainer_layout import TrainerParallel, trainer_layout


def summary(
    model: Model,
    dtype: str,
    trainer: TrainerParallel,
    engine: EngineParallel,
    placement: Placement,
) -> dict[str, typing.Any]:
    """Plan one sync and sum it up.

    Returns:
        plan_s: seconds for both layouts and the plan.
        bytes, minimum_bytes: of all transfers, and what the engine ranks hold together; equal.
        node_bytes: the latter when a node fetches what several of its ranks hold once.
        max_rank_bytes, max_rank_bytes_vs_mean: of the trainer rank that sends most.
        link_bytes: by class of link, see `plan.LINKS`.
        trainer_ranks, engine_ranks, num_tensors, key (hash of layouts and places).
    """
    started = time.perf_counter()
    ours, theirs = trainer_layout(model, trainer, dtype), engine_layout(model, engine, dtype)
    made = plan(ours, theirs, placement)
    return {
        "plan_s": time.perf_counter() - started,
        "max_rank_bytes_vs_mean": made.max_vs_mean,
        "bytes": made.total_bytes,
        "minimum_bytes": made.minimum_bytes,
        "node_bytes": made.node_bytes,
        "max_rank_bytes": int(made.sent_bytes.max(initial=0)),
        "link_bytes": made.link_bytes,
        "trainer_ranks": ours.num_ranks,
        "engine_ranks": theirs.num_ranks,
        "num_tensors": len(theirs.specs),
        "key": f"{made.key:016x}",
    }


def summary_lines(found: dict[str, typing.Any]) -> list[str]:
    """Render a summary for a terminal."""

    def gb(count: int) -> str:
        return f"{count / 1e9:,.3f} GB"

    links = ", ".join(f"{name} {gb(count)}" for name, count in found["link_bytes"].items())
    return [
        f"weights: {found['num_tensors']} tensors, {found['trainer_ranks']} trainer ranks to "
        f"{found['engine_ranks']} engine ranks, planned in {found['plan_s']:.2f} s",
        f"bytes: {gb(found['bytes'])} (minimum {gb(found['minimum_bytes'])}, "
        f"once per node {gb(found['node_bytes'])})",
        f"busiest trainer rank: {gb(found['max_rank_bytes'])}, "
        f"{found['max_rank_bytes_vs_mean']:.3f} x the mean",
        f"links: {links}",
    ]
