"""Read blocks wherever they lie: one interface, three transports, and the spill.

    this node, shm        mapped, views without a copy: ExtentMap
    other node, shm       RDMA where both ends have it, else TCP, into recycled private buffers
    spill                 pread where the folder can be seen from here, else TCP

One call reads many blocks: those of one node travel in one request. What comes from a wire or a
disk is checked against the checksums of its block while it is in the cache; a block that differs is
read once more before it is called corrupt. Nothing wrong is ever handed out.
"""

import collections
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from relax_hpc.config import TransferConfig
from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import Empty, RpcClient
from relax_hpc.errors import RelaxError, TransferError
from relax_hpc.log import kv
from relax_hpc.transfer import wire
from relax_hpc.transfer.block import Rows, open_block
from relax_hpc.transfer.buffers import BufferPool
from relax_hpc.transfer.extent import ExtentMap, spill_folder
from relax_hpc.transfer.frames import data_key
from relax_hpc.transfer.opener import BlockOpener
from relax_hpc.transfer.rdma import NixlSource, is_wanted
from relax_hpc.transfer.spill import TIER as SPILL_TIER
from relax_hpc.transfer.spill import read_spilled
from relax_hpc.transfer.tcp import DataClient, Progress
from relax_hpc.transfer.tcp_stream import Access
from relax_hpc.transfer.wire import BlockRef, DataAccess

logger = logging.getLogger(__name__)

_MAX_NODES_AT_ONCE = 8
_REFRESH_PAUSE_S = 0.2
"""Several streams find out at once that an address is old: one of them asks."""


class BlockSource(Protocol):
    """A transport that brings blocks of other nodes into private memory."""

    name: str
    """For messages: tcp or nixl."""

    def read_blocks(
        self,
        node: str,
        refs: Sequence[BlockRef],
        deadline: float,
        progress: Progress | None = None,
    ) -> list[memoryview | RelaxError]:
        """Read blocks of one node. Thread-safe.

        Args:
            node: where all of them lie.
            refs: the blocks. The source compares their epochs before and after it copied; payload
                checksums are the reader's business.
            deadline: `time.monotonic()` at which the whole read ends.
            progress: may be told (index, block, bytes that came), block after block, in this
                thread, so that checksums are computed while the bytes are in the cache.

        Returns:
            For each reference its bytes, 64-byte aligned, in memory that stays as it is while a
            view of it lives; or the error of this one block.

        Raises:
            DeadlineError: the node did not answer in time.
            TransferError: this transport cannot reach the node at all.
        """
        ...

    def close(self) -> None:
        """Free connections and memory that nobody has views of."""
        ...


class AccessBook:
    """Where the data servers of other nodes are, as their agents say. Thread-safe."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._lock = threading.Lock()
        self._clients: dict[str, RpcClient] = {}
        self._known: dict[str, tuple[DataAccess, float]] = {}

    def __call__(self, node: str, deadline: float, refresh: bool) -> DataAccess:
        """Return a node's access; ask its agent if it is unknown or did not work (`refresh`).

        Raises:
            DeadlineError: the agent does not answer.
        """
        asked = time.monotonic()
        with self._lock:
            known = self._known.get(node)
            if known is not None and (not refresh or asked - known[1] < _REFRESH_PAUSE_S):
                return known[0]
            if node not in self._clients:
                service = wire.agent_service(node)
                self._clients[node] = RpcClient(self._identity.run, service, self._identity)
            client = self._clients[node]
        access = client.call(
            "data_access", Empty(), DataAccess,
            timeout_s=max(deadline - asked, 0.001), why=f"address of the data server of {node}",
        )  # fmt: skip
        with self._lock:
            self._known[node] = (access, time.monotonic())
        return access

    def close(self) -> None:
        """Close the connections to the agents."""
        for client in self._clients.values():
            client.close()


class Reader:
    """Reads blocks for one process; safe for several threads.

    Args:
        identity: this process; its node decides what is near.
        config: section `transfer` of the recipe.
        access: where other nodes' data servers are; None: ask their agents.

    Raises:
        TransferError: transfer.rdma is "force" and it does not work here; the keys cannot be read.
    """

    def __init__(
        self,
        identity: Identity,
        config: TransferConfig | None = None,
        access: Access | None = None,
    ) -> None:
        config = config or TransferConfig()
        self._node = identity.node
        self._verify_shm = config.verify_shm
        self._extents = ExtentMap(identity.run.shm(identity.node) / "arenas")
        self._run, self._spill_folder = identity.run, config.spill_folder
        self._book = AccessBook(identity)
        self._pool = BufferPool()
        self._access: Access = access or self._book
        self._tcp = DataClient(
            data_key(identity.run), self._access, self._pool, streams=config.streams
        )
        is_rdma_wanted, why_not = is_wanted(config.rdma)
        self._nixl = NixlSource(self._access) if is_rdma_wanted else None
        logger.info(
            "payload of other nodes %s", kv(by="nixl" if self._nixl else "tcp", note=why_not)
        )
        self._counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def read(self, refs: Sequence[BlockRef], *, deadline: float) -> list[Rows]:
        """Read blocks; the views stay valid as `open_block` says, copies for ever.

        Args:
            refs: blocks of any nodes, in any order.
            deadline: `time.monotonic()` at which the whole read ends.

        Raises:
            StaleEpochError: a block was freed.
            TransferError: a block is corrupt, or cannot be reached; names node, extent and block.
            DeadlineError: a node did not answer in time.
        """
        found: list[Rows] = []
        for result in self.read_each(refs, deadline=deadline):
            if isinstance(result, RelaxError):
                raise result
            found.append(result)
        return found

    def read_each(self, refs: Sequence[BlockRef], *, deadline: float) -> list[Rows | RelaxError]:
        """As `read`, but what is wrong with one block is its result and hurts no other."""
        results: dict[int, Rows | RelaxError] = {}
        remote: dict[tuple[str, str], list[int]] = {}
        for i, ref in enumerate(refs):
            result = self._read_near(ref)
            if result is None:
                remote.setdefault((ref.node, ref.tier), []).append(i)
            else:
                results[i] = result
                self._count("spill" if ref.tier == SPILL_TIER else "shm", ref, result)
        for found in self._read_nodes(refs, remote, deadline):
            results.update(found)
        return [results[i] for i in range(len(refs))]

    def read_file(self, node: str, area: str, name: str, *, deadline: float) -> memoryview:
        """Read a whole file of another node's shared memory; see `DataClient.read_file`."""
        return self._tcp.read_file(node, area, name, deadline)

    def stats(self) -> dict[str, int]:
        """Count blocks and bytes by way (shm, spill, tcp, nixl), `read_again`, `failed` blocks,
        and reads that TCP took over from RDMA (`fell_back`)."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Close connections. Views stay valid."""
        self._tcp.close()
        if self._nixl is not None:
            self._nixl.close()
        self._book.close()

    # -- near ---------------------------------------------------------------------------------

    def _read_near(self, ref: BlockRef) -> Rows | RelaxError | None:
        """Read what this node can see; None: ask the block's node."""
        try:
            if ref.tier == SPILL_TIER:
                return self._read_spilled(ref) if self._sees_spill(ref) else None
            return self._read_mapped(ref) if ref.node == self._node else None
        except RelaxError as err:
            if ref.node == self._node:
                return err
            logger.warning("spill folder not as expected %s", kv(note=err))
            return None  # a shared file system may show another node's files late

    def _read_mapped(self, ref: BlockRef) -> Rows:
        where = f"mapped on {self._node}"
        return open_block(self._extents.view(ref, where), ref, verify=self._verify_shm, where=where)

    def _spill_of(self, node: str) -> Path:
        return spill_folder(self._run, node, self._spill_folder)

    def _sees_spill(self, ref: BlockRef) -> bool:
        """True on the node itself, and where the folder is shared."""
        return ref.node == self._node or self._spill_of(ref.node).is_dir()

    def _read_spilled(self, ref: BlockRef) -> Rows:
        folder = self._spill_of(ref.node)
        try:
            is_whole = ref.offset + ref.nbytes <= (folder / ref.extent).stat().st_size
        except OSError:
            is_whole = True  # read_spilled says what is wrong
        # A wrong length must not cost memory.
        buffer = self._pool.take(ref.nbytes) if is_whole else memoryview(bytearray())
        image = read_spilled(folder, ref, into=buffer)
        return open_block(image, ref, verify=True, where=f"spill, read on {self._node}")

    # -- far ----------------------------------------------------------------------------------

    def _read_nodes(
        self, refs: Sequence[BlockRef], remote: dict[tuple[str, str], list[int]], deadline: float
    ) -> list[dict[int, Rows | RelaxError]]:
        """Read from several nodes at once: the slowest one decides, not the sum."""
        if len(remote) <= 1:
            return [self._read_node(refs, wanted, deadline) for wanted in remote.values()]
        with ThreadPoolExecutor(min(len(remote), _MAX_NODES_AT_ONCE), "read-node") as threads:
            reads = [
                threads.submit(self._read_node, refs, wanted, deadline)
                for wanted in remote.values()
            ]
            return [read.result() for read in reads]

    def _read_node(
        self, refs: Sequence[BlockRef], wanted: list[int], deadline: float
    ) -> dict[int, Rows | RelaxError]:
        """Read blocks of one tier of one node, by RDMA if both ends have it."""
        ref = refs[wanted[0]]
        try:
            if ref.tier != SPILL_TIER and self._has_nixl(ref.node, deadline):
                assert self._nixl is not None
                return self._read_by(self._nixl, refs, wanted, deadline)
        except TransferError as err:
            with self._lock:
                self._counts["fell_back"] += 1
            logger.warning("tcp takes over %s", kv(node=ref.node, blocks=len(wanted), note=err))
        except RelaxError as err:  # the deadline: nobody else has time either
            return self._failed(refs, wanted, err)
        try:
            return self._read_by(self._tcp, refs, wanted, deadline)
        except RelaxError as err:  # of the whole node
            return self._failed(refs, wanted, err)

    def _has_nixl(self, node: str, deadline: float) -> bool:
        return self._nixl is not None and bool(self._access(node, deadline, False).nixl_agent)

    def _read_by(
        self, source: BlockSource, refs: Sequence[BlockRef], wanted: list[int], deadline: float
    ) -> dict[int, Rows | RelaxError]:
        """Read blocks of one node; those that arrived hurt once more."""
        found, hurt = self._read_once(source, refs, wanted, deadline)
        if hurt:
            logger.warning("blocks read again %s", kv(count=len(hurt), first=found[hurt[0]]))
            with self._lock:
                self._counts["read_again"] += len(hurt)
            found.update(self._read_once(source, refs, hurt, deadline)[0])
        for i, result in found.items():
            self._count(source.name, refs[i], result)
        return found

    def _read_once(
        self, source: BlockSource, refs: Sequence[BlockRef], wanted: list[int], deadline: float
    ) -> tuple[dict[int, Rows | RelaxError], list[int]]:
        """Return the result of each block, and which ones arrived hurt."""
        blocks = [refs[i] for i in wanted]
        opener = BlockOpener(blocks, f"{source.name}, read on {self._node}")
        images = source.read_blocks(blocks[0].node, blocks, deadline, opener.progress)
        found = {wanted[k]: opener.result(k, image) for k, image in enumerate(images)}
        return found, [i for k, i in enumerate(wanted) if opener.is_hurt(k)]

    def _failed(
        self, refs: Sequence[BlockRef], wanted: list[int], err: RelaxError
    ) -> dict[int, Rows | RelaxError]:
        for i in wanted:
            self._count("", refs[i], err)
        return dict.fromkeys(wanted, err)

    def _count(self, way: str, ref: BlockRef, result: Rows | RelaxError) -> None:
        with self._lock:
            if isinstance(result, RelaxError):
                self._counts["failed"] += 1
            else:
                self._counts[f"{way}_blocks"] += 1
                self._counts[f"{way}_bytes"] += ref.nbytes
