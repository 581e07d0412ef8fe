"""The rollout step: one engine and its loop. Started as `python -m relax_hpc.steps.rollout`.

Exit codes: 0 all train steps and evaluations are complete; 2 wrong configuration; 143 ended by
SIGTERM; else 1, and the supervisor starts the next incarnation.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from relax_hpc.config import Config, DataConfig, config_from_json
from relax_hpc.control.identity import Identity
from relax_hpc.control.registry import Membership
from relax_hpc.data.prompts import PromptSet, load_prompts
from relax_hpc.data.tokenizer import Tokenizer, load_tokenizer, stop_token_ids
from relax_hpc.dcs.client import WeightSubscriber
from relax_hpc.log import setup_logging
from relax_hpc.metrics.writers import MetricWriter
from relax_hpc.rewards.reward import close_reward, make_reward
from relax_hpc.rollout.engine import Engine, make_engine
from relax_hpc.rollout.group import GroupMaker, Prompts
from relax_hpc.rollout.loop import Admission, Admit, LoopParts, RolloutLoop
from relax_hpc.rollout.replay import ReplayParts, replay
from relax_hpc.steps.ending import run_step
from relax_hpc.transfer.archive import GroupArchive
from relax_hpc.transfer.transfer_queue import TransferQueue

log = logging.getLogger(__name__)

_TERMINATED = 128 + signal.SIGTERM


def main() -> int:
    """Run the step; returns its exit code."""
    return run_step("rollout", _main)


def _main(identity: Identity) -> int:
    # Each engine is a fault domain with a log of its own: INFO from all of them.
    setup_logging(f"rollout-{identity.index}", identity.rank, identity.local_rank)
    config = config_from_json(identity.run.config.read_text(encoding="utf-8"))
    # Not asyncio.run: at its end it waits for threads, and a cancelled call to a dcs step that
    # is gone holds its thread for minutes. The process ends by os._exit below.
    return asyncio.new_event_loop().run_until_complete(_until_signal(config, identity))


async def _until_signal(config: Config, identity: Identity) -> int:
    """Serve; SIGTERM cancels it in an orderly way."""
    serving = asyncio.create_task(_serve(config, identity))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        log.warning("rollout step ended by SIGTERM")
        return _TERMINATED
    return 0


async def _serve(config: Config, identity: Identity) -> None:
    membership = Membership(identity)
    # Joined before the engine is up: what the last incarnation held is dispatched again at once.
    start_s = config.recovery.start_timeout_s
    await asyncio.to_thread(functools.partial(membership.join, {}, timeout_s=start_s))
    membership.report(state="starting")
    metrics = MetricWriter(identity.run, "rollout", identity.index)
    queue = TransferQueue(identity, config=config.transfer)
    put_groups = _replay if config.rollout.replay else _generate
    try:
        await put_groups(config, identity, queue, membership, metrics)
    finally:
        metrics.close()
        await asyncio.to_thread(queue.close)
        await asyncio.to_thread(membership.leave)


async def _generate(
    config: Config,
    identity: Identity,
    queue: TransferQueue,
    membership: Membership,
    metrics: MetricWriter,
) -> None:
    engine = make_engine(config, identity)
    try:
        # At the same time: a server takes as long to start as transformers takes to import.
        _, (tokenizer, train_prompts, eval_prompts) = await asyncio.gather(
            engine.start(), asyncio.to_thread(_load_data, config)
        )
        await asyncio.to_thread(_open_dataset, queue, config.data, train_prompts)
        async with (
            _group_maker(config, engine, tokenizer) as maker,
            _archive(config, identity) as archive,
        ):
            parts = LoopParts(
                engine=engine,
                maker=maker,
                queue=queue,
                admit=_parallel_admit(identity),
                weights=WeightSubscriber(identity, config=config.transfer),
                progress=membership,
                metrics=metrics,
                train_prompts=train_prompts,
                eval_prompts=eval_prompts,
                archive=archive,
            )
            membership.report(state="running")
            await RolloutLoop(config, parts).run()
    finally:
        await engine.close()


async def _replay(
    config: Config,
    identity: Identity,
    queue: TransferQueue,
    membership: Membership,
    metrics: MetricWriter,
) -> None:
    """Put recorded groups; no engine is started."""
    _, train_prompts, _ = await asyncio.to_thread(_load_data, config)
    await asyncio.to_thread(_open_dataset, queue, config.data, train_prompts)
    membership.report(state="running")
    parts = ReplayParts(queue=queue, progress=membership, metrics=metrics, index=identity.index)
    await asyncio.to_thread(replay, config, parts, Path(config.rollout.replay))


def _load_data(config: Config) -> tuple[Tokenizer, PromptSet, Prompts]:
    tokenizer = load_tokenizer(config.model.path)
    train_prompts = load_prompts(config.data, "train", tokenizer)
    if not config.data.eval:
        return tokenizer, train_prompts, ()
    return tokenizer, train_prompts, load_prompts(config.data, "eval", tokenizer)


def _open_dataset(queue: TransferQueue, data: DataConfig, prompts: PromptSet) -> None:
    queue.open_dataset(len(prompts), prompts.fingerprint, allow_changed=data.allow_changed)


def _parallel_admit(identity: Identity) -> Admit:
    """Ask for slots from several threads, each through a client of its own.

    The queue remembers one grant per (role, index, rank), so that a grant whose reply was lost is
    given again: requests that run at the same time must not share one, so each client is a rank.
    """
    idle: list[TransferQueue] = []
    ranks = itertools.count(1)  # 0 is this task itself

    def admit(engine_version: int, max_groups: int, timeout_s: float) -> Admission:
        try:
            client = idle.pop()
        except IndexError:
            client = TransferQueue(dataclasses.replace(identity, rank=next(ranks)))
        try:
            return client.admit(engine_version, max_groups, timeout_s)
        finally:
            idle.append(client)

    return admit


@contextlib.asynccontextmanager
async def _archive(config: Config, identity: Identity) -> AsyncIterator[GroupArchive | None]:
    """Build what writes trajectories, if the run wants them; at exit it writes what still waits."""
    if not config.rollout.archive:
        yield None
        return
    archive = GroupArchive(identity.run.trajectories, identity)
    try:
        yield archive
    finally:
        await asyncio.to_thread(archive.close)


@contextlib.asynccontextmanager
async def _group_maker(
    config: Config, engine: Engine, tokenizer: Tokenizer
) -> AsyncIterator[GroupMaker]:
    """Build what makes groups; ends the reward's worker processes at exit."""
    reward = make_reward(config.reward, config.data)
    try:
        yield GroupMaker(
            engine=engine,
            reward=reward,
            tokenizer=tokenizer,
            stop_token_ids=stop_token_ids(config.model.path, tokenizer),
            rollout=config.rollout,
            algorithm=config.algorithm,
            seed=config.run.seed,
            # Half: a straggler's prompt is dispatched again before the run is given up.
            deadline_s=config.recovery.progress_timeout_s / 2,
        )
    finally:
        await close_reward(reward)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    # Not sys.exit: it would join threads that may wait in a long-poll to a dcs step that is gone.
    os._exit(code)
