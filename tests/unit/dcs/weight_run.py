"""A run folder with the weight service in real processes and threads, for tests."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import RpcServer
from relax_hpc.dcs.client import WeightPublisher, WeightSubscriber
from relax_hpc.dcs.coordinator import SERVICE, WeightCoordinator
from relax_hpc.dcs.keeper import WeightKeeper
from relax_hpc.dcs.store import WeightStore
from relax_hpc.transfer.agent import NodeAgent

PROGRAM = Path(__file__).with_name("weight_process.py")
AGENT = Path(__file__).with_name("agent_process.py")
NODES = ("n01", "n02", "n03")


class Run:
    """A run folder with helpers; everything it starts ends with the test."""

    def __init__(self, folder, stack):
        self.folder, self.stack = folder, stack

    def me(self, role, node, **more):
        return Identity(run=self.folder, role=role, node=node, address_prefix="127.", **more)

    def coordinator(self, **more):
        me = self.me("dcs", "n01")
        server = RpcServer(self.folder, SERVICE, me)
        coordinator = WeightCoordinator(server, me, **more)
        server.start_thread()
        self.stack.callback(server.stop)
        return coordinator

    def agent(self, node):
        me = self.me("dcs", node)
        agent, keeper = NodeAgent(me), WeightKeeper(me)
        keeper.register(agent.data)
        agent.start()
        keeper.start()
        self.stack.callback(agent.close, remove=False)
        self.stack.callback(keeper.stop)
        return agent

    def publisher(self, node="n01", rank=0, incarnation=1):
        return WeightPublisher(self.me("train", node, rank=rank, incarnation=incarnation))

    def subscriber(self, node="n01", index=0, **more):
        subscriber = WeightSubscriber(self.me("rollout", node, index=index), **more)
        self.stack.callback(subscriber.close)
        return subscriber

    def process(self, *arguments):
        child = subprocess.Popen(
            [sys.executable, str(PROGRAM), arguments[0], str(self.folder.path), *arguments[1:]],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.stack.callback(kill, child)
        return child

    def agent_process(self, node, incarnation=1):
        """An agent to be stopped and killed; it serves when this returns."""
        child = subprocess.Popen(
            [sys.executable, str(AGENT), str(self.folder.path), node, str(incarnation)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.stack.callback(kill, child)
        assert child.stdout.readline().strip().isdigit()
        return child

    def store(self, node="n01"):
        return WeightStore(self.folder, node)


def kill(child):
    if child.poll() is None:
        os.kill(child.pid, signal.SIGKILL)
    child.wait(timeout=30)
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            stream.close()


def wait_until(predicate, what, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline, f"{what} did not happen in {timeout_s:g} s"
        time.sleep(0.02)
