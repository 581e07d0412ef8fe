"""Speed of a node's GPUs: matrix products, and NCCL inside the node and with a partner node.

One process drives all GPUs of its node, so that they work (and draw power) at once, as in a run.
"""

import datetime
import struct
import time

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from C++

from relax_hpc.steps.preflight_pair import PairListener, connected, receive
from relax_hpc.topology.node_report import PairTold

_GEMM_SIZE = 8192
_NUM_GEMMS = 20
_NUM_WARM_UPS = 3
_REDUCE_BYTES = 256 << 20
_NUM_REDUCES = 5
_NCCL_TIMEOUT_S = 20.0
_PORT = struct.Struct("<H")


def gemm_tflops(size: int = _GEMM_SIZE) -> list[float]:
    """Return TFLOP/s of each GPU of this node, bfloat16 products of `size` x `size`.

    The time of the k-th GPU is measured by its own events while all others work too.
    """
    work = []
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
            begin, end = _timer(), _timer()
            work.append((index, a, torch.empty_like(a), begin, end))
    for count, is_timed in ((_NUM_WARM_UPS, False), (_NUM_GEMMS, True)):
        for index, a, out, begin, end in work:
            with torch.cuda.device(index):
                if is_timed:
                    begin.record()
                for _ in range(count):
                    torch.mm(a, a, out=out)
                if is_timed:
                    end.record()
    speeds = []
    for index, _, _, begin, end in work:
        torch.cuda.synchronize(index)
        flop = 2 * size**3 * _NUM_GEMMS
        speeds.append(flop / (begin.elapsed_time(end) * 1e-3) / 1e12)
    return speeds


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def node_gbytes_per_s(num_bytes: int = _REDUCE_BYTES) -> float:
    """Return the bus bandwidth of an all-reduce over the GPUs of this node; 0.0 for one GPU.

    Bus bandwidth as nccl-tests define it: 2 (n-1)/n x bytes / time.
    """
    count = torch.cuda.device_count()
    if count < 2:
        return 0.0
    tensors = [
        torch.ones(num_bytes // 2, device=f"cuda:{index}", dtype=torch.bfloat16)
        for index in range(count)
    ]
    shortest = float("inf")
    for _ in range(1 + _NUM_REDUCES):  # the first one connects
        for index in range(count):
            torch.cuda.synchronize(index)
        before = time.perf_counter()
        torch.cuda.nccl.all_reduce(tensors)  # type: ignore[no-untyped-call]
        for index in range(count):
            torch.cuda.synchronize(index)
        shortest = min(shortest, time.perf_counter() - before)
    return 2 * (count - 1) / count * num_bytes / shortest / 1e9


def pair_gbytes_per_s(pair: PairTold, listener: PairListener, address: str, gpu: int = 0) -> float:
    """Return the bus bandwidth of an NCCL all-reduce between one GPU here and one there.

    The answering side offers the store: its port goes to the leader over the pair's connection.

    Raises:
        OSError, RuntimeError: the partner did not come, or NCCL failed.
    """
    limit = datetime.timedelta(seconds=_NCCL_TIMEOUT_S)
    with connected(pair, listener) as connection:
        if pair.is_leader:
            (port,) = _PORT.unpack(receive(connection, _PORT.size))
            store = TCPStore(pair.address, port, 2, is_master=False, timeout=limit)
        else:
            store = TCPStore(address, 0, 2, is_master=True, wait_for_workers=False, timeout=limit)
            connection.sendall(_PORT.pack(store.port))
        torch.cuda.set_device(gpu)
        dist.init_process_group(
            "nccl", store=store, rank=int(pair.is_leader), world_size=2, timeout=limit
        )
        try:
            return _timed_all_reduce(_REDUCE_BYTES)
        finally:
            dist.destroy_process_group()


def _timed_all_reduce(num_bytes: int) -> float:
    tensor = torch.ones(num_bytes // 2, device="cuda", dtype=torch.bfloat16)
    shortest = float("inf")
    for _ in range(1 + _NUM_REDUCES):
        torch.cuda.synchronize()
        before = time.perf_counter()
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        shortest = min(shortest, time.perf_counter() - before)
    return num_bytes / shortest / 1e9  # 2 (n-1)/n = 1 for two
