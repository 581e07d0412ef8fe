"""Two clusters for the tests of mirrors: two runs with weight services, and processes between."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import RpcServer, create_keys
from relax_hpc.dcs.client import WeightPublisher, WeightSubscriber
from relax_hpc.dcs.coordinator import SERVICE, WeightCoordinator
from relax_hpc.dcs.keeper import WeightKeeper
from relax_hpc.dcs.layout import TensorSpec
from relax_hpc.dcs.mirror import Mirror
from relax_hpc.dcs.mirror_source import MirrorSource
from relax_hpc.dcs.mirror_wire import create_mirror_key, load_mirror_key
from relax_hpc.dcs.store import VersionId
from relax_hpc.runfolder import create_run_folder

CHUNK = 1 << 14
SPECS = [
    TensorSpec("embed", "bfloat16", (1500, 512)),
    TensorSpec("norm", "float32", (77,)),
    TensorSpec("none", "bfloat16", (0, 4)),
    TensorSpec("scale", "float64", ()),
    TensorSpec("fp8", "float8_e4m3fn", (301, 999)),
    TensorSpec("mlp", "bfloat16", (512, 1024)),
]
NBYTES = sum(spec.nbytes for spec in SPECS)


def random_weights(seed, specs=SPECS):
    rng = np.random.default_rng(seed)
    return {s.name: rng.integers(0, 256, s.nbytes, dtype=np.uint8) for s in specs}


def changed(weights, seed, share=0.03, specs=SPECS):
    """Change that share of the elements at random, any bits."""
    rng, result = np.random.default_rng(seed), {}
    for spec in specs:
        result[spec.name] = data = weights[spec.name].copy()
        words = data.view(f"<u{spec.nbytes // spec.size}") if spec.size else data
        mask = rng.random(len(words)) < share
        top = 2 ** (8 * words.itemsize) - 1
        flips = rng.integers(1, top, int(mask.sum()), dtype=np.uint64, endpoint=True)
        words[mask] ^= flips.astype(words.dtype)
    return result


class Cluster:
    """A run with its weight service and one node, in this process."""

    def __init__(self, parent, name, stack):
        self.run, self.stack, self.node = create_run_folder(parent, name), stack, f"{name}01"
        create_keys(self.run)
        stack.callback(shutil.rmtree, self.run.shm(self.node), ignore_errors=True)
        me = self.me("dcs")
        server = RpcServer(self.run, SERVICE, me)
        self.coordinator = WeightCoordinator(server, me)
        server.start_thread()
        stack.callback(server.stop)
        keeper = WeightKeeper(me)  # deletes what retired; nobody reads from another node here
        keeper.start()
        stack.callback(keeper.stop)

    def me(self, role, **more):
        return Identity(run=self.run, role=role, node=self.node, address_prefix="127.", **more)

    def publish(self, version, weights, incarnation=1, specs=SPECS):
        publisher = WeightPublisher(self.me("train", incarnation=incarnation))
        pieces = ((s.whole(), s.dtype, weights[s.name]) for s in specs)
        return publisher.publish(version, pieces, specs, 1, 0)

    def newest(self):
        return WeightSubscriber(self.me("rollout")).wait_newer(None, 0.0)

    def check(self, version, weights, specs=SPECS):
        """An engine here gets that version, bit for bit."""
        subscriber = WeightSubscriber(self.me("rollout"))
        assert subscriber.wait_newer(None, 0.0) == version
        tensors = subscriber.fetch(version)
        assert [TensorSpec(n, t.dtype, t.shape) for n, t in tensors.items()] == specs
        for name, data in weights.items():
            assert tensors[name].data.tobytes() == data.tobytes(), name


class Bed:
    """Cluster `a` trains, cluster `b` has engines; everything ends with the stack."""

    def __init__(self, folder, stack, a, b):
        self.folder, self.stack, self.a, self.b = folder, stack, a, b
        self.key_file = folder / "mirror.key"
        create_mirror_key(self.key_file)
        self.key = load_mirror_key(self.key_file)
        self.spool = folder / "spool"

    def source(self, **more):
        source = MirrorSource(
            self.a.me("observer"), self.key, ("127.0.0.1", 0), chunk_bytes=CHUNK, **more
        )
        source.start()
        self.stack.callback(source.stop)
        return source

    def mirror(self, address, **more):
        me = self.b.me("mirror")
        options = {"patience_s": 30.0, "streams": 3} | more
        mirror = Mirror(me, self.key, address, self.spool, **options)
        self.stack.callback(mirror.close)
        return mirror

    def serve(self, port=0, start=subprocess.Popen, ip="127.0.0.1", chunk=CHUNK):
        """A source process; returns it and its address."""
        arguments = ["serve", "--run", self.a.run.path, "--node", self.a.node]
        arguments += ["--listen", f"{ip}:{port}", "--chunk-bytes", chunk]
        child = self._child(start, arguments, stdout=subprocess.PIPE)
        found_ip, found_port = child.stdout.readline().split()
        return child, (found_ip, int(found_port))

    def follow(self, address, versions=1, start=subprocess.Popen, **more):
        """A mirror process that ends with code 0 after so many versions."""
        arguments = ["follow", "--run", self.b.run.path, "--node", self.b.node]
        arguments += ["--source", f"{address[0]}:{address[1]}", "--spool", self.spool]
        arguments += ["--versions", versions]
        for name, value in more.items():
            arguments += [f"--{name.replace('_', '-')}", value]
        return self._child(start, arguments)

    def _child(self, start, arguments, **options):
        command = [sys.executable, "-m", "relax_hpc.steps.mirror", *map(str, arguments)]
        command += ["--key", str(self.key_file)]
        log = (self.folder / f"{arguments[0]}.log").open("a")
        child = start(command, stderr=log, text=True, **options)
        log.close()
        self.stack.callback(kill, child)
        return child

    def log(self, side="follow"):
        return (self.folder / f"{side}.log").read_text()

    def logged(self, name, side="follow"):
        """All values of a field in a log."""
        return [float(value) for value in re.findall(rf"\b{name}=([0-9.e+-]+)", self.log(side))]


def kill(child):
    if child.poll() is None:
        os.kill(child.pid, signal.SIGKILL)
    child.wait(timeout=30)
    if child.stdout is not None:
        child.stdout.close()


@contextlib.contextmanager
def two_clusters(folder: Path):
    with contextlib.ExitStack() as stack:
        yield Bed(folder, stack, Cluster(folder, "a", stack), Cluster(folder, "b", stack))


def wait_until(predicate, what, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline, f"{what} did not happen in {timeout_s:g} s"
        time.sleep(0.02)


def version(number, incarnation=1):
    return VersionId(incarnation, number)
