"""A program that plays every role of a run: real control service and heartbeats, no model.

Faults are files in RUN/faults, consumed by the task that meets its own (`ROLE-INDEX-RANK`):
`exit N`, `raise N`, `kill`, `stop` (SIGSTOP), `mute` (no registration); `forever ...` keeps the
file; `exit 3 at 2` names the step (-1: before registration, the default). While RUN/hold exists,
train waits: no test has to guess how long something takes.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from relax_hpc.config import config_from_json
from relax_hpc.control.identity import Identity
from relax_hpc.control.registry import SERVICE, Membership, Registry
from relax_hpc.control.rpc import RpcServer
from relax_hpc.log import setup_logging
from relax_hpc.metrics.writers import MetricWriter
from relax_hpc.recovery import checkpoint

STEP_S = float(os.environ.get("STUB_STEP_S", "0.2"))


def main() -> int:
    me = Identity.from_env()
    setup_logging(me.role, me.rank, me.local_rank)
    note_start(me)
    meet_fault(me, step=-1)
    if me.role == "dcs" and me.rank == 0:
        server = RpcServer(me.run, SERVICE, me)
        Registry(server, me)
        server.start_thread()
    members = Membership(me)
    members.join()
    code = {"train": train, "dcs": serve}.get(me.role, follow)(me, members)
    if not (me.role == "dcs" and me.rank == 0):
        members.leave(timeout_s=1.0)
    return code


def note_start(me: Identity) -> None:
    """Leave what a task saw of its environment, for the tests."""
    seen = {
        "pid": os.getpid(),
        "node": me.node,
        "rank": me.rank,
        "world": me.world,
        "gpus": list(me.gpus),
        "attempt": me.attempt,
        "leak": sorted(k for k in os.environ if k in ("SLURM_HOSTFILE", "SLURM_CPU_BIND")),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "trace": os.environ.get("TORCH_FR_DUMP_TEMP_FILE", ""),
        "argv": sys.argv,
    }
    folder = me.run.path / "seen"
    folder.mkdir(exist_ok=True)
    name = f"{me.role}-{me.index}-{me.rank}-i{me.incarnation}.json"
    (folder / name).write_text(json.dumps(seen))


def meet_fault(me: Identity, step: int) -> None:
    path = me.run.path / "faults" / f"{me.role}-{me.index}-{me.rank}"
    if not path.exists():
        return
    words = path.read_text().split()
    wanted = int(words[words.index("at") + 1]) if "at" in words else -1
    if wanted != step:
        return
    if words[0] == "forever":
        words = words[1:]
    else:
        path.unlink()
    print("stub meets", words, flush=True)
    if words[0] == "tell":  # tell N SENTENCE ...
        log = me.run.logs(me.attempt, me.role) / f"{me.index}-i{me.incarnation}-rank{me.rank}.cause"
        log.write_text(" ".join(words[2:]))
    if words[0] in ("exit", "tell"):
        sys.stdout.flush()
        os._exit(int(words[1]))
    if words[0] == "raise":
        raise ValueError(f"bad sample {words[1]}")
    if words[0] == "mute":
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGKILL if words[0] == "kill" else signal.SIGSTOP)


def train(me: Identity, members: Membership) -> int:
    config = config_from_json(me.run.config.read_text())
    step = max(checkpoint.steps(me.run.checkpoints), default=0)
    with MetricWriter(me.run, me.role, me.index) as writer:
        while step < config.run.train_steps:
            meet_fault(me, step)
            time.sleep(STEP_S)
            while (me.run.path / "hold").exists():
                time.sleep(0.1)
            step += 1
            members.report(step=step)
            if me.rank == 0:
                writer.log(step, {"train/reward_mean": step / config.run.train_steps})
            if (
                me.rank == 0
                and config.train.save_interval
                and step % config.train.save_interval == 0
            ):
                (me.run.checkpoints / f"step_{step}").mkdir(exist_ok=True)
                (me.run.checkpoints / f"step_{step}" / "manifest.json").write_text("{}")
    if me.rank == 0:
        members.publish("stub/done", "yes")
    return 0


def follow(me: Identity, members: Membership) -> int:
    """ref, logprob, rollout: until train is done."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        meet_fault(me, step=0)
        if (me.run.path / "crash-now" / f"{me.role}-{me.index}").exists():
            (me.run.path / "crash-now" / f"{me.role}-{me.index}").unlink()
            os._exit(7)
        try:
            members.wait_for("stub/done", 1.0, "the end of training")
        except Exception:  # noqa: BLE001  # not yet, or control restarts
            continue
        return 0
    return 1


def serve(me: Identity, members: Membership) -> int:
    """dcs: until SIGTERM."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    shm = me.run.shm(me.node)
    shm.mkdir(exist_ok=True)
    Path(shm / "leftover").write_text("x")
    while not ended:
        meet_fault(me, step=0)
        time.sleep(0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
