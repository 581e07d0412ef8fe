"""Both queues behind one interface: a producer and a consumer process, asked in turns."""

import dataclasses
import shutil
import sys
import time
from typing import Protocol

from relax_hpc.control.identity import LocalPlace, task_environment
from relax_hpc.control.rpc import create_keys
from relax_hpc.runfolder import create_run_folder
from transfer_bench.environment import transferqueue_python
from transfer_bench.side import Answer, Side
from transfer_bench.workplace import Workplace

_ARMED_S = 0.005
"""A consumer that was asked to wait does so after this time."""


class Queue(Protocol):
    """What is compared. Every answer has put_s, get_s, read_s and checksum."""

    def round(self, work: str) -> Answer:
        """Put all, then take all."""

    def latency(self, work: str) -> Answer:
        """Put while the consumer waits; latency_s from the start of the put to its arrays."""

    def close(self) -> None:
        """End all processes."""


class TransferQueueSimple:
    """TransferQueue with its simple backend; serves every work."""

    def __init__(self, place: Workplace) -> None:
        module = ("-m", "transfer_bench.transferqueue_side", str(place.short))
        command = [str(transferqueue_python()), *module]
        log = place.disk / "transferqueue.log"
        self._side = Side("TransferQueue", command, place.variables(), log)
        self.version: str = self._side.ask(do="ready")["version"]

    def round(self, work: str) -> Answer:
        return self._side.ask(do="round", work=work)

    def key_value_round(self, work: str) -> Answer:
        """The same by its key-value interface, where the consumer must know the keys."""
        return self._side.ask(do="key_value_round", work=work)

    def latency(self, work: str) -> Answer:
        return self._side.ask(do="latency", work=work)

    def close(self) -> None:
        self._side.close()


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """Where processes of our queue run."""

    name: str = "n1"
    address: str = "127."
    """Prefix of the IP address that its services bind to."""
    prefix: tuple[str, ...] = ()
    """Command that enters the node's network namespace."""


HERE = Node()


class OurQueue:
    """Our queue in a run of its own: controller, an agent per node, producer, consumer."""

    def __init__(
        self,
        work: str,
        place: Workplace,
        producer: Node = HERE,
        consumer: Node = HERE,
        *,
        is_in_memory: bool = False,
    ) -> None:
        self._run = create_run_folder(place.memory if is_in_memory else place.disk, f"run-{work}")
        self._nodes = {producer, consumer}
        self._work = work
        self._place = place
        self._sides: list[Side] = []
        create_keys(self._run)
        try:
            self._start("controller", "dcs", producer)
            for rank, node in enumerate(sorted(self._nodes, key=lambda node: node.name)):
                self._start("agent", "dcs", node, rank)
            self._producer = self._start("producer", "rollout", producer)
            self._consumer = self._start("consumer", "train", consumer)
        except BaseException:
            self.close()
            raise

    def round(self, work: str) -> Answer:
        assert work == self._work
        return self._producer.ask(do="put") | self._consumer.ask(do="take")

    def latency(self, work: str) -> Answer:
        assert work == self._work
        self._consumer.send(do="take")
        time.sleep(_ARMED_S)
        put = self._producer.ask(do="put")
        taken = self._consumer.receive()
        return put | taken | {"latency_s": taken["received_at"] - put["begun_at"]}

    def close(self) -> None:
        """End all processes, clients first; remove what a killed agent left."""
        for side in reversed(self._sides):
            side.close()
        for node in self._nodes:
            shutil.rmtree(self._run.shm(node.name), ignore_errors=True)

    def _start(self, what: str, role: str, node: Node, rank: int = 0) -> Side:
        place = LocalPlace(rank=rank, world=1, local_rank=0, node=node.name)
        told = task_environment(
            run=self._run, role=role, attempt=1, incarnation=1,
            address_prefix=node.address, local=place,
        )  # fmt: skip
        module = ("-m", "transfer_bench.our_side", what, self._work)
        log = self._run.path / f"{what}-{node.name}.log"
        command = [*node.prefix, sys.executable, *module]
        side = Side(f"our {what}", command, self._place.variables(**told), log)
        self._sides.append(side)
        side.ask(do="ready")
        return side
