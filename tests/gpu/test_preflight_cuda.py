"""GEMM and NCCL tests of the preflight on real GPUs; prints their numbers."""

import multiprocessing
import secrets
from typing import Any

import pytest
import torch

from relax_hpc.steps import preflight_gpu
from relax_hpc.steps.preflight_pair import PairListener
from relax_hpc.topology import node_facts
from relax_hpc.topology.node_report import TOKEN_BYTES, PairTold

pytestmark = pytest.mark.gpu


def test_every_gpu_multiplies() -> None:
    speeds = preflight_gpu.gemm_tflops()
    print(f"bfloat16 GEMM: {[round(speed) for speed in speeds]} TFLOP/s")
    assert len(speeds) == torch.cuda.device_count() == len(list(node_facts.list_gpus()))
    assert min(speeds) > 10


def test_nccl_inside_the_node() -> None:
    speed = preflight_gpu.node_gbytes_per_s()
    print(f"NCCL all-reduce in the node: {speed:.0f} GB/s")
    assert (speed > 1) == (torch.cuda.device_count() > 1)


def _end(gpu: int, connection: Any, token: bytes, told: Any) -> None:
    """One node of a pair; the answering one (GPU 0) tells its port first."""
    listener = PairListener("127.0.0.1")
    is_leader = gpu == 1
    if is_leader:
        port = connection.recv()
    else:
        connection.send(listener.port)
        port = 0
    pair = PairTold(rank=1 - gpu, address="127.0.0.1", port=port, is_leader=is_leader, token=token)
    told.put(preflight_gpu.pair_gbytes_per_s(pair, listener, "127.0.0.1", gpu=gpu))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs play two nodes")
def test_nccl_between_two_processes() -> None:
    context = multiprocessing.get_context("spawn")
    left, right = context.Pipe()
    told: Any = context.Queue()
    token = secrets.token_bytes(TOKEN_BYTES)
    ends = [
        context.Process(target=_end, args=(gpu, connection, token, told))
        for gpu, connection in enumerate((left, right))
    ]
    for process in ends:
        process.start()
    speeds = [told.get(timeout=120) for _ in ends]
    for process in ends:
        process.join(timeout=30)
    print(f"NCCL all-reduce of a pair: {[round(speed) for speed in speeds]} GB/s")
    assert min(speeds) > 1
