"""Our reads of another node's blocks against plain sockets, between two network namespaces."""

import dataclasses
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.netns import TwoNodes, two_nodes, why_not
from transfer_bench.queues import Node, OurQueue
from transfer_bench.side import Answer, Side, SideError
from transfer_bench.work import checksum, make_work
from transfer_bench.workplace import Workplace

WORK = "tensors"
_STREAMS = (1, 4)


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """GB/s, medians, of the tensors' bytes from one node to the other."""

    ours: float
    """take_chunk: checksums compared, arrays in recycled memory."""
    raw: dict[int, float]
    """Plain sockets, by number of streams."""

    @property
    def ratio(self) -> float:
        """Ours : the best of plain sockets."""
        return self.ours / max(self.raw.values())


def measure_network(place: Workplace, rounds: int) -> Network | None:
    """Run both in turns; None where namespaces cannot be made (it is said why).

    Raises:
        SideError: a process failed.
    """
    if reason := why_not():
        print(f"no figure for TCP: {reason}", file=sys.stderr)
        return None
    work = make_work(WORK)
    ours: list[float] = []
    raw: dict[int, list[float]] = {streams: [] for streams in _STREAMS}
    with two_nodes() as nodes, _raw(nodes, place) as receiver:
        queue = OurQueue(WORK, place, _node(nodes, 0), _node(nodes, 1))
        try:
            for number in range(rounds + 1):
                taken = queue.round(WORK)
                _check(taken, checksum(work.samples))
                plain = {
                    streams: receiver.ask(do="receive", nbytes=work.nbytes, streams=streams)
                    for streams in _STREAMS
                }
                if number > 0:
                    ours.append(work.nbytes / taken["get_s"] / 1e9)
                    for streams, answer in plain.items():
                        raw[streams].append(work.nbytes / answer["get_s"] / 1e9)
        finally:
            queue.close()
    medians = {streams: statistics.median(values) for streams, values in raw.items()}
    return Network(statistics.median(ours), medians)


def _check(taken: Answer, wanted: int) -> None:
    if taken["checksum"] != wanted:
        raise SideError(f"TCP: {WORK} arrived changed: {taken['checksum']}, put {wanted}")


def _node(nodes: TwoNodes, number: int) -> Node:
    enter = ("ip", "netns", "exec", nodes.names[number])
    return Node(f"node{number}", nodes.ipv4[number], enter)


@contextmanager
def _raw(nodes: TwoNodes, place: Workplace) -> Iterator[Side]:
    sides = []
    try:
        for number, words in enumerate((("send", nodes.ipv4[0]), ("receive",))):
            command = [*_node(nodes, number).prefix, sys.executable, "-m"]
            command += ["transfer_bench.raw_tcp", *words]
            log = place.disk / f"raw-{words[0]}.log"
            sides.append(Side(f"raw {words[0]}", command, place.variables(), log))
        port = sides[0].ask(do="ready")["port"]
        sides[1].ask(do="connect", address=nodes.ipv4[0], port=port, streams=max(_STREAMS))
        yield sides[1]
    finally:
        for side in reversed(sides):
            side.close()
