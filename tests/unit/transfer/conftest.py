"""A run folder, identities, a controller, agents and clients for tests of the queue."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relax_hpc.config import TransferConfig
from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import RpcServer, create_keys
from relax_hpc.runfolder import RunFolder, create_run_folder
from relax_hpc.transfer import wire
from relax_hpc.transfer.agent import NodeAgent
from relax_hpc.transfer.controller import QueueController
from relax_hpc.transfer.queue_rules import QueueRulesConfig
from relax_hpc.transfer.transfer_queue import TransferQueue

NODES = ("n1", "n2")
SMALL = TransferConfig(extent_mb=1, arena_mb=8, put_timeout_s=60)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    run = create_run_folder(tmp_path, "run")
    create_keys(run)
    yield run
    for node in NODES:
        shutil.rmtree(run.shm(node), ignore_errors=True)


@pytest.fixture
def who(folder: RunFolder) -> Callable[..., Identity]:
    def build(role: str = "rollout", **changes: object) -> Identity:
        base = Identity(run=folder, role=role, node="n1", address_prefix="127.")
        return dataclasses.replace(base, **changes)  # type: ignore[arg-type]

    return build


RULES = QueueRulesConfig(
    groups_per_step=4, group_size=2, max_staleness=1, chunks_per_step=2, train_steps=5
)


@pytest.fixture
def start_agent(
    folder: RunFolder, who: Callable[..., Identity]
) -> Iterator[Callable[..., NodeAgent]]:
    agents: list[NodeAgent] = []

    def start(identity: Identity | None = None, config: TransferConfig = SMALL) -> NodeAgent:
        agent = NodeAgent(who("dcs") if identity is None else identity, config)
        agent.start()
        agents.append(agent)
        return agent

    yield start
    for agent in agents:
        agent.close(remove=True)


@pytest.fixture
def serve(
    folder: RunFolder,
    who: Callable[..., Identity],
    start_agent: Callable[..., NodeAgent],
) -> Iterator[Callable[..., RpcServer]]:
    """Start a controller, and at the first call the agent of node n1."""
    servers: list[RpcServer] = []

    def start(rules: QueueRulesConfig = RULES, **changes: object) -> RpcServer:
        if not servers:
            start_agent()
        identity = who("dcs", **changes)
        server = RpcServer(folder, wire.SERVICE, identity)
        QueueController(server, identity, rules)
        server.start_thread()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def connect(folder: RunFolder) -> Iterator[Callable[..., TransferQueue]]:
    queues: list[TransferQueue] = []

    def open_queue(identity: Identity, **options: object) -> TransferQueue:
        options.setdefault("config", SMALL)
        queues.append(TransferQueue(identity, **options))  # type: ignore[arg-type]
        return queues[-1]

    yield open_queue
    for queue in queues:
        queue.close()
