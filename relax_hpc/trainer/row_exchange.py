"""Rows inside a model replica: the data leader takes them, all its ranks get the same bytes.

Only (tp 0, pp 0, cp 0) of a data parallel rank talks to the transfer queue. What it took goes to
the other ranks of its replica as one uint8 tensor: a JSON header (never pickle) and raw arrays.
"""

import struct
import typing

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from relax_hpc.records import FinishReason, Row

_HEADER = struct.Struct("<q")


class _FieldHeader(msgspec.Struct, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class _RowHeader(msgspec.Struct, array_like=True):
    uid: str
    sample_index: int
    group_size: int
    num_prompt_tokens: int
    finish_reason: FinishReason
    fields: list[_FieldHeader]


def encode_rows(rows: typing.Sequence[Row]) -> np.ndarray:
    """Pack rows into one uint8 array: header length, JSON header, the fields' bytes in order."""
    headers, parts = [], []
    for row in rows:
        fields = []
        for name, array in row.fields.items():
            fields.append(_FieldHeader(name, array.dtype.str, array.shape))
            parts.append(np.ascontiguousarray(array).tobytes())
        headers.append(
            _RowHeader(
                row.uid,
                row.sample_index,
                row.group_size,
                row.num_prompt_tokens,
                row.finish_reason,
                fields,
            )
        )
    header = msgspec.json.encode(headers)
    payload = b"".join([_HEADER.pack(len(header)), header, *parts])
    return np.frombuffer(payload, np.uint8)


def decode_rows(data: np.ndarray) -> list[Row]:
    """Unpack what `encode_rows` made; arrays are read-only."""
    view = memoryview(data.tobytes())
    (length,) = _HEADER.unpack_from(view)
    offset = _HEADER.size + length
    headers = msgspec.json.decode(view[_HEADER.size : offset], type=list[_RowHeader])
    rows = []
    for header in headers:
        fields = {}
        for field in header.fields:
            dtype = np.dtype(field.dtype)
            count = int(np.prod(field.shape, dtype=np.int64))
            array = np.frombuffer(view, dtype, count, offset).reshape(field.shape)
            fields[field.name] = array
            offset += array.nbytes
        rows.append(
            Row(
                uid=header.uid,
                sample_index=header.sample_index,
                group_size=header.group_size,
                num_prompt_tokens=header.num_prompt_tokens,
                finish_reason=header.finish_reason,
                fields=fields,
            )
        )
    return rows


def broadcast_rows(
    rows: typing.Sequence[Row] | None, leader: int, group: dist.ProcessGroup
) -> list[Row]:
    """Give all ranks of the replica the leader's rows.

    Args:
        rows: the rows on the leader, None elsewhere.
        leader: global rank of the data leader.
        group: gloo group of the replica's ranks.

    Returns:
        The same rows on all ranks.
    """
    if group.size() == 1:
        assert rows is not None  # a replica of one rank is its own leader
        return list(rows)
    size = torch.zeros(1, dtype=torch.int64)
    data = np.empty(0, np.uint8)
    if rows is not None:
        data = encode_rows(rows)
        size[0] = data.size
    dist.broadcast(size, leader, group=group)
    buffer = torch.empty(int(size), dtype=torch.uint8)
    if rows is not None:
        buffer.numpy()[:] = data
    dist.broadcast(buffer, leader, group=group)
    return list(rows) if rows is not None else decode_rows(buffer.numpy())
