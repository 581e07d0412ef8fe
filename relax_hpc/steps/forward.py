"""Forward-only steps: roles ref and logprob. `python -m relax_hpc.steps.forward`.

Exit codes: 0 all train steps are done; 2 wrong configuration; 143 ended by SIGTERM; else 1, and the
supervisor starts the next incarnation (its leased rows come back to it).
"""

import logging
import os
import signal
import sys

from relax_hpc.config import Config, RoleResources, config_from_json
from relax_hpc.control.identity import Identity
from relax_hpc.control.registry import Membership
from relax_hpc.dcs.client import WeightSubscriber
from relax_hpc.errors import ConfigError
from relax_hpc.log import setup_logging
from relax_hpc.steps.device import choose_device
from relax_hpc.steps.ending import run_step
from relax_hpc.steps.stop_flag import StopFlag
from relax_hpc.transfer.transfer_queue import TransferQueue

_GROUPS_PER_LEASE = 4


def main() -> int:
    """Run the step; returns its exit code."""
    return run_step("forward", _main)


def _main(identity: Identity) -> int:
    setup_logging(identity.role, identity.rank, identity.local_rank)
    config = config_from_json(identity.run.config.read_text(encoding="utf-8"))
    choose_device(identity)  # before torch looks for GPUs
    stop = StopFlag(signal.SIGTERM)
    _serve(config, identity, stop)
    return stop.exit_code if stop.is_set else 0


def _resources(config: Config, role: str) -> RoleResources:
    resources = config.resources.ref if role == "ref" else config.resources.logprob
    if role not in ("ref", "logprob") or resources is None:
        raise ConfigError(f"role {role!r} is not a forward-only role of this run")
    return resources


def _serve(config: Config, identity: Identity, stop: StopFlag) -> None:
    _resources(config, identity.role)
    membership = Membership(identity)
    membership.join()
    membership.report(state="starting")
    from relax_hpc.trainer import build, cpu_device
    from relax_hpc.trainer.forward_only import ForwardLoop, ForwardServices
    from relax_hpc.trainer.rendezvous import join_process_group

    cpu_device.install()
    join_process_group(
        identity,
        membership,
        start_timeout_s=config.recovery.start_timeout_s,
        collective_timeout_s=build.collective_timeout_s(config),
    )
    layout = build.forward_only_config(config.train, identity.world)
    backend = build.build_backend(config, layout, is_training=False)
    membership.report(state="running")
    services = ForwardServices(
        queue=TransferQueue(identity, config=config.transfer),
        weights=(
            WeightSubscriber(identity, config=config.transfer)
            if identity.role == "logprob"
            else None
        ),
        report=membership.report,
        wants_stop=lambda: stop.is_set or membership.is_replaced,
    )
    ForwardLoop(
        identity.role,
        backend,
        services,
        temperature=config.rollout.temperature,
        micro_batch_tokens=layout.micro_batch_tokens,
        # Few groups per lease: the train step gets the first ones while later ones are computed.
        max_rows=_GROUPS_PER_LEASE * config.rollout.group_size,
    ).run()
    membership.leave()


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    # Not sys.exit: destructors of process groups would wait for ranks that are gone.
    os._exit(code)
