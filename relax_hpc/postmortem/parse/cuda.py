"""CUDA errors of the process's own kernels, and out of GPU memory."""

import re
from collections.abc import Iterator, Sequence

from relax_hpc.postmortem.evidence import Event, EventKind
from relax_hpc.postmortem.parse.record import Parser, Record, rx
from relax_hpc.postmortem.parse.watchdog import global_rank, group_of

_ERROR = rx(
    r"(?:CUDA (?:runtime |driver |kernel )?(?:error|failure)|HIP error|CUDA Exception|"
    r"Cuda failure|cuda error)(?: \d+)?:? '?(?P<what>an illegal memory access|"
    r"illegal memory access|"
    r"misaligned address|device-side assert|unspecified launch failure|"
    r"an illegal instruction|illegal instruction|"
    r"invalid program counter|invalid address space|the launch timed out|"
    r"stack overflow|invalid configuration|"
    r"no kernel image|an invalid pc|device kernel image|operation not supported|"
    r"CUBLAS_STATUS\w+|invalid argument|too many resources)",
    re.I,
)
_NAMES = re.compile(
    r"cudaError(?P<what>IllegalAddress|MisalignedAddress|Assert|LaunchFailure|"
    r"IllegalInstruction|InvalidPc|HardwareStackError)"
)
_CUBLAS = re.compile(
    r"(?P<what>CUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED)|"
    r"CUDNN_STATUS_EXECUTION_FAILED)"
)
_ASSERT = re.compile(
    r"Assertion `(?P<what>[^`'\n]{1,200})[`'] failed\.?|device-side assert triggered"
)


def parse_error(records: Sequence[Record], index: int) -> Iterator[Event]:
    """Sticky errors: illegal or misaligned address, assert, launch failure."""
    record = records[index]
    found = _ERROR.search(record.text) or _NAMES.search(record.text) or _CUBLAS.search(record.text)
    if found is None or "nvlink" in record.text.lower() or "ECC" in record.text:
        return
    if "Search for `" in record.text or "for debugging" in record.text.lower():
        return
    group, group_rank = group_of(record.text)
    yield record.event(
        EventKind.CUDA_ERROR,
        rank=global_rank(record, group, group_rank),
        group=group,
        attrs={
            "what": re.sub(r"\s+", " ", found["what"] or "").lower(),
            "watchdog": int("watchdog" in record.text),
        },
    )


_ASSERT_LINE = re.compile(r"(?:\.cu|\.cuh|\.h):\d+: .*?(?:block|thread): ?\[")


def parse_assert(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`...cu:1234: ...: block: [0,0,0], thread: [1,0,0] Assertion `...` failed.`."""
    record = records[index]
    if (found := _ASSERT.search(record.text)) and _ASSERT_LINE.search(record.text):
        yield record.event(
            EventKind.CUDA_ERROR,
            attrs={"what": f"device assert {found['what'] or ''}".strip(), "watchdog": 0},
        )


_OOM = rx(
    r"CUDA out of memory|HIP out of memory|OutOfMemoryError|CUDA error: out of memory|"
    r"Cuda failure(?: \d+)? 'out of memory'|"
    r"Failed to CUDA calloc|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED|"
    r"RESOURCE_EXHAUSTED: Out of memory|"
    r"NCCL (?:WARN|error).{0,40}out of memory|torch\.OutOfMemoryError|XLA.{0,40}out of memory"
)
_HOST_WORDS = re.compile(
    r"ray\.exceptions\.OutOfMemoryError|ray OOM|[Hh]ost memory|DefaultCPUAllocator|"
    r"Cannot allocate memory|(?<![A-Za-z])MemoryError\b"
)
_TRIED = re.compile(r"Tried to allocate ([\d.]+ \w+)")
_RANK_IN = re.compile(r"(?:on rank|\brank[ =:]?)\s*(\d+)", re.I)


def parse_oom(records: Sequence[Record], index: int) -> Iterator[Event]:
    """Out of GPU memory as PyTorch, CUDA, NCCL or XLA say it."""
    record = records[index]
    if not _OOM.search(record.text) or _HOST_WORDS.search(record.text):
        return
    group, group_rank = group_of(record.text)
    tried = _TRIED.search(record.text)
    yield record.event(
        EventKind.OUT_OF_MEMORY,
        rank=global_rank(record, group, group_rank),
        attrs={"where": "cuda", "tried": tried[1] if tried else ""},
    )


_HOST_OOM = re.compile(
    r"DefaultCPUAllocator: (?:can't|not enough)|Cannot allocate memory|std::bad_alloc|"
    r"^MemoryError|numpy\.core\._exceptions\._ArrayMemoryError|"
    r"ray\.exceptions\.OutOfMemoryError|"
    r"Out of memory: Kill(?:ed)? process (?P<pid>\d+)|oom-kill:|"
    r"Memory cgroup out of memory: Killed process (?P<pid2>\d+)|"
    r"Killed process (?P<pid3>\d+) .*total-vm|invoked oom-killer|"
    r"killed by the OOM killer|Workers \(tasks / actors\) killed due to memory "
    r"pressure|OOMKilled|was killed due to the node running low on memory"
)


def parse_host_oom(records: Sequence[Record], index: int) -> Iterator[Event]:
    """Out of host memory as the kernel, Ray, Kubernetes, NumPy or PyTorch say it."""
    record = records[index]
    if "ibv_" in record.text:  # locked memory (ulimit -l), not the lack of memory
        return
    if found := _HOST_OOM.search(record.text):
        pid = found["pid"] or found["pid2"] or found["pid3"]
        yield record.event(
            EventKind.OUT_OF_MEMORY,
            pid=int(pid) if pid else None,
            attrs={"where": "host", "words": found[0][:80]},
        )


PARSERS = (
    Parser(
        "error",
        (
            "CUDA",
            "HIP error",
            "Cuda failure",
            "cuda error",
            "cudaError",
            "CUBLAS_STATUS",
            "CUDNN_STATUS",
        ),
        parse_error,
    ),
    Parser("assert", ("Assertion `", "device-side assert"), parse_assert),
    Parser(
        "oom",
        (
            "out of memory",
            "OutOfMemory",
            "Out of memory",
            "CUDA calloc",
            "MemoryAllocation",
            "ALLOC_FAILED",
        ),
        parse_oom,
    ),
    Parser(
        "host_oom",
        (
            "CPUAllocator",
            "Cannot allocate memory",
            "bad_alloc",
            "MemoryError",
            "OutOfMemoryError",
            "Out of memory",
            "oom-kill",
            "Memory cgroup",
            "Killed process",
            "OOM killer",
            "memory pressure",
            "OOMKilled",
            "low on memory",
        ),
        parse_host_oom,
    ),
)
