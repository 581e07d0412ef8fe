"""Read a segment (or another file) of a remote node through its agent: the same bytes as mmap."""

import time

from relax_hpc.control.rpc import RpcClient
from relax_hpc.errors import TransferError
from relax_hpc.transfer.wire import Part, ReadPart

PART_BYTES = 8 << 20
"""One message of the agent: large enough for the wire, small enough for its memory."""


def read_remote(agent: RpcClient, area: str, name: str, timeout_s: float, why: str) -> bytes:
    """Fetch a whole file of a node's shared memory.

    Args:
        agent: client of that node's `agent-NODE` service.
        area: segments or weights.
        name: file name.
        timeout_s: deadline of the whole transfer.
        why: for the error message.

    Raises:
        TransferError: the file does not exist or changed its size.
        DeadlineError: the agent did not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    first = _part(agent, area, name, 0, deadline, why)
    buffer = bytearray(first.total)
    buffer[: len(first.data)] = first.data
    offset = len(first.data)
    while offset < first.total:
        part = _part(agent, area, name, offset, deadline, why)
        if part.total != first.total or not part.data:
            raise TransferError(f"{area}/{name} changed while it was read ({why})")
        buffer[offset : offset + len(part.data)] = part.data
        offset += len(part.data)
    return bytes(buffer)


def _part(agent: RpcClient, area: str, name: str, offset: int, deadline: float, why: str) -> Part:
    left_s = max(deadline - time.monotonic(), 0.001)
    request = ReadPart(area, name, offset, PART_BYTES)
    part = agent.call("read_part", request, Part, timeout_s=left_s, why=why)
    if part.total < 0:
        raise TransferError(f"{area}/{name} does not exist on its node ({why})")
    return part
