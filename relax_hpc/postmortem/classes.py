"""The catalogue of verdicts: what each class means, what to do, what to collect next.

docs/postmortem.md is checked against this table by a test.
"""

import msgspec


class FailureClass(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of failure."""

    name: str
    family: str
    """hardware, network, memory, storage, code, collective, launcher, scheduler, none, unknown."""
    meaning: str
    remedy: str
    next_steps: tuple[str, ...] = ()
    """What to collect or switch on when the class alone does not name a culprit."""
    is_failure: bool = True
    """False: nothing is broken (orderly end)."""
    blames_node: bool = False
    """The nodes of a verdict belong on the exclude list."""


RECORDER = (
    "switch the flight recorder on: TORCH_FR_BUFFER_SIZE=2000 (before 2.9 "
    "TORCH_NCCL_TRACE_BUFFER_SIZE), "
    "TORCH_NCCL_DUMP_ON_TIMEOUT=1, TORCH_FR_DUMP_TEMP_FILE=<shared folder>/rank_"
)
_ALL_LOGS = "collect the logs of all ranks, not only of those that report"
_STACKS = "while it hangs: py-spy dump of every rank"
_NCCL = (
    "NCCL_DEBUG=WARN, NCCL_DEBUG_SUBSYS=INIT,NET, one file per process (NCCL_DEBUG_FILE=...%h.%p)"
)
_DMESG = "kernel log of the node around that time (dmesg -T | grep -iE 'xid|aer|nvlink|mlx5')"
_SACCT = "sacct -D -j JOB --format=JobID,State,ExitCode,NodeList,Start,End,Reason"


def _c(
    name: str,
    family: str,
    meaning: str,
    remedy: str,
    *next_steps: str,
    is_failure: bool = True,
    blames_node: bool = False,
) -> FailureClass:
    return FailureClass(
        name=name,
        family=family,
        meaning=meaning,
        remedy=remedy,
        next_steps=next_steps,
        is_failure=is_failure,
        blames_node=blames_node,
    )


_TABLE = (
    # hardware
    _c(
        "gpu-ecc",
        "hardware",
        "A GPU met an uncorrectable memory error.",
        "Drain the node, reset or replace the GPU; requeue without that node.",
        _DMESG,
        blames_node=True,
    ),
    _c(
        "gpu-xid",
        "hardware",
        "The GPU driver reported a fatal fault (Xid).",
        "Drain the node and look the Xid number up in NVIDIA's catalogue; requeue without it.",
        _DMESG,
        blames_node=True,
    ),
    _c(
        "gpu-pcie-lost",
        "hardware",
        "A GPU fell off the PCIe bus or its link is bad.",
        "Drain the node; reseat or replace GPU, riser or cable; requeue without it.",
        _DMESG,
        blames_node=True,
    ),
    _c(
        "gpu-nvlink",
        "hardware",
        "NVLink or NVSwitch reported an error.",
        "Drain the node; reset the fabric (fabric manager, NVSwitch), then test with nccl-tests.",
        _DMESG,
        blames_node=True,
    ),
    _c(
        "fabric-manager",
        "hardware",
        "Fabric Manager or NVSwitches are in a bad state.",
        "Restart nvidia-fabricmanager or take the node out; NCCL_NVLS_ENABLE=0 works around it.",
        "systemctl status nvidia-fabricmanager; nvidia-smi -q | grep -A3 Fabric",
        blames_node=True,
    ),
    _c(
        "host-memory-error",
        "hardware",
        "Host memory had an uncorrectable error.",
        "Drain the node and replace the DIMM.",
        "mcelog / edac-util / ipmitool sel list",
        blames_node=True,
    ),
    _c(
        "node-failure",
        "hardware",
        "Slurm lost a node.",
        "Requeue without the node; ask why it went (power, kernel panic, network).",
        "slurmctld log and the node's console around that time",
        _SACCT,
        blames_node=True,
    ),
    # network
    _c(
        "network-retry-exceeded",
        "network",
        "An InfiniBand/RoCE connection lost packets until its retries ended.",
        "Test both ends of the link (ib_write_bw, perfquery, cable, switch port); "
        "requeue without the worse one.",
        "port counters of both ends: perfquery -x, ethtool -S",
        "what both nodes log about the port at that second",
    ),
    _c(
        "network-lost",
        "network",
        "A connection broke although no process is known to have ended before.",
        "Check the peer first: if its process died, that is the cause; else the path "
        "between the two.",
        _ALL_LOGS,
        _NCCL,
    ),
    _c(
        "nic-fatal",
        "network",
        "A network adapter reported a fatal error or its port went down.",
        "Take the node out; check cable, transceiver and firmware of that adapter.",
        _DMESG,
        blames_node=True,
    ),
    _c(
        "nic-missing",
        "network",
        "A node cannot open one of its network adapters; channels do not match.",
        "Repair the adapter or name the adapters all nodes have (NCCL_IB_HCA); do not "
        "set NCCL_IGNORE_NET_MISMATCH.",
        "ibv_devinfo on every node",
        _NCCL,
        blames_node=True,
    ),
    _c(
        "network-config",
        "network",
        "Queue pairs cannot be connected: addressing, routing or rails do not fit.",
        "Check GID index, RoCE routes and rails: NCCL_IB_GID_INDEX, NCCL_CROSS_NIC=0 "
        "on rail-only fabrics.",
        "show_gids on both ends; ping between exactly these GIDs",
    ),
    _c(
        "rdma-protection",
        "network",
        "The adapter refused local or remote memory: registration, not the link.",
        "Check GPUDirect RDMA (nvidia-peermem or dma-buf), ACS/IOMMU; NCCL_NET_GDR_LEVEL=0 or "
        "NCCL_DMABUF_ENABLE=0 as a test.",
        "lsmod | grep peermem; lspci -vvv | grep ACSCtl",
    ),
    # memory, storage
    _c(
        "host-oom",
        "memory",
        "The kernel or Slurm's cgroup killed a task: out of host memory.",
        "Ask for more memory (--mem, --mem-per-gpu, --exclusive), fewer workers, or find the leak.",
        _SACCT,
        "sacct -j JOB --format=JobID,MaxRSS,MaxRSSTask,MaxRSSNode",
    ),
    _c(
        "cuda-oom",
        "memory",
        "A process ran out of GPU memory.",
        "Smaller micro-batch or shorter sequences; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; check that no "
        "other process uses the GPU.",
        "torch.cuda.memory_summary() of that rank",
    ),
    _c(
        "shm-full",
        "memory",
        "/dev/shm was full: writing into it raised SIGBUS or ENOSPC.",
        "Enlarge /dev/shm (--shm-size, --ipc=host), fewer DataLoader workers, remove left-overs.",
        "df -h /dev/shm; ls -la /dev/shm",
    ),
    _c(
        "bus-error",
        "memory",
        "A task died of SIGBUS: a mapped file or shared memory had no page behind it.",
        "Check /dev/shm and the file system of mapped files; then memory limits.",
        "df -h /dev/shm",
        _DMESG,
    ),
    _c(
        "storage-stall",
        "storage",
        "Storage froze; every process that touched it stood still.",
        "Nothing on the nodes is broken: wait for the file system; "
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC above its "
        "fail-over time.",
        "server and client logs of the file system at that second",
        "whether other jobs died in the same second",
    ),
    _c(
        "storage-full",
        "storage",
        "A file system or quota was full.",
        "Free space or raise the quota.",
        "df, quota, lfs quota",
    ),
    _c(
        "storage-error",
        "storage",
        "Reading or writing a file failed.",
        "Check the mount on that node (stale handle, I/O error, permissions).",
        "mount, dmesg of that node",
    ),
    # code
    _c(
        "python-exception",
        "code",
        "One rank raised an exception; the others waited for it.",
        "Fix what the traceback of that rank says.",
    ),
    _c(
        "cuda-kernel-fault",
        "code",
        "A kernel of the program itself made an illegal access.",
        "Run that rank with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer; NCCL only reports it.",
        "CUDA_LAUNCH_BLOCKING=1",
        "compute-sanitizer --tool memcheck",
    ),
    _c(
        "rank-died",
        "code",
        "A process ended (signal or exit code); the others lost their peer.",
        "Read that rank's own log just before its end; ulimit -c unlimited for a core.",
        "log of exactly that rank",
        _SACCT,
    ),
    _c(
        "remote-crash",
        "code",
        "A peer went away first; the reporting ranks are its victims.",
        "Read the log of the peer (not of the reporter): crash, OOM or node failure there.",
        "log of the named peer",
        _SACCT,
    ),
    _c(
        "store-host-died",
        "code",
        "The process that hosts the key-value store (rank 0) ended first.",
        "Read rank 0's log: its exception, OOM or kill is the cause.",
        "log of rank 0",
        _SACCT,
    ),
    _c(
        "dataloader-deadlock",
        "code",
        "One process hangs in its data loader; the others wait in collectives.",
        "num_workers=0 (or another start method) for that loader; update PyTorch.",
        _STACKS,
    ),
    _c(
        "host-code-hang",
        "code",
        "One process hangs outside of collectives; the others wait for it.",
        "Look at the stack of the odd one out.",
        _STACKS,
    ),
    _c(
        "nccl-version-bug",
        "code",
        "A known bug of this NCCL version fits: silent wedge, healthy hardware.",
        "Change the NCCL version (LD_PRELOAD or the wheel) and repeat before draining any node.",
        _STACKS,
    ),
    # collectives
    _c(
        "missing-rank",
        "collective",
        "Some ranks did not come to a collective in which the others wait.",
        "Look at what the missing ranks did instead: their logs and stacks.",
        RECORDER,
        _ALL_LOGS,
        _STACKS,
    ),
    _c(
        "op-mismatch",
        "collective",
        "Ranks ran different collectives at the same place of the order.",
        "Find the branch that only some ranks take (rank-dependent if, data-dependent loop).",
        RECORDER,
    ),
    _c(
        "extra-op",
        "collective",
        "One rank started a collective that nobody else knows.",
        "Find the branch that only this rank takes.",
        RECORDER,
    ),
    _c(
        "size-mismatch",
        "collective",
        "Ranks gave different shapes to the same collective.",
        "Make the shapes equal (padding, drop_last) or use an operation for uneven sizes.",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL",
        RECORDER,
    ),
    _c(
        "dtype-mismatch",
        "collective",
        "Ranks gave different data types to the same collective.",
        "Cast to one type before the collective.",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL",
        RECORDER,
    ),
    _c(
        "straggler",
        "collective",
        "One rank was busy on the host for longer than the time-out.",
        "Raise the time-out of that group around the long phase, or split the work.",
        RECORDER,
        _STACKS,
    ),
    _c(
        "p2p-first-use",
        "collective",
        "The first send/receive of a group never found its partner.",
        "Check that both pipeline stages reach it and that both can connect (first use "
        "sets up the network).",
        "log and stack of the peer stage",
        _NCCL,
        RECORDER,
    ),
    _c(
        "pp-broadcast-wait",
        "collective",
        "A pipeline stage waits for data of another stage.",
        "Look at the source stage of that transfer.",
        _ALL_LOGS,
        _STACKS,
    ),
    _c(
        "all-same-seq",
        "collective",
        "The reporting ranks wait in the same operation; nobody is seen behind.",
        "Unknown from this log: absent ranks, network or GPU.",
        _ALL_LOGS,
        RECORDER,
        _NCCL,
        _DMESG,
    ),
    _c(
        "all-ranks",
        "collective",
        "Several ranks report a failed collective, their positions are incomplete.",
        "Unknown from this log.",
        _ALL_LOGS,
        RECORDER,
    ),
    _c(
        "blocking-wait-same-seq",
        "collective",
        "All reporting ranks gave up in the same blocking wait.",
        "Unknown from this log: absent ranks, network or GPU.",
        _ALL_LOGS,
        "TORCH_NCCL_BLOCKING_WAIT=0 with TORCH_NCCL_ASYNC_ERROR_HANDLING=1 gives more context",
        RECORDER,
    ),
    _c(
        "all-launched-none-completed",
        "collective",
        "All ranks launched the operation, none finished.",
        "Not a program error by this evidence: network, NVLink or a GPU stands still "
        "inside the kernel.",
        _NCCL,
        _DMESG,
        "port counters of all nodes; ncclras in verbose mode while it hangs",
    ),
    _c(
        "legacy-no-seq",
        "collective",
        "Time-out text without sequence numbers: ranks cannot be compared.",
        "Unknown from this log.",
        "update PyTorch (>= 2.5) or switch TORCH_DISTRIBUTED_DEBUG=DETAIL on",
        _ALL_LOGS,
    ),
    _c(
        "other-pg-decoy",
        "collective",
        "The groups shown are idle; the stuck one is not in the log.",
        "Look at the other groups of the rank that signalled first.",
        _ALL_LOGS,
        RECORDER,
    ),
    _c(
        "dump-signal-origin",
        "collective",
        "Ranks dumped because one rank timed out first; its own log is missing.",
        "Start with the log of the rank that signalled.",
        "log of that rank",
        RECORDER,
    ),
    _c(
        "heartbeat",
        "collective",
        "A watchdog thread stood still: a CUDA/NCCL call or the GIL blocked it.",
        "Find what held the process: stack dump, CUDA call, storage.",
        _STACKS,
        RECORDER,
    ),
    _c(
        "watchdog-stall",
        "unknown",
        "The watchdog itself was frozen: it noticed hours too late.",
        "The whole process or node stood still (suspended job, host stall); sequence "
        "numbers prove nothing.",
        "sacct and node logs for suspension at that time",
        _DMESG,
    ),
    _c(
        "ras-incomplete",
        "collective",
        "NCCL RAS lacks data of some processes: they are gone or unreachable.",
        "Look at the named process and node first.",
        "ncclras -v again after a minute",
        _DMESG,
    ),
    _c(
        "ras-mismatch",
        "collective",
        "NCCL RAS sees ranks that launched fewer operations than the others.",
        "Look at the stack of the ranks behind; a lag alone does not prove them guilty.",
        _STACKS,
    ),
    # launcher
    _c(
        "stale-rendezvous",
        "launcher",
        "Two generations of the job met in one store or file.",
        "Put job id and restart count into the rendezvous key, or remove the old file.",
    ),
    _c(
        "rendezvous-timeout",
        "launcher",
        "Not all ranks came to the rendezvous.",
        "See which ranks did not start; check MASTER_ADDR, ports, firewall.",
        _ALL_LOGS,
        _SACCT,
    ),
    _c(
        "port-collision",
        "launcher",
        "The rendezvous port was taken by another process.",
        "Bind port 0 and publish it, or derive the port from the job id; look for "
        "left-over processes.",
    ),
    _c(
        "duplicate-gpu",
        "launcher",
        "Two ranks of a node use the same GPU.",
        "One GPU per rank: torch.cuda.set_device(LOCAL_RANK), check "
        "CUDA_VISIBLE_DEVICES and --gpus-per-task.",
    ),
    _c(
        "device-ordinal",
        "launcher",
        "A rank asked for a GPU that it cannot see.",
        "Compare --gpus-per-node, --gpu-bind and CUDA_VISIBLE_DEVICES with LOCAL_RANK.",
    ),
    _c(
        "env-leak",
        "launcher",
        "A nested job inherited the environment of its parent.",
        "Start it with a clean environment (--export=NONE or an allow-list); name "
        "caches by the own job id.",
    ),
    _c(
        "cpu-bind-env-leak",
        "launcher",
        "A nested srun inherited the CPU mask of another node.",
        "unset SLURM_CPU_BIND* or srun --cpu-bind=none.",
    ),
    _c(
        "step-create-failure",
        "launcher",
        "Slurm could not create the job step.",
        "Ask for what the allocation has (--mem=0, --overlap or --exact); watch srun's "
        "exit code, not marker files.",
        "scontrol show job; slurmctld log",
    ),
    _c(
        "launch-failure",
        "launcher",
        "A task could not be started.",
        "Read the line of srun.",
        _SACCT,
    ),
    _c(
        "unkillable-step",
        "hardware",
        "Processes did not end with SIGKILL: they are stuck in the kernel.",
        "Drain the node; look for a hung file system or GPU driver (D state), reboot it.",
        "ps -eo pid,stat,wchan:32,cmd | grep ' D'; dmesg of the node",
        blames_node=True,
    ),
    _c(
        "signal-kill",
        "launcher",
        "A signal that the process does not handle ended it.",
        "Send the warn signal to the batch shell only (--signal=B:USR1@...) or install "
        "a handler first.",
    ),
    # scheduler, orderly
    _c(
        "requeue",
        "scheduler",
        "The job was requeued; exits after it are consequences.",
        "Nothing to repair.",
        is_failure=False,
    ),
    _c(
        "preemption",
        "scheduler",
        "The job was preempted.",
        "Nothing to repair: checkpoint on SIGTERM, requeue.",
        is_failure=False,
    ),
    _c(
        "time-limit",
        "scheduler",
        "The job reached its time limit.",
        "Raise --time or checkpoint before it (--signal).",
        is_failure=False,
    ),
    _c(
        "orderly-cancel",
        "scheduler",
        "Somebody or the workflow cancelled the job.",
        "Nothing to repair.",
        is_failure=False,
    ),
    _c(
        "job-suspended",
        "scheduler",
        "The job was suspended and resumed.",
        "Nothing to repair.",
        is_failure=False,
    ),
    _c(
        "teardown-after-success",
        "none",
        "The work was done; only releasing resources hung.",
        "Results are complete; call destroy_process_group() on all ranks at the end.",
        "whether the final checkpoint or result is there",
    ),
    _c(
        "no-failure",
        "none",
        "Nothing in the data speaks of a failure.",
        "Nothing to repair.",
        _ALL_LOGS,
        is_failure=False,
    ),
    _c(
        "unknown",
        "unknown",
        "The data does not tell.",
        "Collect more.",
        _ALL_LOGS,
        RECORDER,
        _SACCT,
        _DMESG,
    ),
)

CATALOGUE: dict[str, FailureClass] = {entry.name: entry for entry in _TABLE}


def lookup(name: str) -> FailureClass:
    """Entry of a class; `unknown`'s if there is none."""
    return CATALOGUE.get(name, CATALOGUE["unknown"])
