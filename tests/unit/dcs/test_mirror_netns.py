"""Weights across two network namespaces whose link is slow (tc tbf) and cut in the middle."""

import contextlib
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from relax_hpc.metrics.metric import read_metrics, series
from relax_hpc.runfolder import RunFolder
from tests.netns import two_nodes, why_not

from .mirror_bed import Bed, wait_until

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

ROOT = Path(__file__).parents[3]
PROGRAM = "tests.unit.dcs.mirror_cluster_process"
STREAMS = 4


class FarCluster:
    """A cluster in a namespace, told what to do."""

    def __init__(self, nodes, index, folder, mib, stack):
        name = "ab"[index]
        self.node = f"{name}01"
        command = [sys.executable, "-m", PROGRAM, str(folder), name, str(mib)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = nodes.start(index, command, cwd=ROOT, text=True, **pipes)
        self.run = RunFolder(Path(self._process.stdout.readline().strip()))
        stack.callback(shutil.rmtree, self.run.shm(self.node), ignore_errors=True)

    def tell(self, command, number):
        self._process.stdin.write(f"{command} {number}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "ok\n"


@pytest.mark.parametrize(
    ("mib", "mbit", "cut_s"),
    [
        pytest.param(64, 200, 2.0),
        pytest.param(1024, 400, 10.0, marks=[pytest.mark.long, pytest.mark.timeout(600)]),
    ],
)
def test_a_model_arrives_over_a_slow_link_that_is_cut(tmp_path, mib, mbit, cut_s):
    """Whole, then 3 % of its elements changed; counted on the wire: what is sent twice."""
    nbytes = mib << 20
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(two_nodes())
        slow_down(nodes, mbit)
        a, b = (FarCluster(nodes, i, tmp_path, mib, stack) for i in (0, 1))
        bed = Bed(tmp_path, stack, a, b)

        def start(node):
            return lambda command, **options: nodes.start(node, command, **options)

        _, address = bed.serve(start=start(0), ip=nodes.ipv4[0], chunk=1 << 20)
        shares = []
        for number, cut_at in ((0, 0.4), (1, 0.02)):
            a.tell("publish", number)
            before = sent(nodes)
            cutter = threading.Thread(
                target=cut_once, args=(nodes, before + cut_at * nbytes, cut_s), daemon=True
            )
            cutter.start()
            child = bed.follow(address, streams=STREAMS, patience_s=120, start=start(1))
            assert child.wait(400) == 0
            cutter.join()
            b.tell("check", number)
            shares.append((sent(nodes) - before) / nbytes)
        whole, delta = bed.logged("received_share")
        assert whole < 1.001 + STREAMS / mib  # a chunk of each stream came in part
        assert delta <= 0.06
        # Headers of packets, and what the kernels had queued or sent again when the link was cut.
        assert shares[0] < 1.08 + 3 * STREAMS / mib, shares
        assert shares[1] <= 0.065 + 2 * STREAMS / mib, shares
        seconds = series(read_metrics(b.run), "dcs/mirror_s")
        print(f"{mib} MiB at {mbit} Mbit/s, cut for {cut_s} s each: {seconds} s, wire {shares}")


def slow_down(nodes, mbit):
    """Limit both directions; 50 ms of bytes wait, what is beyond that is dropped."""
    for name in nodes.names:
        command = f"tc -n {name} qdisc add dev cable root tbf rate {mbit}mbit burst 128kb"
        subprocess.run([*command.split(), "latency", "50ms"], check=True, timeout=30)


def sent(nodes):
    """Bytes that the trainer's end has put on the wire, headers and repeated ones too."""
    return nodes.call(0, lambda: _sent(Path("/proc/thread-self/net/dev").read_text()))


def _sent(text):
    (line,) = [line for line in text.splitlines() if line.strip().startswith("cable:")]
    return int(line.split(":")[1].split()[8])


def cut_once(nodes, at, seconds):
    wait_until(lambda: sent(nodes) > at, "a part of the version", 300)
    with nodes.cut(seconds):
        pass
