"""One rank of the benchmark: runs both ways in turns; its times go into a JSON file.

Times are of the monotonic clock, which all processes of a machine share.
"""

import datetime
import json
import os
import sys
import time
import typing
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from relax_hpc.dcs.reshard import Header, ShardReceiver, ShardSender
from relax_hpc.dcs.weight_group import WeightGroup
from weights_bench.broadcast import BroadcastSync
from weights_bench.case import Case, make_case

DEADLINE_S = 120.0


def main(folder: Path, rank: int) -> None:
    settings = json.loads((folder / "settings.json").read_text())
    case = make_case(settings["gb"], settings["trainer"], settings["engine"])
    size = case.world_size
    device = torch.device("cuda", rank) if settings["is_cuda"] else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    dist.init_process_group(
        "nccl" if settings["is_cuda"] else "gloo",
        store=dist.FileStore(str(folder / "world"), size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=DEADLINE_S),
    )
    store = dist.FileStore(str(folder / "weights"), size)
    group = WeightGroup(store, rank, size, name="bench", device=device, deadline_s=DEADLINE_S)
    found = Rank(case, rank, group, settings["bucket_mb"] * 2**20).run(settings["rounds"])
    (folder / f"result-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


class Rank:
    """Tensors of one rank and both ways to sync them."""

    def __init__(self, case: Case, rank: int, group: WeightGroup, bucket_bytes: int) -> None:
        self._case, self._group = case, group
        first = case.trainer.num_ranks
        self._is_trainer = rank < first
        layout, number = (case.trainer, rank) if self._is_trainer else (case.engine, rank - first)
        self._tensors = {
            box: torch.zeros(box.shape, dtype=torch.bfloat16, device=group.device)
            for box in layout.boxes_of(number)
        }
        if self._is_trainer:
            held = list(self._tensors.items())
            self._sender = ShardSender(case.plan, rank, group, held, deadline_s=DEADLINE_S)
        else:
            self._receiver = ShardReceiver(
                case.plan, number, group, into=self._tensors, deadline_s=DEADLINE_S
            )
        self._broadcast = BroadcastSync(case, self._tensors, bucket_bytes, group.device)

    def run(self, rounds: int) -> dict[str, typing.Any]:
        """Both ways in turns, once to warm up; the bits are checked behind each."""
        times: dict[str, list[typing.Any]] = {"ours": [], "broadcast": []}
        ways = {"ours": self._ours, "broadcast": self._full}
        for number in range(rounds + 1):
            for way, sync in ways.items():
                times[way].append(self._timed(2 * number + (way == "ours"), sync))
        received = self._broadcast.num_bytes // (rounds + 1)
        return {way: found[1:] for way, found in times.items()} | {
            "sent_bytes": self._sent_bytes(rounds + 1),
            "broadcast_bytes": received,
        }

    def _timed(self, version: int, sync: Callable[[int], float]) -> dict[str, float]:
        if self._is_trainer:
            for box, tensor in self._tensors.items():
                tensor.copy_(self._case.content(box, version, self._group.device))
        self._synchronize()
        dist.barrier()
        started, cpu_s = time.monotonic(), time.process_time()
        stall_s = sync(version)
        self._synchronize()
        ended, cpu_s = time.monotonic(), time.process_time() - cpu_s
        if not self._is_trainer:
            self._check(version)
        dist.barrier()
        return {"started": started, "ended": ended, "stall_s": stall_s, "cpu_s": cpu_s}

    def _ours(self, version: int) -> float:
        if not self._is_trainer:
            self._receiver.receive(version)
            return 0.0
        started = time.monotonic()
        self._sender.snapshot(version)
        if self._group.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the optimizer's kernels come behind it
        stall_s = time.monotonic() - started
        self._sender.drain()
        return stall_s

    def _full(self, version: int) -> float:
        del version
        started = time.monotonic()
        self._broadcast.run()
        self._synchronize()
        return time.monotonic() - started if self._is_trainer else 0.0

    def _sent_bytes(self, num_versions: int) -> int:
        """Per version, with the headers."""
        if not self._is_trainer:
            return 0
        peers = sum(len(bundle.peers) for bundle in self._sender._bundles)
        return self._sender.sent_bytes // num_versions + peers * 8 * len(Header._fields)

    def _check(self, version: int) -> None:
        for box, tensor in self._tensors.items():
            wanted = self._case.content(box, version, self._group.device)
            if not torch.equal(tensor.view(torch.int16), wanted.view(torch.int16)):
                raise SystemExit(f"bench_weights: {box} is wrong after version {version}")

    def _synchronize(self) -> None:
        if self._group.device.type == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
