"""A small training loop in which one rank does one thing wrong: `python -m ... FOLDER WORLD ...`.

The parent imports torch once and forks the ranks. Each writes FOLDER/logs/rank_R.log, and its
flight-recorder dump to FOLDER/dumps/trace_rank_R when it ends in any way that lets it. A rank that
was killed or stopped leaves none, as in real life.
"""

import argparse
import datetime
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

FAIL_AT_STEP = 3
NUM_STEPS = 6
TIMEOUT_S = 4.0
LOGGER = logging.getLogger("train")
ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0


def run_failing_job(
    folder: Path, world: int, failure: str, culprit: int, *, is_mesh: bool = False
) -> Path:
    """Run the job to its end; returns `folder`, which then holds logs/ and dumps/."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.distributed.failing_job", str(folder)]
    command += [str(world), failure, str(culprit), *(["--mesh"] if is_mesh else [])]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environ.pop("TORCH_FR_BUFFER_SIZE", None)
    subprocess.run(command, cwd=ROOT, env=environ, check=True, timeout=2 * DEADLINE_S)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("world", type=int)
    parser.add_argument("failure", choices=[*FAILURES, *ODD_COLLECTIVES])
    parser.add_argument("culprit", type=int)
    parser.add_argument("--mesh", action="store_true", help="groups of two, and across them")
    args = parser.parse_args()
    for name in ("logs", "dumps"):
        (args.folder / name).mkdir()
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch.distributed  # noqa: F401 - once, before the forks

    _wait([_fork(rank, args) for rank in range(args.world)], args)


def _fork(rank: int, args: argparse.Namespace) -> int:
    pid = os.fork()
    if pid:
        return pid
    log = os.open(args.folder / "logs" / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(args.world)}
    code = 1
    try:
        _run_rank(rank, args)
        code = 0
    except BaseException:  # noqa: BLE001 - a process boundary
        sys.excepthook(*sys.exc_info())  # torch's own, which prefixes the lines with the rank
    sys.stderr.flush()
    os._exit(code)


def _wait(pids: list[int], args: argparse.Namespace) -> None:
    """Wait for the ranks; kill the stopped one when all others have ended."""
    left = set(pids)
    deadline = time.monotonic() + DEADLINE_S
    while left and time.monotonic() < deadline:
        for pid in list(left):
            if os.waitpid(pid, os.WNOHANG)[0]:
                left.discard(pid)
        if left == {pids[args.culprit]} and args.failure == "stop":
            break
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _run_rank(rank: int, args: argparse.Namespace) -> None:
    import torch.distributed as dist

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    store = dist.FileStore(str(args.folder / "store"), args.world)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=args.world,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    try:
        _train(rank, args)
    finally:
        dump = torch_dump()
        temporary = args.folder / f"dump-{rank}"
        temporary.write_bytes(dump)
        temporary.rename(args.folder / "dumps" / f"trace_rank_{rank}")


def torch_dump() -> bytes:
    from torch._C import _distributed_c10d

    return _distributed_c10d._dump_fr_trace()


def _train(rank: int, args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    groups = _groups(rank, args)
    for step in range(NUM_STEPS):
        LOGGER.info("step=%d begins", step)
        is_wrong = step == FAIL_AT_STEP and rank == args.culprit
        if is_wrong and args.failure in FAILURES:
            FAILURES[args.failure]()
        for number, group in enumerate(groups):
            gradient = torch.ones(8 * (number + 1))
            if is_wrong and number == 0 and args.failure in ODD_COLLECTIVES:
                ODD_COLLECTIVES[args.failure](gradient, group)
            else:
                dist.all_reduce(gradient, group=group)
        parts = [torch.empty(4) for _ in range(args.world)]
        dist.all_gather(parts, torch.ones(4))
    dist.barrier()
    LOGGER.info("training finished")


def _groups(rank: int, args: argparse.Namespace) -> list[object]:
    """The default group twice; or this rank's pair, then the ranks at its place of all pairs."""
    import torch.distributed as dist

    if not args.mesh:
        return [None, None]
    pairs = [list(range(first, first + 2)) for first in range(0, args.world, 2)]
    across = [list(range(place, args.world, 2)) for place in range(2)]
    mine = []
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    for lists, desc in ((pairs, "tp"), (across, "dp")):
        for ranks in lists:
            group = dist.new_group(ranks, timeout=timeout, group_desc=desc)
            if rank in ranks:
                mine.append(group)
    return mine


# --------------------------------------------------------------------------------------------
# What goes wrong
# --------------------------------------------------------------------------------------------


def _exit() -> None:
    os._exit(3)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep() -> None:
    time.sleep(2.5 * TIMEOUT_S)


def _raise() -> None:
    raise ValueError("bad sample 17: negative length")


def _out_of_memory() -> None:
    import torch

    torch.empty(1 << 60)


def _cut() -> None:
    """Shut all TCP connections of this process down, as if its cable were pulled."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            with socket.socket(fileno=os.dup(int(link.name))) as end:
                if end.type == socket.SOCK_STREAM and end.family == socket.AF_INET:
                    end.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


FAILURES: dict[str, Callable[[], None]] = {
    "exit": _exit,
    "kill": _kill,
    "stop": _stop,
    "sleep": _sleep,
    "exception": _raise,
    "oom": _out_of_memory,
    "cut": _cut,
}


def _skip(gradient: object, group: object) -> None:
    pass


def _other_op(gradient: object, group: object) -> None:
    import torch.distributed as dist

    dist.reduce(gradient, group=group, group_dst=0)  # type: ignore[arg-type]


def _other_shape(gradient: object, group: object) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1000), group=group)  # type: ignore[arg-type]


def _other_dtype(gradient: object, group: object) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(8, dtype=torch.float64), group=group)  # type: ignore[arg-type]


ODD_COLLECTIVES: dict[str, Callable[[object, object], None]] = {
    "skip": _skip,
    "op": _other_op,
    "shape": _other_shape,
    "dtype": _other_dtype,
}

if __name__ == "__main__":
    main()
