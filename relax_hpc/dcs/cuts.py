"""Boxes of shards for other nodes: the service `cuts` of the agent's data server, and its reader.

reader (any node)                             CutServer (in the agent, threads of the data server)
  FarPull: parts of at most 4 MiB  --ask-->   piece verified against its manifest, once a version
  xxh3 compared, copied to place   <-told--   boxes gathered: only wanted bytes travel

The reader tells the piece's place and checksum, which it has from the coordinator: the server needs
no manifest of its own. It keeps verified shards mapped until they retire.
"""

import itertools
import math
import threading
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

import msgspec
import numpy as np

from relax_hpc.dcs.assemble import Assembly, piece_part
from relax_hpc.dcs.layout import Box, itemsize
from relax_hpc.dcs.pull import PullPlan, Read, cut_box
from relax_hpc.dcs.store import (
    Piece,
    ShardManifest,
    VersionId,
    WeightStore,
    check_manifest,
    verify_piece,
)
from relax_hpc.errors import WeightSyncError
from relax_hpc.transfer.frames import MAX_TOLD_BYTES, FrameError
from relax_hpc.transfer.tcp import DataClient
from relax_hpc.transfer.tcp_questions import Question
from relax_hpc.transfer.tcp_stream import Cancelled

SERVICE = "cuts"
PART_BYTES = 4 << 20
"""Of one answer: large against a round trip, small against a cache and the agent's memory."""
_MAX_PART_READS = 250  # a request fits into a socket's buffer: sending it waits for nobody
_MAX_NODES = 8  # read from at once
_TICK_S = 1.0
_MAX_NAMED_RANKS = 8

_Cut = tuple[int, tuple[int, ...], tuple[int, ...]]  # (piece, start, stop)


class CutRequest(msgspec.Struct, frozen=True, array_like=True):
    """Boxes of one shard, to be sent one after the other."""

    shard: ShardManifest
    """With those pieces only that are cut."""
    cuts: list[_Cut]


# ---------------------------------------------------------------------------------------------
# Server
# ---------------------------------------------------------------------------------------------


class _Shard:
    """A mapped shard, and which of its pieces were verified."""

    def __init__(self, inode: int, data: np.ndarray) -> None:
        self.inode, self.data = inode, data
        self.verified: set[Piece] = set()
        self.lock = threading.Lock()


class CutServer:
    """Answers `CutRequest`s about the shards of one node. Thread-safe."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._shards: dict[tuple[VersionId, int], _Shard] = {}

    def answer(self, body: bytes) -> memoryview:
        """Gather the cuts of one request.

        Raises:
            WeightSyncError: the shard is not here any more, or a piece of it is corrupt.
            FrameError: no request, or cuts outside of their pieces.
        """
        request = _decode(body)
        shard = self._shard(request.shard)
        for piece in request.shard.pieces:
            with shard.lock:
                if piece not in shard.verified:
                    verify_piece(request.shard, piece, shard.data)
                    shard.verified.add(piece)
        return _payload([_part(request, shard.data, cut) for cut in request.cuts])

    def keep_only(self, versions: Collection[VersionId]) -> None:
        """Unmap the shards of all other versions: their memory is free once nobody reads them."""
        with self._lock:
            self._shards = {k: v for k, v in self._shards.items() if k[0] in versions}

    def _shard(self, manifest: ShardManifest) -> _Shard:
        key = (manifest.version, manifest.rank)
        with self._lock:
            known = self._shards.get(key)
            try:
                inode = self._store.path(*key).stat().st_ino
            except FileNotFoundError:
                inode = -1
            if known is None or known.inode != inode or len(known.data) != manifest.nbytes:
                self._shards.pop(key, None)
                data = self._store.map_shard(manifest)  # says what is wrong
                known = self._shards[key] = _Shard(inode, data)
            return known


def _part(request: CutRequest, data: np.ndarray, cut: _Cut) -> np.ndarray:
    number, start, stop = cut
    piece = request.shard.pieces[number]
    return piece_part(piece, data, Box(piece.box.name, start, stop))


def _decode(body: bytes) -> CutRequest:
    try:
        request = msgspec.msgpack.decode(body, type=CutRequest)
        check_manifest(request.shard)
    except (
        msgspec.DecodeError,
        WeightSyncError,
        ValueError,
    ) as err:  # also unequal numbers of axes
        raise FrameError("bad_request", f"no request for cuts: {err}") from err
    pieces, nbytes = request.shard.pieces, 0
    for number, start, stop in request.cuts:
        box = pieces[number].box if 0 <= number < len(pieces) else None
        is_inside = (
            box is not None
            and len(start) == len(stop) == len(box.start)
            and all(
                0 <= lo <= a <= b <= hi
                for lo, a, b, hi in zip(box.start, start, stop, box.stop, strict=True)
            )
        )
        if not is_inside:
            raise FrameError("bad_request", f"cut {start}:{stop} of piece {number}: {box}")
        size = math.prod(b - a for a, b in zip(start, stop, strict=True))
        nbytes += size * itemsize(pieces[number].dtype)
    if nbytes > MAX_TOLD_BYTES:
        raise FrameError("bad_request", f"cuts of {nbytes} bytes: at most {MAX_TOLD_BYTES}")
    return request


def _payload(parts: Sequence[np.ndarray]) -> memoryview:
    if len(parts) == 1 and parts[0].flags.c_contiguous:
        return parts[0].reshape(-1).view(np.uint8).data
    payload = np.empty(sum(part.nbytes for part in parts), dtype=np.uint8)
    start = 0
    for part in parts:
        place = np.frombuffer(payload.data[start : start + part.nbytes], dtype=part.dtype)
        place.reshape(part.shape)[...] = part
        start += part.nbytes
    return payload.data


# ---------------------------------------------------------------------------------------------
# Reader
# ---------------------------------------------------------------------------------------------


class _Part(typing.NamedTuple):
    """One answer: reads of one shard."""

    shard: ShardManifest
    reads: list[Read]
    nbytes: int

    def body(self) -> bytes:
        numbers: dict[int, int] = {}
        cuts: list[_Cut] = [
            (numbers.setdefault(read.piece, len(numbers)), read.box.start, read.box.stop)
            for read in self.reads
        ]
        pieces = [self.shard.pieces[number] for number in numbers]
        request = CutRequest(msgspec.structs.replace(self.shard, pieces=pieces), cuts)
        return msgspec.msgpack.encode(request)


class FarPull:
    """Reads the shards of other nodes, those of several nodes at once, in threads of its own.

    Args:
        client: of the data plane.
        plan: what is read.
        shards: index in the plan -> manifest, of the far ones.
        assembly: where it goes.
        stall_s: longest time without a whole part from a node that is being read.
        first: which node is read first; readers that differ here do not all begin at one.
    """

    def __init__(
        self,
        client: DataClient,
        plan: PullPlan,
        shards: Mapping[int, ShardManifest],
        assembly: Assembly,
        *,
        stall_s: float,
        first: int = 0,
    ) -> None:
        self._client, self._plan, self._shards = client, plan, shards
        self._assembly, self._stall_s = assembly, stall_s
        by_node: dict[str, list[int]] = {}
        for number, manifest in sorted(shards.items()):
            if plan.reads[number]:
                by_node.setdefault(manifest.node, []).append(number)
        nodes = sorted(by_node)
        turn = first % len(nodes) if nodes else 0
        self._by_node = [(node, by_node[node]) for node in (*nodes[turn:], *nodes[:turn])]
        self._cancelled = threading.Event()
        self._threads = ThreadPoolExecutor(_MAX_NODES, "pull-node")
        self._pulls: list[Future[int]] = []

    def __enter__(self) -> "FarPull":
        """Begin."""
        self._pulls = [self._threads.submit(self._pull, *item) for item in self._by_node]
        return self

    def __exit__(self, *_: object) -> None:
        """End what still runs: nothing is written to the assembly after this."""
        self._cancelled.set()
        self._threads.shutdown(cancel_futures=True)

    def wait(self, tick: Callable[[], None]) -> int:
        """Wait until all bytes are in place; returns how many came.

        Args:
            tick: Called about every second while it waits.

        Raises:
            RefusedError: a node does not have a shard any more, or found it corrupt.
            DeadlineError: no whole part came from a node for `stall_s`; names it, the version, the
                ranks and the bytes that had come.
            TransferError: whoever listens there is not of this run.
        """
        pending = set(self._pulls)
        while pending:
            done, pending = wait(pending, timeout=_TICK_S, return_when=FIRST_EXCEPTION)
            failures = [err for pull in done if (err := pull.exception()) is not None]
            if failures:  # of those that failed in the same moment, the cause
                raise next((e for e in failures if not isinstance(e, Cancelled)), failures[0])
            tick()
        return sum(pull.result() for pull in self._pulls)

    def _pull(self, node: str, numbers: list[int]) -> int:
        parts = [part for number in numbers for part in self._parts(number)]
        questions = [Question(SERVICE, part.nbytes, part.body) for part in parts]
        first = self._shards[numbers[0]]
        ranks = [self._shards[number].rank for number in numbers]
        more = ", .." if len(ranks) > _MAX_NAMED_RANKS else ""
        named = ", ".join(map(str, ranks[:_MAX_NAMED_RANKS])) + more
        what = f"weights {first.version}, shards of ranks {named} on node {node}"

        def place(number: int, payload: memoryview) -> None:
            start = 0
            data = np.frombuffer(payload, dtype=np.uint8)
            for read in parts[number].reads:
                nbytes = self._plan.nbytes(read)
                self._assembly.place(read, data[start : start + nbytes])
                start += nbytes

        return self._client.ask(
            node, what, questions, place, stall_s=self._stall_s, cancelled=self._cancelled
        )

    def _parts(self, number: int) -> Iterator[_Part]:
        """Cut a shard's reads into answers."""
        reads: list[Read] = []
        nbytes = 0
        for read in itertools.chain.from_iterable(map(self._cut, self._plan.reads[number])):
            more = self._plan.nbytes(read)
            if reads and (nbytes + more > PART_BYTES or len(reads) == _MAX_PART_READS):
                yield _Part(self._shards[number], reads, nbytes)
                reads, nbytes = [], 0
            reads.append(read)
            nbytes += more
        if reads:
            yield _Part(self._shards[number], reads, nbytes)

    def _cut(self, read: Read) -> Iterator[Read]:
        element_bytes = itemsize(self._plan.dtypes[read.target], read.box.name)
        for box in cut_box(read.box, element_bytes, PART_BYTES):
            yield read._replace(box=box)
