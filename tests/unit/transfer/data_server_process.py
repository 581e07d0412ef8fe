"""A data server in a process of its own, to be stopped and killed; blocks to read from it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from relax_hpc.transfer.block import ALIGN, Entry, plan_block, write_block
from relax_hpc.transfer.tcp_server import DataServer
from relax_hpc.transfer.wire import BlockRef, DataAccess

KEY = bytes(range(32))
Start = Callable[..., "subprocess.Popen[Any]"]


class ServerProcess:
    """A server of one folder; `restart` gives it a new process and a new port."""

    def __init__(self, folder: Path, ip: str = "127.0.0.1", start: Start = subprocess.Popen):
        self.folder, self.ip, self._start = folder, ip, start
        self.num_asked = 0
        self.restart()

    def restart(self) -> None:
        command = [sys.executable, __file__, str(self.folder), self.ip]
        self.process = self._start(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def access(self, node: str, deadline: float, refresh: bool) -> DataAccess:
        self.num_asked += 1
        return DataAccess(self.ip, self.port)

    def kill(self) -> None:
        """End it without a word; also when it is stopped."""
        self.process.kill()
        self.process.wait(30)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


def write_blocks(
    folder: Path, extent: str, sizes: list[int], *, gap: int = 0, first_epoch: int = 1
) -> list[BlockRef]:
    """Write a file of blocks (one group of two samples each) as a producer's extent has them."""
    rng = np.random.default_rng(len(sizes))
    plans = [
        plan_block(
            [Entry(f"{i}.0.0", s, "tokens", _numbers(rng, size)) for s in range(2)]
            + [Entry(f"{i}.0.0", s, "reward", np.float32(i + s)) for s in range(2)]
        )
        for i, size in enumerate(sizes)
    ]
    image = bytearray(4096 + sum(-(-p.nbytes // ALIGN) * ALIGN + gap for p in plans))
    refs, offset = [], 4096
    for epoch, plan in enumerate(plans, first_epoch):
        digest = write_block(plan, memoryview(image)[offset:], epoch)
        refs.append(BlockRef("n1", extent, offset, plan.nbytes, epoch, digest))
        offset += -(-plan.nbytes // ALIGN) * ALIGN + gap
    folder.mkdir(parents=True, exist_ok=True)
    (folder / extent).write_bytes(image)
    return refs


def _numbers(rng: np.random.Generator, nbytes: int) -> np.ndarray:
    return rng.integers(0, 2**31, nbytes // 4, np.int32)


def main() -> None:
    folder, ip = sys.argv[1:]
    server = DataServer({"arenas": Path(folder)}, KEY, ip)
    print(server.start()[1], flush=True)
    sys.stdin.read()  # until the test closes it or ends
    server.stop()


if __name__ == "__main__":
    main()
