"""Rows per second and memory of the queue controller, a process of its own; no payload is moved.

    64 producers                    controller               64 consumers
      admit, put_groups   ----->    journal on disk   ---->    take_chunk of dp rank 0 .. 63,
      collect_free        <-----                               one of them complete_step

`--rows` rows in groups of 8; a producer puts up to 8 groups in one message. Then the latency of one
group from put to a take_rows that waits in another process, with the journal on the disk and in
/dev/shm.

    PYTHONPATH=tools:. python -m transfer_bench.metadata [--quick] [--profile FILE]
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import Empty, RpcClient, RpcServer, create_keys
from relax_hpc.runfolder import RunFolder, create_run_folder
from relax_hpc.transfer import wire
from relax_hpc.transfer.controller import QueueController
from relax_hpc.transfer.queue_rules import QueueRulesConfig

NUM_PRODUCERS = NUM_CONSUMERS = 64
GROUP_SIZE = 8
GROUPS_PER_STEP = 1024
_GROUPS_PER_PUT = 8
_CALL_S = 120.0
_PROMPT, _RESPONSE = 100, 4000


def rules(num_steps: int, *, is_latency: bool = False) -> QueueRulesConfig:
    """Rules of the benchmark's run."""
    if is_latency:
        fields = {"ref": "ref_logprobs"}
        return QueueRulesConfig(
            groups_per_step=4096, group_size=GROUP_SIZE, max_staleness=0, chunks_per_step=1,
            train_steps=num_steps, task_fields=fields,
        )  # fmt: skip
    return QueueRulesConfig(
        groups_per_step=GROUPS_PER_STEP, group_size=GROUP_SIZE, max_staleness=3,
        chunks_per_step=2, train_steps=num_steps,
    )  # fmt: skip


def identity(run: RunFolder, role: str, **changes: int) -> Identity:
    """One process of the run; all on this machine."""
    return Identity(run=run, role=role, node="n1", address_prefix="127.", **changes)


class Caller:
    """Calls of one process to the controller."""

    def __init__(self, run: RunFolder, role: str, **changes: int) -> None:
        self._client = RpcClient(run, wire.SERVICE, identity(run, role, **changes))

    def __call__(self, method: str, request: object, response: type) -> object:
        return self._client.call(method, request, response, timeout_s=_CALL_S, why="benchmark")


def make_group(uid: str, arena: str, number: int, version: int) -> wire.GroupInfo:
    """What a producer tells of a group; `number` makes its block unique."""
    size = GROUP_SIZE * 8 * _RESPONSE
    offset = number % 64 * size
    block = wire.BlockRef("n1", f"{arena}.{number // 64}", offset, size, number, 1 << 60)
    lengths = [_PROMPT + _RESPONSE + (number * 37 + i * 101) % 4000 for i in range(GROUP_SIZE)]
    rows = wire.Rows([_PROMPT] * GROUP_SIZE, lengths, ["stop"] * GROUP_SIZE)
    return wire.GroupInfo(uid, block, rows, version, version)


# -- processes ------------------------------------------------------------------------------------


def controller(run: RunFolder, num_steps: int, is_latency: bool, profile: str) -> None:
    """Serve until the input ends."""
    me = identity(run, "dcs")
    server = RpcServer(run, wire.SERVICE, me)
    QueueController(server, me, rules(num_steps, is_latency=is_latency))
    threading.Thread(target=lambda: (sys.stdin.read(), server.stop()), daemon=True).start()
    if not profile:
        server.run()
        return
    import cProfile

    with cProfile.Profile() as profiler:
        server.run()
    profiler.dump_stats(profile)


class Weights:
    """The policy version that the engines of this process serve: the newest one, a moment late."""

    def __init__(self, run: RunFolder, first: int) -> None:
        self.version = 0
        self._call = Caller(run, "observer", index=first)
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        while True:
            self.version = self._call("status", Empty(), wire.QueueStatus).version
            time.sleep(0.05)


def producers(run: RunFolder, first: int, last: int) -> None:
    """Producers `first` to `last` - 1, one thread each."""
    weights = Weights(run, first)
    threads = [
        threading.Thread(target=_produce, args=(run, i, weights)) for i in range(first, last)
    ]
    _run_all(threads)


def _produce(run: RunFolder, index: int, weights: Weights) -> None:
    call = Caller(run, "rollout", index=index)
    call("open_dataset", wire.OpenDataset(100_000, "benchmark"), Empty)
    arena, number, num_calls = f"rollout{index}.0-1.1-0", 0, 0
    acked: list[tuple[str, int, int]] = []
    while True:
        num_calls += 1
        version = weights.version
        request = wire.Admit(f"{index}-{num_calls}", version, _GROUPS_PER_PUT, 1.0)
        admitted = call("admit", request, wire.Admitted)
        if admitted.done:
            return
        groups = []
        for slot in admitted.slots:
            number += 1
            groups.append(make_group(slot.uid, arena, number, version))
        if groups:
            call("put_groups", wire.PutGroups(groups), wire.StoredGroups)
        if num_calls % 16 == 0:
            acked = call("collect_free", wire.CollectFree(arena, acked, 0.0), wire.Freed).blocks


def consumers(run: RunFolder, num_steps: int) -> None:
    """All dp ranks, one thread each, in step with each other as in training."""
    barrier = threading.Barrier(NUM_CONSUMERS, timeout=_CALL_S)
    main = Caller(run, "train")
    main("begin_train", wire.BeginTrain("benchmark", 0), Empty)
    started = time.monotonic()

    def rank(dp_rank: int) -> None:
        call = Caller(run, "train", rank=dp_rank)
        for step in range(num_steps):
            for index in (0, 1):
                chunk = None
                while chunk is None:
                    request = wire.TakeChunk(step, index, dp_rank, NUM_CONSUMERS, 10.0)
                    chunk = call("take_chunk", request, wire.TakenChunk).groups
            if barrier.wait() == 0:
                call("complete_step", wire.CompleteStep(step), wire.StepSummary)
                print(json.dumps({"step": step + 1, "s": time.monotonic() - started}), flush=True)
            barrier.wait()

    _run_all([threading.Thread(target=rank, args=(i,)) for i in range(NUM_CONSUMERS)])


def waiting_taker(run: RunFolder, num_groups: int) -> None:
    """Take groups as they come and tell when each arrived."""
    call = Caller(run, "ref")
    for number in range(num_groups):
        groups: list[wire.GroupRows] = []
        while not groups:
            request = wire.TakeRows("ref", str(number), GROUP_SIZE, 10.0)
            if number == 0:
                print("ready", flush=True)
            groups = call("take_rows", request, wire.TakenRows).groups
        print(time.monotonic_ns(), flush=True)


def _run_all(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# -- the benchmark --------------------------------------------------------------------------------


@contextlib.contextmanager
def run_folder(parent: str | None) -> Iterator[RunFolder]:
    """Yield a run folder that is removed afterwards."""
    base = Path(tempfile.mkdtemp(prefix="relax-bench-", dir=parent))
    try:
        run = create_run_folder(base, "metadata")
        create_keys(run)
        yield run
    finally:
        shutil.rmtree(base)


@contextlib.contextmanager
def process(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Run one of the processes above; it is over when the block ends."""
    command = [sys.executable, "-m", "transfer_bench.metadata", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    ) as child:
        try:
            yield child
            assert child.stdin is not None
            child.stdin.close()
            child.wait(60)
        finally:
            child.kill()


def measure_rows(num_rows: int, profile: str) -> dict[str, float | list[float]]:
    """Rows from put to trained, and the controller's memory on the way."""
    num_steps = max(num_rows // (GROUP_SIZE * GROUPS_PER_STEP), 10)
    half = NUM_PRODUCERS // 2
    with run_folder(None) as run, contextlib.ExitStack() as stack:
        path = str(run.path)
        server = stack.enter_context(
            process("--controller", path, "--steps", str(num_steps), "--profile", profile)
        )
        of_server = psutil.Process(server.pid)
        train = stack.enter_context(process("--consumers", path, "--steps", str(num_steps)))
        for first in (0, half):
            stack.enter_context(process("--producers", path, "--first", str(first)))
        rss_mb: list[float] = []
        at_s: list[float] = []
        assert train.stdout is not None
        for line in train.stdout:
            at_s.append(json.loads(line)["s"])
            rss_mb.append(of_server.memory_info().rss / 1e6)
            if len(at_s) == num_steps:
                break
        cpu = of_server.cpu_times()
    warm = num_steps // 10
    full = num_steps // 4  # the window is full and the heap has its shape
    rows = (num_steps - warm) * GROUPS_PER_STEP * GROUP_SIZE
    return {
        "rows": num_steps * GROUPS_PER_STEP * GROUP_SIZE,
        "controller_rows_per_s": rows / (at_s[-1] - at_s[warm - 1]),
        "controller_cpu_us_per_row": 1e6 * (cpu.user + cpu.system) / (rows + warm),
        "rss_mb_begin": rss_mb[full],
        "rss_mb_end": rss_mb[-1],
        "rss_mb_max": max(rss_mb),
        "rss_mb": [round(value, 1) for value in rss_mb[:: max(len(rss_mb) // 20, 1)]],
    }


def measure_latency(parent: str | None, num_groups: int) -> dict[str, float]:
    """Milliseconds from the begin of a put to the end of the take_rows that waited for it."""
    with run_folder(parent) as run, contextlib.ExitStack() as stack:
        path = str(run.path)
        stack.enter_context(process("--controller", path, "--steps", "10", "--latency"))
        call = Caller(run, "rollout")
        call("open_dataset", wire.OpenDataset(100_000, "benchmark"), Empty)
        slots = call("admit", wire.Admit("k", 0, num_groups, 10.0), wire.Admitted).slots
        taker = stack.enter_context(process("--taker", path, "--steps", str(num_groups)))
        assert taker.stdout is not None
        taker.stdout.readline()
        took_ms, put_ms = [], []
        for number, slot in enumerate(slots):
            time.sleep(0.005)  # the taker waits again
            group = make_group(slot.uid, "rollout0.0-1.1-0", number, 0)
            begin = time.monotonic_ns()
            call("put_groups", wire.PutGroups([group]), wire.StoredGroups)
            put_ms.append((time.monotonic_ns() - begin) / 1e6)
            took_ms.append((int(taker.stdout.readline()) - begin) / 1e6)
    return {
        "push_ms": statistics.median(took_ms),
        "push_ms_p95": sorted(took_ms)[int(0.95 * len(took_ms))],
        "put_ms": statistics.median(put_ms),
    }


def main() -> None:
    """Run the benchmark, or one of its processes."""
    parser = argparse.ArgumentParser(prog="transfer_bench.metadata")
    parser.add_argument("--quick", action="store_true", help="100,000 rows")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--profile", default="", help="write a profile of the controller here")
    parser.add_argument("--controller")
    parser.add_argument("--producers")
    parser.add_argument("--consumers")
    parser.add_argument("--taker")
    parser.add_argument("--latency", action="store_true")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    options = parser.parse_args()
    roles: dict[str, Callable[[RunFolder], None]] = {
        "controller": lambda run: controller(run, options.steps, options.latency, options.profile),
        "producers": lambda run: producers(run, options.first, options.first + NUM_PRODUCERS // 2),
        "consumers": lambda run: consumers(run, options.steps),
        "taker": lambda run: waiting_taker(run, options.steps),
    }
    for name, role in roles.items():
        if getattr(options, name) is not None:
            role(RunFolder(Path(getattr(options, name))))
            return
    num_groups = 100 if options.quick else 400
    result: dict[str, float | list[float]] = {}
    for where, parent in (("shm", "/dev/shm"), ("disk", None)):
        found = measure_latency(parent, num_groups)
        result |= {f"{name}_{where}": value for name, value in found.items()}
    result |= measure_rows(100_000 if options.quick else options.rows, options.profile)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
