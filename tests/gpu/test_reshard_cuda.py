"""A reshard on GPUs: over NCCL between two of them, and through host memory with gloo from one.

`pytest -m gpu tests/gpu/test_reshard_cuda.py -s` prints GB/s. The NCCL tests need 2 GPUs.
"""

import json
import os
import signal
import threading
import time
import typing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from relax_hpc.dcs.reshard import ShardReceiver, ShardSender
from relax_hpc.dcs.staging import checksum
from relax_hpc.dcs.weight_group import WeightGroup
from relax_hpc.errors import WeightSyncError
from tests.distributed.launch import Ranks, run_distributed, start_distributed
from tests.distributed.reshard_process import Case, make_case
from tests.unit.dcs.weight_shapes import CONFIGS

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

DEADLINE_S = 60.0
# Layers of Qwen3-4B: 0.2 GB each, and 0.78 GB of embedding.
LARGE = CONFIGS["qwen3"] | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_hidden_layers": 20,
}


def content(case: Case, version: int) -> dict[str, torch.Tensor]:
    """The whole tensors of a version, made on this rank's GPU; equal on GPUs of one kind."""
    generator = torch.Generator("cuda").manual_seed(version)
    options = {"dtype": torch.int16, "device": "cuda", "generator": generator}
    return {
        tensor.name: torch.randint(-(2**15), 2**15, tensor.shape, **options).view(torch.bfloat16)
        for tensor in case.model.tensors
    }


def equal(got: typing.Any, tensors: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(tensor.view(torch.int16), tensors[box.name][box.slices].view(torch.int16))
        for box, tensor in got.items()
    )


def group_of(folder: str, name: str, deadline_s: float = DEADLINE_S) -> WeightGroup:
    store = dist.FileStore(f"{folder}/{name}", 2)
    rank = dist.get_rank()
    return WeightGroup(store, rank, 2, name=name, device="cuda:0", deadline_s=deadline_s)


def sync_pair(folder: str) -> list[float]:
    """Four versions, each overwritten while it is on its way: [GB, seconds, stall] of the last."""
    case = make_case(LARGE, {"tp": 1}, {"tp": 1})
    group = group_of(folder, "one")
    if dist.get_rank() == 1:
        receiver = ShardReceiver(case.plan, 0, group, deadline_s=DEADLINE_S)
        for version in range(1, 5):
            tensors = content(case, version)
            dist.barrier()
            torch.cuda.synchronize()
            assert equal(receiver.receive(version), tensors), version
        return []
    parameters = {name: tensor.clone() for name, tensor in content(case, 1).items()}
    held = [(box, parameters[box.name]) for box in case.trainer.boxes_of(0)]
    sender = ShardSender(case.plan, 0, group, held, deadline_s=DEADLINE_S)
    for version in range(1, 5):
        for name, tensor in content(case, version).items():
            parameters[name].copy_(tensor)
        dist.barrier()
        torch.cuda.synchronize()
        started = time.monotonic()
        sender.snapshot(version)
        for tensor in parameters.values():
            tensor.zero_()  # the optimizer, behind the snapshot on its stream
        torch.cuda.synchronize()
        stall_s = time.monotonic() - started
        sender.drain()
        seconds = time.monotonic() - started
    sender.close()
    return [case.plan.total_bytes / 1e9, seconds, stall_s]


@needs_two
def test_one_gpu_to_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gb, seconds, stall_s = run_distributed(sync_pair, 2, str(tmp_path), on_gpus=True)[0]
    with capsys.disabled():
        print(
            f"\nreshard over NCCL: {gb:.2f} GB in {seconds:.4f} s = {gb / seconds:.0f} GB/s, with "
            f"checksums and double-buffered; snapshot and overwriting {stall_s:.4f} s"
        )


def broken_pair(folder: str, victim: int, fault: int) -> None:
    """Version 2 finds the other rank dead or stopped; writes the error and leaves."""
    case = make_case(CONFIGS["qwen3"], {"tp": 1}, {"tp": 1})
    rank, group = dist.get_rank(), group_of(folder, "one")
    tensors = content(case, 1)
    said = ""
    if rank == 0:
        held = [(box, tensors[box.name]) for box in case.trainer.boxes_of(0)]
        member: typing.Any = ShardSender(case.plan, 0, group, held, deadline_s=DEADLINE_S)
        member.send(1)
    else:
        member = ShardReceiver(case.plan, 0, group, deadline_s=DEADLINE_S)
        assert equal(member.receive(1), tensors)
    if rank == victim:
        os.kill(os.getpid(), fault)
    member.deadline_s = 3.0
    try:
        # Small messages may be on their way before anybody takes them: go on until they are not.
        for version in range(2, 10_000):
            member.send(version) if rank == 0 else member.receive(version)
    except WeightSyncError as err:
        said = str(err)
    assert member.is_broken
    torch.cuda.synchronize()  # nothing of the dead group hangs on the GPU
    Path(folder, "said").write_text(
        json.dumps([said, rank == 0 or equal(member._tensors, tensors)])
    )
    os._exit(0)


@needs_two
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1], ids=["sender", "receiver"])
def test_a_dead_or_stopped_gpu_rank_hangs_nobody(tmp_path: Path, victim: int, fault: int) -> None:
    ranks = start_distributed(broken_pair, 2, str(tmp_path), victim, int(fault), on_gpus=True)
    try:
        survivor = ranks.processes[1 - victim]
        assert survivor.wait(120) == 0, ranks.log(1 - victim)
    except BaseException:
        print(ranks.log(0), ranks.log(1))
        raise
    finally:
        kill(ranks)
    said, is_whole = json.loads((tmp_path / "said").read_text())
    assert is_whole
    assert f"rank {1 - victim}" in said or "rank 0" in said, said
    assert "broken" in said


def kill(ranks: Ranks) -> None:
    for process in ranks.processes:
        if process.poll() is None:
            process.kill()


def test_from_a_gpu_through_host_memory_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and engine tensors on a GPU, transposed in memory; both ends in this process."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    case = make_case(CONFIGS["qwen3_moe"], {"tp": 1}, {"tp": 1})
    store, made = dist.HashStore(), {}

    def join(rank: int) -> None:
        group = WeightGroup(store, rank, 2, name="one", deadline_s=DEADLINE_S)
        if rank == 0:
            made[0] = ShardSender(case.plan, 0, group, list(parameters.items()))
        else:
            made[1] = ShardReceiver(case.plan, 0, group, into=into)

    def on_gpu(boxes: typing.Any) -> dict[typing.Any, torch.Tensor]:
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        return {
            box: torch.zeros(box.shape[::-1], **options).permute(*range(len(box.shape))[::-1])
            for box in boxes
        }

    parameters, into = on_gpu(case.trainer.boxes_of(0)), on_gpu(case.engine.boxes_of(0))
    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for version in (1, 2, 3):
        tensors = content(case, version)
        for box, parameter in parameters.items():
            parameter.copy_(tensors[box.name][box.slices])
        made[0].snapshot(version)
        for parameter in parameters.values():
            parameter.zero_()
        got = made[1].receive(version)
        for box, tensor in got.items():
            wanted = tensors[box.name][box.slices]
            assert torch.equal(tensor.contiguous().view(torch.int16), wanted.view(torch.int16)), (
                version,
                box,
            )
    made[0].close()
    made[1].close()


def test_the_checksum_of_a_gpu_sees_every_bit_and_swap() -> None:
    data = torch.randint(0, 256, (9 * 2**22 + 5,), dtype=torch.uint8, device="cuda")
    seen = {checksum(data), checksum(data)}
    for place in (0, 2**20, len(data) - 9, len(data) - 1):
        data[place] ^= 1
        seen.add(checksum(data))
    data[:16] = torch.arange(16, dtype=torch.uint8, device="cuda")
    seen.add(checksum(data))
    data[:16] = data[:16].roll(8)
    seen.add(checksum(data))
    assert len(seen) == 7
