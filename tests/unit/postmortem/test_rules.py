"""One failure per text, in the wording of many versions and frameworks; traps included."""

from pathlib import Path

import pytest

from relax_hpc.postmortem import collect
from relax_hpc.postmortem.diagnose import analyse
from relax_hpc.postmortem.parse import registry
from relax_hpc.postmortem.verdict import Verdict


def verdict_of(folder: Path, text: str) -> Verdict:
    (folder / "job.out").write_text(text)
    return analyse([str(folder / "job.out")]).verdict


def caught(
    rank: int, seq: int, op: str = "ALLREDUCE", size: int = 1024, group: str = "", at: int = 0
) -> str:
    """Two lines of PyTorch 2.7: time-out and counters."""
    where = group or f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
    head = f"[rank{rank}]:[E512 10:00:{at:02d}.00000{rank} ProcessGroupNCCL.cpp"
    return (
        f"{head}:632] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={seq}, OpType={op}, "
        f"NumelIn={size}, NumelOut={size}, Timeout(ms)=600000) ran for 600010 "
        f"milliseconds before timing out.\n"
        f"{head}:2268] {where}  failure detected by watchdog at work sequence "
        f"id: {seq} PG status: last enqueued work: "
        f"{seq}, last completed work: {seq - 1}\n"
    )


def desync(suspects: str) -> str:
    return (
        "[rank1]:[E515 09:00:00.000000001 ProcessGroupNCCL.cpp:1937] Rank 1\n"
        "\t - [1] Timeout at collective: ALLREDUCE, #77\n"
        "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the "
        "desync are:\n"
        f"\t   {suspects}\n"
        "\t - Snapshot of ranks' latest states:\n"
        "\t   #76 finished ranks:\n\t     [5] finished ALLREDUCE\n"
        "\t   #77 started ranks:\n\t     [0, 1, 2, 3] started ALLREDUCE\n"
    )


def ras(ahead: int, behind: int, listed: int) -> str:
    return (
        "#0-0 (ab12) MISMATCH\n  Communicator ranks have different collective operation counts\n"
        f"  {ahead} ranks have launched up to operation 641\n"
        + ("  Rank 12 -- GPU 4 managed by process 99 on node 10.0.0.9\n" if listed == 641 else "")
        + f"  {behind} ranks have launched up to operation 640\n"
        + ("  Rank 12 -- GPU 4 managed by process 99 on node 10.0.0.9\n" if listed == 640 else "")
    )


TRACE = (
    "[rank{rank}]: Traceback (most recent call last):\n"
    '[rank{rank}]:   File "train.py", line 10, in main\n'
    "[rank{rank}]:     step(batch)\n"
    '[rank{rank}]:   File "train.py", line 20, in step\n'
    "[rank{rank}]:     raise ValueError(name)\n"
    "[rank{rank}]: {last}\n"
)

CASES = {
    # name: (text, class, ranks, nodes, most sure, never ranks)
    "xid79": (
        "Mar  3 04:05:06 gpu017 kernel: NVRM: Xid (PCI:0000:5d:00): 79, pid=812, GPU has "
        "fallen off the bus.\n" + caught(0, 5) + caught(1, 5),
        "gpu-pcie-lost",
        [],
        ["gpu017"],
        "established",
        [0, 1],
    ),
    "xid48": (
        "[Sun Mar  3 04:05:06 2024] NVRM: Xid (PCI:0000:1a:00): 48, pid='<unknown>', "
        "name=<unknown>, DBE (double bit error)\n"
        "[Sun Mar  3 04:05:06 2024] NVRM: Xid (PCI:0000:1a:00): 45, pid=12, Ch 00000010\n",
        "gpu-ecc",
        [],
        [],
        "established",
        [],
    ),
    "xid149": (
        "node12: [  77.1] NVRM: Xid (PCI:0000:dc:00): 149, pid=4711, name=python3, "
        "NETIR_LINK_EVT Fatal\n",
        "gpu-nvlink",
        [],
        ["node12"],
        "established",
        [],
    ),
    "xid94-of-monitor": (
        "2024-05-01T10:00:00Z gpu03 dcgm: XID error 94 detected on GPU 3\n",
        "gpu-ecc",
        [],
        [],
        "established",
        [],
    ),
    "xid31": (
        "NVRM: Xid (PCI:0000:1a:00): 31, pid=99, name=python, MMU Fault\n",
        "cuda-kernel-fault",
        [],
        [],
        "likely",
        [],
    ),
    "nvlink-in-cuda": (
        "[rank5]:[E512 10:00:00.0 ProcessGroupNCCL.cpp:2093] [PG ID 0 PG GUID "
        "0(default_pg) Rank 5] Process group watchdog "
        "thread terminated with exception: CUDA error: uncorrectable "
        "NVLink error detected during the execution\n",
        "gpu-nvlink",
        [5],
        [],
        "established",
        [],
    ),
    "gpu-lost": (
        "gpu-7: nvidia-smi: Unable to determine the device handle for GPU 0000:3B:00.0: "
        "GPU is lost.  Reboot the system\n",
        "gpu-pcie-lost",
        [],
        ["gpu-7"],
        "established",
        [],
    ),
    "cuda-oom": (
        TRACE.format(
            rank=3,
            last="torch.OutOfMemoryError: CUDA out of memory. "
            "Tried to allocate 2.00 GiB. GPU 3 has "
            "a total",
        )
        + caught(0, 9, at=5)
        + caught(1, 9, at=5),
        "cuda-oom",
        [3],
        [],
        "established",
        [0, 1],
    ),
    "nccl-oom": (
        "n1:7:8 [2] include/alloc.h:185 NCCL WARN Cuda failure 'out of memory'\n",
        "cuda-oom",
        [],
        [],
        "established",
        [],
    ),
    "illegal-address": (
        "[rank2]: RuntimeError: CUDA error: "
        "an illegal memory access was "
        "encountered\n" + caught(0, 9) + caught(1, 9),
        "cuda-kernel-fault",
        [2],
        [],
        "established",
        [0, 1],
    ),
    "device-assert": (
        "../aten/Indexing.cu:1234: indexSelectLargeIndex: block: [3,0,0], "
        "thread: [5,0,0] "
        "Assertion `srcIndex < srcSelectDimSize` failed.\n"
        "[rank1]: RuntimeError: CUDA error: device-side assert "
        "triggered\n",
        "cuda-kernel-fault",
        [1],
        [],
        "established",
        [],
    ),
    "slurm-oom-new": (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of "
        "the step "
        "tasks have been OOM Killed.\n"
        "srun: error: n[4]: task 17: Out Of Memory\nsrun: Terminating StepId=77.0\n"
        "slurmstepd: error: *** STEP 77.0 ON n1 CANCELLED AT "
        "2024-01-01T00:00:00 ***\n"
        "srun: error: n1: "
        "tasks 0-3: "
        "Terminated\n",
        "host-oom",
        [17],
        ["n4"],
        "established",
        [0, 1, 2, 3],
    ),
    "kernel-oom": (
        "Jan  1 00:00:00 gpu9 kernel: Memory cgroup out of memory: Killed process 4242 "
        "(python) total-vm:1kB, anon-rss:1kB\n",
        "host-oom",
        [],
        ["gpu9"],
        "established",
        [],
    ),
    "shm": (
        "RuntimeError: DataLoader worker (pid 123) is killed by signal: Bus error. It is "
        "possible that dataloader's workers are out of shared memory.\n",
        "shm-full",
        [],
        [],
        "likely",
        [],
    ),
    "shm-nccl": (
        "n1:7:8 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend "
        "/dev/shm/nccl-abc to 33030532 bytes, error: No space left on device (28)\n",
        "shm-full",
        [],
        ["n1"],
        "likely",
        [],
    ),
    "bus-error": (
        "srun: error: n7: task 3: Bus error (core dumped)\nsrun: Terminating StepId=9.0\n",
        "bus-error",
        [3],
        ["n7"],
        "likely",
        [],
    ),
    "disk-full": (
        TRACE.format(rank=0, last="OSError: [Errno 28] No space left on device"),
        "storage-full",
        [0],
        [],
        "established",
        [],
    ),
    "quota": (
        "OSError: [Errno 122] Disk quota exceeded: '/home/x/ckpt'\n",
        "storage-full",
        [],
        [],
        "established",
        [],
    ),
    "lustre": (
        "Mar  3 04:05:06 gpu017 kernel: LustreError: 11-0: home-OST0003: operation "
        "ost_read to node 10.1.1.1 failed: rc = -107\n"
        + "".join(
            f"[rank{r}]:[E512 10:00:00.0 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG "
            f"GUID 0(default_pg) Rank {r}] ProcessGroupNCCL's watchdog got "
            "stuck for 480 seconds without making progress in monitoring "
            "enqueued collectives. Last enqueued NCCL work: -1, last "
            "completed NCCL work: -1.\n"
            for r in range(4)
        ),
        "storage-stall",
        [],
        [],
        "established",
        [0, 1, 2, 3],
    ),
    "all-minus-one": (
        "".join(
            f"[rank{r}]:[E512 10:00:00.0 ProcessGroupNCCL.cpp:1743] [PG ID "
            f"0 PG GUID "
            f"0(default_pg) Rank {r}] Received a dump signal due to a "
            f"collective timeout from  rank 2 and we will try our "
            f"best to dump the debug info. Last enqueued NCCL work: "
            f"-1, last completed NCCL work: -1.\n"
            for r in range(4)
        ),
        "storage-stall",
        [],
        [],
        "undetermined",
        [0, 1, 3],
    ),
    "node-failure": (
        "srun: error: Node failure on gpu044\nslurmstepd: error: *** JOB 7 ON gpu001 "
        "CANCELLED AT 2024-01-01T00:00:00 DUE TO NODE FAILURE, "
        "SEE SLURMCTLD LOG FOR DETAILS ***\nsrun: error: gpu001: tasks "
        "0-7: Killed\n",
        "node-failure",
        [],
        ["gpu044"],
        "established",
        [0, 7],
    ),
    "time-limit": (
        "step 10 loss 1\nslurmstepd: error: *** JOB 7 ON gpu001 CANCELLED AT "
        "2024-01-01T00:00:00 DUE TO TIME LIMIT ***\n"
        "srun: error: gpu001: tasks "
        "0-7: Terminated\n",
        "time-limit",
        [],
        [],
        "established",
        [0],
    ),
    "hang-then-time-limit": (
        "".join(caught(r, 9) for r in (0, 1, 3)) + "slurmstepd: "
        "error: *** JOB 7 ON "
        "gpu001 CANCELLED AT "
        "2099-01-01T00:00:00 "
        "DUE TO "
        "TIME LIMIT ***\n",
        "missing-rank",
        [2],
        [],
        "likely",
        [0, 1, 3],
    ),
    "preempted": (
        "slurmstepd: error: *** STEP 8.0 ON n1 CANCELLED AT 2024-01-01T00:00:00 ***\n"
        "slurmstepd: error: *** JOB 8 ON n1 CANCELLED AT 2024-01-01T00:01:00 "
        "DUE TO PREEMPTION ***\nsrun: error: n1: task 0: Killed\n",
        "preemption",
        [],
        [],
        "established",
        [0],
    ),
    "cancelled-25.05": (
        "[2026-01-01T00:00:00.000] error: *** STEP 8.0 ON n1 CANCELLED AT "
        "2026-01-01T00:00:00 DUE to SIGNAL Terminated ***\n",
        "orderly-cancel",
        [],
        [],
        "likely",
        [],
    ),
    "memory-error": (
        "slurmstepd: error: *** STEP 8.0 ON n1 UNCORRECTABLE MEMORY ERROR AT "
        "2024-01-01T00:00:00 ***\n",
        "host-memory-error",
        [],
        [],
        "established",
        [],
    ),
    "cpu-bind": (
        "srun: error: CPU binding outside of job step allocation, allocated CPUs are: "
        "0xFF.\nsrun: error: Task launch for StepId=1.2 failed on node n2: "
        "Unable to satisfy cpu "
        "bind request\n",
        "cpu-bind-env-leak",
        [],
        [],
        "established",
        [],
    ),
    "exec": (
        "slurmstepd: error: execve(): /opt/app: No such file or directory\nsrun: error: "
        "n1: tasks 0-3: Exited with exit code 2\n",
        "launch-failure",
        [],
        [],
        "likely",
        [0],
    ),
    "duplicate-gpu": (
        "n1:5:6 [0] init.cc:795 NCCL WARN Duplicate GPU detected : rank 6 and "
        "rank 4 both "
        "on CUDA device 31000\n"
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, "
        "invalid usage, NCCL version 2.19.3\n",
        "duplicate-gpu",
        [4, 6],
        [],
        "established",
        [],
    ),
    "port": (
        "[W socket.cpp:464] [c10d] The server socket has failed to bind to [::]:29500 "
        "(errno: 98 - Address already in use).\n"
        "RuntimeError: The server socket has failed to listen on any local "
        "network address. port: 29500\n",
        "port-collision",
        [],
        [],
        "established",
        [],
    ),
    "ordinal": (
        TRACE.format(rank=3, last="RuntimeError: CUDA error: invalid device ordinal"),
        "device-ordinal",
        [3],
        [],
        "likely",
        [],
    ),
    "barrier-few": (
        "RuntimeError: Timed out initializing process group in store based barrier on "
        "rank: 3, for key: store_based_barrier_key:1 "
        "(world_size=8, "
        "worker_count=6, "
        "timeout=0:30:00)\n",
        "rendezvous-timeout",
        [],
        [],
        "undetermined",
        [3],
    ),
    "barrier-many": (
        "RuntimeError: Timed out initializing process group in store based barrier on "
        "rank: 3, for key: store_based_barrier_key:1 "
        "(world_size=8, "
        "worker_count=9, "
        "timeout=0:30:00)\n",
        "stale-rendezvous",
        [],
        [],
        "likely",
        [3],
    ),
    "exception": (
        TRACE.format(rank=5, last="ValueError: bad sample")
        + "".join(caught(r, 9, at=30) for r in (0, 1, 2, 3, 4, 6, 7)),
        "python-exception",
        [5],
        [],
        "established",
        [0, 1],
    ),
    "exception-then-echoes": (
        TRACE.format(rank=2, last="KeyError: 'x'")
        + TRACE.format(
            rank=0,
            last="torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0.",
        ),
        "python-exception",
        [2],
        [],
        "established",
        [0],
    ),
    "segfault": (
        "srun: error: n7: task 9: Segmentation fault (core dumped)\nsrun: Terminating "
        "StepId=1.0\nslurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT "
        "2024-01-01T00:00:00 ***\nsrun: error: n1: tasks 0-8: Terminated\n",
        "rank-died",
        [9],
        ["n7"],
        "likely",
        [0, 1],
    ),
    "sigkill-torchrun": (
        "E0703 15:37:24.512000 1051 "
        "torch/distributed/elastic/multiprocessing/api.py:988] "
        "failed (exitcode: -9) local_rank: 2 (pid: 50) of binary: python\n"
        "Root Cause (first observed failure):\n[0]:\n  time      : "
        "2026-07-03_15:37:21\n  host      : n3\n  rank      : 10 "
        "(local_rank: 2)\n"
        "  exitcode  : -9 (pid: 50)\n  error_file: <N/A>\n  traceback "
        ": Signal 9 (SIGKILL) received by PID 50\n",
        "rank-died",
        [10],
        ["n3"],
        "likely",
        [],
    ),
    "port-error": (
        "...-48:1:2 [0] transport/net_ib.cc:93 NCCL WARN NET/IB : Got async event "
        ": port "
        "error\n"
        "n51:1:2 [4] transport/net_ib.cc:1238 NCCL WARN NET/IB : Got "
        "completion from peer n48<37948> with error 12, opcode 2, len 1, "
        "vendor err 129\n",
        "nic-fatal",
        [],
        ["-48"],
        "established",
        [],
    ),
    "error12-old": (
        "n51:1:2 [4] transport/net_ib.cc:74 NCCL WARN NET/IB : Got completion "
        "with error "
        "12, opcode 1, len 0, vendor err 129\n",
        "network-retry-exceeded",
        [],
        [],
        "likely",
        [],
    ),
    "status-names": (
        "[2026-02-02 10:00:00] n51:1:2 [4] net_ib.cc:9 NCCL WARN NET/IB: Got "
        "completion "
        "from peer 10.0.0.1<54862> with status=IBV_WC_RETRY_EXC_ERR(12) "
        "opcode=IBV_WC_SEND(0) vendor_err=129 localGid fe80::1 remoteGids "
        "fe80::2 hca mlx5_3\n",
        "network-retry-exceeded",
        [],
        [],
        "likely",
        [],
    ),
    "status9": (
        "n51:1:2 [4] net_ib.cc:9 NCCL WARN NET/IB : Got completion from peer 10.0.0.1<5> "
        "with status=9 opcode=0 len=0 vendor err 138 (Recv)\n",
        "rdma-protection",
        [],
        ["n51"],
        "likely",
        [],
    ),
    "one-end-of-many-links": (
        "".join(
            f"n{i}:1:2 [4] net_ib.cc:9 NCCL WARN NET/IB : Got "
            f"completion from peer n9<5> with "
            f"error 12, opcode 0, len 0, vendor err 129\n"
            for i in range(1, 5)
        ),
        "network-retry-exceeded",
        [],
        ["n9"],
        "likely",
        [],
    ),
    "peer-closed": (
        "n1:5:6 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by "
        "remote peer n2.cluster<41109>\n"
        "n3:5:6 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection "
        "closed by remote peer n1.cluster<41109>\n",
        "remote-crash",
        [],
        ["n2"],
        "likely",
        [],
    ),
    "store": (
        "[rank1]: torch.distributed.DistNetworkError: Connection was likely closed. Did "
        "the remote server shutdown or crash?\n"
        "[rank1]:[W1 10:00:00.0 TCPStore.cpp:141] [c10d] recvValue failed on "
        "SocketImpl(fd=3, addr=[n1]:5, remote=[n0]:29500): Connection reset by "
        "peer\n",
        "store-host-died",
        [0],
        [],
        "likely",
        [1],
    ),
    "desync": (
        caught(1, 40)
        + desync("[5] finished collective #76, but didn't join collective #77 (count from 1)"),
        "missing-rank",
        [5],
        [],
        "likely",
        [0, 1],
    ),
    "monitored": (
        "RuntimeError: Rank 4 failed to pass monitoredBarrier in 30000 ms\n",
        "missing-rank",
        [4],
        [],
        "likely",
        [],
    ),
    "ras-minority-ahead": (ras(2, 30, 641), "ras-mismatch", [], [], "undetermined", [12]),
    "ras-minority-behind": (ras(30, 2, 640), "ras-mismatch", [12], ["10.0.0.9"], "likely", []),
    "behind": (
        "".join(caught(r, 9) for r in (0, 1, 3)) + caught(2, 8),
        "missing-rank",
        [2],
        [],
        "likely",
        [0, 1, 3],
    ),
    "ahead-other-op": (
        "".join(caught(r, 9) for r in (0, 1, 3)) + caught(2, 10, "BROADCAST"),
        "op-mismatch",
        [2],
        [],
        "likely",
        [0, 1, 3],
    ),
    "majority-behind": (
        "".join(caught(r, 9) for r in (0, 1, 3)) + caught(2, 10),
        "missing-rank",
        [],
        [],
        "undetermined",
        [0, 1, 2, 3],
    ),
    "other-op": (
        "".join(caught(r, 9) for r in (0, 1, 3)) + caught(2, 9, "BROADCAST"),
        "op-mismatch",
        [2],
        [],
        "likely",
        [0, 1, 3],
    ),
    "other-size": (
        "".join(caught(r, 9) for r in (0, 1, 3)) + caught(2, 9, size=999),
        "size-mismatch",
        [2],
        [],
        "likely",
        [0, 1, 3],
    ),
    "uneven-all-to-all": (
        "".join(caught(r, 9, "ALLTOALL_BASE", size=100 + r) for r in range(4)),
        "all-same-seq",
        [],
        [],
        "undetermined",
        [0, 1, 2, 3],
    ),
    "all-joined": (
        "".join(caught(r, 9) for r in range(8)),
        "all-same-seq",
        [],
        [],
        "undetermined",
        list(range(8)),
    ),
    "extra-op": (
        caught(2, 9)
        + "".join(
            f"[rank{r}]:[E512 10:00:00.0 ProcessGroupNCCL.cpp:1890] [PG ID 0 PG GUID "
            f"0(default_pg) Rank {r}] Received a dump signal due to a collective timeout "
            f"from  rank 2 and "
            "we will try our best to dump the debug info. Last enqueued NCCL work: 8, last "
            "completed NCCL work: 8.\n"
            for r in (0, 1, 3)
        ),
        "extra-op",
        [2],
        [],
        "likely",
        [0, 1, 3],
    ),
    "idle-behind": (
        "".join(caught(r, 9) for r in (0, 1, 3))
        + "[rank2]:[E512 10:00:00.0 ProcessGroupNCCL.cpp:1890] [PG ID 0 PG GUID "
        "0(default_pg) Rank 2] Received a dump signal due to a collective timeout from "
        " rank 0 and "
        "we will try our best to dump the debug info. Last enqueued NCCL work: 8, last "
        "completed NCCL work: 8.\n",
        "missing-rank",
        [2],
        [],
        "likely",
        [0, 1, 3],
    ),
    "local-ranks-in-groups": (
        "".join(
            caught(r, 9, group=f"[PG ID 3 PG GUID 17(TENSOR_MODEL_PARALLEL_GROUP) Rank {r % 4}]")
            for r in (8, 9, 11)
        ),
        "all-same-seq",
        [],
        [],
        "undetermined",
        [0, 1, 2, 3, 8, 9, 11],
    ),
    "teardown": (
        "[INFO] Training completed. Final loss 1.2\n[rank0]:[E512 10:00:00.0 "
        "ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 0] "
        "ProcessGroupNCCL's "
        "watchdog got stuck for 480 seconds without making progress in "
        "monitoring enqueued collectives.\n",
        "teardown-after-success",
        [],
        [],
        "likely",
        [0],
    ),
    "nothing": ("step 1 loss 2\nstep 2 loss 1\n", "unknown", [], [], "undetermined", []),
    "user-signal": (
        "srun: error: n1: tasks 0-3: User defined signal 1\n",
        "signal-kill",
        [],
        [],
        "likely",
        [0, 1, 2, 3],
    ),
    "sacct-oom": (
        "       JobID    JobName      State ExitCode\n------------ ---------- ---------- "
        "--------\n123               train OUT_OF_ME+    0:125\n123.batch         batch "
        "OUT_OF_ME+    0:125\n",
        "host-oom",
        [],
        [],
        "established",
        [],
    ),
    "sacct-node-fail": ("123|train|NODE_FAIL|0:0\n", "node-failure", [], [], "established", []),
    "fabric-802": (
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: "
        "system not "
        "yet initialized\n",
        "fabric-manager",
        [],
        [],
        "established",
        [],
    ),
    "suspend-frozen": (
        "[rank0]:[E512 10:00:00.0 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog "
        "caught "
        "collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=1, "
        "NumelOut=1, Timeout(ms)=600000) ran for 9000000 milliseconds "
        "before timing out.\n",
        "watchdog-stall",
        [],
        [],
        "undetermined",
        [0],
    ),
    "foreign-prefix": (
        "bench-nodes.n4.nolog [stderr] "
        + caught(0, 9).replace("\n", "\nbench [stderr] ", 1)
        + caught(1, 9)
        + caught(3, 9),
        "missing-rank",
        [2],
        [],
        "likely",
        [0, 1, 3],
    ),
    "minute-stamp": (
        "".join(
            f"2025-02-18 12:54 {line}\n" for r in (0, 1, 3) for line in caught(r, 9).splitlines()
        ),
        "missing-rank",
        [2],
        [],
        "likely",
        [0, 1, 3],
    ),
    "quoted-and-pdsh": (
        "".join(f"> 10.1.2.{r}: {line}\n" for r in (0, 1, 3) for line in caught(r, 9).splitlines()),
        "missing-rank",
        [2],
        [],
        "likely",
        [0, 1, 3],
    ),
    "xid45-names-its-cause": (
        "kernel: NVRM: Xid (PCI:0000:dc:00): 45, pid=18, name=p, Ch 1 caused by previous Xid 149\n",
        "gpu-nvlink",
        [],
        [],
        "established",
        [],
    ),
    "unspecified-launch-failure": (
        "10.1.2.3: [rank19]:[E808 10:31:07.406255799 ProcessGroupNCCL.cpp:1895] [PG ID 1 PG GUID 1 "
        "Rank 19] Process group watchdog thread terminated with exception: CUDA error: unspecified "
        "launch failure\n",
        "cuda-kernel-fault",
        [19],
        [],
        "likely",
        [],
    ),
    "submitit-requeued": (
        "submitit WARNING (2022-07-12 04:18:45,881) - Caught signal SIGHUP on n1: this job is "
        "preempted.\nsubmitit INFO (2022-07-12 04:18:45,912) - Requeued job 60 (3 "
        "remaining timeouts)\n",
        "requeue",
        [],
        [],
        "established",
        [],
    ),
    "submitit-guess": (
        "[2021-10-21 11:50:15,216][submitit][WARNING] - Caught signal SIGUSR1 on n5: this job is "
        "timed-out.\n",
        "time-limit",
        [],
        [],
        "likely",
        [],
    ),
    "busy-step": (
        "29: srun: Job 94 step creation still disabled, retrying (Requested nodes are busy)\n",
        "step-create-failure",
        [],
        [],
        "likely",
        [29],
    ),
    "submission": (
        "sbatch: error: Batch job submission failed: Requested node configuration is not "
        "available\n",
        "step-create-failure",
        [],
        [],
        "established",
        [],
    ),
    "wait": (
        "srun: First task exited 3s ago\nsrun: StepId=9.4 tasks 0-2: running\n"
        "srun: StepId=9.4 task 3: exited abnormally\n",
        "rank-died",
        [3],
        [],
        "likely",
        [0],
    ),
    "unkillable": (
        "slurmstepd: error: *** STEP 9.0 STEPD TERMINATED ON n3 AT 2024-01-01T00:00:00 DUE TO "
        "JOB NOT ENDING WITH SIGNALS ***\n",
        "unkillable-step",
        [],
        ["n3"],
        "likely",
        [],
    ),
    "first-op-never-done": (
        "[rank1]:[E1103 07:34:57.460801783 ProcessGroupNCCL.cpp:1834] [PG ID 0 PG GUID "
        "0(default_pg) "
        "Rank 1] Timeout at NCCL work: 1, last enqueued NCCL work: 1, last completed "
        "NCCL work: -1.\n",
        "missing-rank",
        [],
        [],
        "undetermined",
        [1],
    ),
    "ulimit": (
        "n1:7:8 [0] misc/ibvwrap.cc:9 NCCL WARN Call to ibv_reg_mr failed with error Cannot "
        "allocate memory\n",
        "rdma-protection",
        [],
        ["n1"],
        "likely",
        [],
    ),
    "no-xid": (
        "dmesg shows no Xid 79 and ECC errors: 0\nstep 1\n",
        "unknown",
        [],
        [],
        "undetermined",
        [],
    ),
    "transaction": ("postgres: xid 79 committed\n", "unknown", [], [], "undetermined", []),
    "zero-ecc": ("    Double Bit ECC Errors : 0\n", "unknown", [], [], "undetermined", []),
    "port-warning-then-hang": (
        "[W socket.cpp:464] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - "
        "Address already in use).\n" + caught(0, 9) + caught(1, 9) + caught(3, 9),
        "missing-rank",
        [2],
        [],
        "likely",
        [0, 1, 3],
    ),
    "caught-exception-then-hang": (
        TRACE.format(rank=0, last="ValueError: bad row, skipped")
        + caught(0, 9)
        + caught(1, 9)
        + caught(3, 9),
        "missing-rank",
        [2],
        [],
        "likely",
        [0, 1, 3],
    ),
    "segfault-after-hang": (
        caught(0, 9)
        + caught(1, 9)
        + caught(3, 9)
        + "srun: error: n7: task 1: Segmentation fault (core dumped)\n",
        "missing-rank",
        [2],
        [],
        "likely",
        [0, 1, 3],
    ),
    "exception-after-hang": (
        caught(0, 9)
        + caught(1, 9)
        + caught(3, 9)
        + TRACE.format(rank=9, last="RuntimeError: lost my friends").replace("[rank9]: ", ""),
        "missing-rank",
        [2],
        [],
        "likely",
        [0, 1, 3],
    ),
    "flapping-port": (
        "n4:1:2 [0] net_ib.cc:93 NCCL WARN NET/IB : mlx5_0:1 Got async event : port error\n",
        "nic-fatal",
        [],
        ["n4"],
        "likely",
        [],
    ),
    "non-fatal-event": (
        "n4:1:2 [0] net_ib.cc:93 NCCL WARN NET/IB : mlx5_0:1 Got non-fatal async event: "
        "port active(9)\n",
        "unknown",
        [],
        [],
        "undetermined",
        [],
    ),
    "warning-is-no-exception": (
        "/x/y.py:3: UserWarning: the hidden Error: none\n",
        "unknown",
        [],
        [],
        "undetermined",
        [],
    ),
    "task-failure": (
        "slurmstepd: error: *** STEP 8.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TASK "
        "FAILURE ***\n",
        "rank-died",
        [],
        [],
        "undetermined",
        [],
    ),
    "cut-off-proves-nothing": (
        caught(0, 9)
        + caught(1, 9)
        + caught(3, 9)
        + "[rank4]:[E512 10:00:00.000000 ProcessGroupNCCL.cpp:632] [Rank 4] Watchdog "
        "caught collect",
        "all-same-seq",
        [],
        [],
        "undetermined",
        [0, 1, 2, 3, 4],
    ),
    "cut-off-but-rank-0-absent": (
        "".join(caught(r, 9) for r in (1, 2, 3, 4))
        + "[rank5]:[E512 10:00:00.000000 ProcessGroupNCCL.cpp:632] [Rank 5] Watchdog "
        "caught collect",
        "missing-rank",
        [0],
        [],
        "likely",
        [1, 2, 3, 4, 5],
    ),
    "cascade-over-groups": (
        "".join(
            caught(r, 50, group=f"[PG ID 4 PG GUID {7 + r % 2}(DATA_PARALLEL_GROUP) Rank {r // 2}]")
            for r in range(6)
        )
        + caught(7, 90, group="[PG ID 2 PG GUID 5(TENSOR_MODEL_PARALLEL_GROUP) Rank 1]"),
        "missing-rank",
        [6],
        [],
        "likely",
        [0, 1, 2, 3, 4, 5, 7],
    ),
    "address-of-the-dead-peer": (
        "n7:1:1 [0] NCCL INFO Bootstrap : Using ib0:10.0.0.7<0>\n"
        "n8:1:1 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 8 nranks 16 cudaDev 0 "
        "busId 1000 commId 0x2 - Init COMPLETE\n"
        "n8:5:6 [0] misc/socket.cc:49 NCCL WARN Net : Call to recv from "
        "10.0.0.7<41109> failed : Connection reset by peer\n",
        "remote-crash",
        [],
        ["n7"],
        "likely",
        [8],
    ),
    "df": (
        "tmpfs            64M   64M     0 100% /dev/shm\nRuntimeError: unable to mmap "
        "1 bytes from file </torch_1_2>\n",
        "shm-full",
        [],
        [],
        "likely",
        [],
    ),
    "kernel-link": (
        "Mar  3 04:05:06 gpu017 kernel: mlx5_core 0000:1a:00.0 ib0: Link down\n",
        "nic-fatal",
        [],
        ["gpu017"],
        "likely",
        [],
    ),
    "nccl-size-check": (
        "n1:5:6 [0] net_ib.cc:9 NCCL WARN NET/IB : req 0/1 tag 0 peer 10.0.0.2<5> "
        "collective mismatch error, local "
        "size 496640 remote size 65536\n",
        "size-mismatch",
        [],
        [],
        "likely",
        [],
    ),
    "remote-error": (
        "E external/xla/nccl_utils.cc:191] Aborting communicator: 0x5 due to async "
        "NCCL error: remote process exited or "
        "there was a network error\n",
        "remote-crash",
        [],
        [],
        "undetermined",
        [],
    ),
    "done-then-barrier": (
        "`Trainer.fit` stopped: `max_epochs=12` reached.\n"
        + caught(0, 9, size=1)
        + caught(1, 9, size=1)
        + caught(3, 9, size=1),
        "teardown-after-success",
        [],
        [],
        "likely",
        [0, 1, 3],
    ),
    "epoch-done-then-hang": (
        "Epoch 3 training finished in 12 s\n" + caught(0, 9) + caught(1, 9) + caught(3, 9),
        "missing-rank",
        [2],
        [],
        "likely",
        [0, 1, 3],
    ),
    "wrapped-at-words": (
        "".join(
            line.replace("timeout: WorkNCCL", "timeout: \nWorkNCCL").replace(
                "failure detected ", "failure detected\n"
            )
            for r in (0, 1, 3)
            for line in caught(r, 9).splitlines(keepends=True)
        ),
        "missing-rank",
        [2],
        [],
        "likely",
        [0, 1, 3],
    ),
}
EXCERPTS = Path(__file__).parents[2] / "data" / "nccl_logs"
SURE = ("undetermined", "likely", "established")


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, tmp_path: Path) -> None:
    text, class_, ranks, nodes, most, never = CASES[name]
    verdict = verdict_of(tmp_path, text)
    assert verdict.class_ == class_, verdict.sentence
    assert set(ranks) <= set(verdict.ranks)
    assert not set(never) & set(verdict.ranks)
    for node in nodes:
        assert any(node in found for found in verdict.nodes), verdict.nodes
    assert SURE.index(verdict.confidence.value) <= SURE.index(most)


def test_every_parser_has_an_example(tmp_path: Path) -> None:
    """A parser that nothing exercises may be broken, or not needed."""
    texts = [text for text, *_ in CASES.values()]
    texts += [path.read_text() for path in sorted(EXCERPTS.glob("*.log"))]
    silent = {parser.name for parser in registry.ALL if "gloo" not in parser.name}  # test_gloo.py
    for text in texts:
        (tmp_path / "x.log").write_text(text)
        for window in collect.windows(
            str(tmp_path / "x.log"), registry.LITERALS, collect.ReadStatus()
        ):
            for parser in registry.ALL:
                hits = [
                    index
                    for index, record in enumerate(window.records)
                    if any(literal in record.text for literal in parser.literals)
                ]
                if any(event for index in hits for event in parser.function(window.records, index)):
                    silent.discard(parser.name)
    assert " ".join(sorted(silent)) == ""
