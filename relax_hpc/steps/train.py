"""The train step: Megatron over all tasks of the job step. `python -m relax_hpc.steps.train`.

Wiring only: who am I, meet the other ranks, build the backend, run the loop.

Exit codes: 0 all train steps are done; 2 wrong configuration; 75 asked to stop by SIGUSR2 and 143
by SIGTERM, both after a checkpoint of the last optimizer step; else 1, and the supervisor starts
the next incarnation, which resumes from the newest whole checkpoint.
"""

import contextlib
import logging
import os
import signal
import sys
import typing

from relax_hpc.config import Config, config_from_json
from relax_hpc.control.identity import Identity
from relax_hpc.control.registry import Membership
from relax_hpc.dcs.client import WeightPublisher
from relax_hpc.log import setup_logging
from relax_hpc.metrics.writers import MetricWriter
from relax_hpc.steps.device import choose_device
from relax_hpc.steps.ending import run_step
from relax_hpc.steps.stop_flag import StopFlag
from relax_hpc.steps.timed_keeper import TimedKeeper
from relax_hpc.transfer.archive import TrainedLog
from relax_hpc.transfer.transfer_queue import TransferQueue

if typing.TYPE_CHECKING:
    from collections.abc import Mapping

    from relax_hpc.trainer.loop import TrainServices
    from relax_hpc.trainer.megatron import MegatronBackend


def main() -> int:
    """Run the step; returns its exit code."""
    return run_step("train", _main)


def _main(identity: Identity) -> int:
    setup_logging("train", identity.rank, identity.local_rank)
    config = config_from_json(identity.run.config.read_text(encoding="utf-8"))
    choose_device(identity)  # before torch looks for GPUs
    stop = StopFlag(signal.SIGTERM, signal.SIGUSR2)
    return 0 if _train(config, identity, stop) else stop.exit_code


def _train(config: Config, identity: Identity, stop: StopFlag) -> bool:
    """Run all optimizer steps; False when asked to stop before the last."""
    membership = Membership(identity)
    membership.join()
    membership.report(state="starting")
    backend = _join_and_build(config, identity, membership)
    from relax_hpc.trainer.loop import TrainLoop

    with contextlib.ExitStack() as stack:
        services = _services(config, identity, membership, backend, stop, stack)
        membership.report(state="running")
        is_complete = TrainLoop(config, backend, services).run()
    membership.leave()
    return is_complete


def _join_and_build(
    config: Config, identity: Identity, membership: Membership
) -> "MegatronBackend":
    # torch is imported here: a rank that cannot register fails within a second.
    from relax_hpc.trainer import build, cpu_device
    from relax_hpc.trainer.rendezvous import join_process_group

    cpu_device.install()
    join_process_group(
        identity,
        membership,
        start_timeout_s=config.recovery.start_timeout_s,
        collective_timeout_s=build.collective_timeout_s(config),
    )
    return build.build_backend(config, config.train, is_training=True)


class _Reporter:
    """Metrics to the run folder, progress to the registry; rank 0 only writes metrics."""

    def __init__(self, writer: MetricWriter, membership: Membership) -> None:
        self._writer, self._membership = writer, membership

    def log(self, step: int, metrics: "Mapping[str, float]") -> None:
        self._writer.log(step, metrics)

    def progress(self, **values: int | float | str) -> None:
        self._membership.report(**values)


def _services(
    config: Config,
    identity: Identity,
    membership: Membership,
    backend: "MegatronBackend",
    stop: StopFlag,
    stack: contextlib.ExitStack,
) -> "TrainServices":
    from relax_hpc.trainer.build import initial_weights
    from relax_hpc.trainer.checkpointing import CheckpointKeeper
    from relax_hpc.trainer.loop import TrainServices

    queue = TransferQueue(identity, config=config.transfer)
    stack.callback(queue.close)
    keeper = CheckpointKeeper(
        identity.run.checkpoints, config.train.keep_checkpoints, backend, initial_weights(config)
    )
    writer = stack.enter_context(MetricWriter(identity.run, "train", identity.index))
    record = None
    if config.rollout.archive and identity.rank == 0:
        record = TrainedLog(identity.run.trajectories)
        stack.callback(record.close)
    return TrainServices(
        record=record,
        queue=queue,
        publisher=WeightPublisher(identity),
        keeper=TimedKeeper(keeper, writer) if identity.rank == 0 else keeper,
        reporter=_Reporter(writer, membership),
        wants_stop=lambda: stop.is_set or membership.is_replaced,
    )


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    # Not sys.exit: after a failure, destructors of process groups would wait for ranks that are
    # gone, and threads for a dcs step that is gone.
    os._exit(code)
