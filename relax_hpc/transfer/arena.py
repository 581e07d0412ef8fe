"""The arena: shared memory of one producer process, recycled block by block.

who           waits for                          woken by
put           room for its block                 free (of trained rows), a new extent; `timeout_s`
grower        too little free memory             put (low water), a waiting put; retry after refusal
agent         nothing; makes extents one by one  reserve_extent of the grower

The process that owns the arena is its only writer: it allocates, copies, commits and frees. Readers
on the node map the extents read-only, other nodes get the bytes from the node's agent. Nothing here
survives the process but the extents, which the agent removes once nobody references them.

    arena = Arena(RpcGate(identity), Owner.of(identity), ArenaLimits())
    ref = arena.put([Entry("0.7.0", 0, "tokens", tokens)], timeout_s=600)    # a BlockRef: metadata
    rows = open_block(ExtentMap(folder).view(ref, "me"), ref, verify=False, where="me")
    arena.free([(ref.extent, ref.offset, ref.epoch)])                        # when it was trained
    arena.close()
"""

import bisect
import collections
import dataclasses
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import Empty, RpcClient
from relax_hpc.errors import ArenaFullError, RelaxError, TransferError
from relax_hpc.log import kv
from relax_hpc.transfer import wire
from relax_hpc.transfer.block import (
    ALIGN,
    BlockPlan,
    Check,
    Columns,
    Entry,
    mark_free,
    plan_block,
    write_block,
)
from relax_hpc.transfer.extent import (
    STAMP_BYTES,
    ReserveExtent,
    arena_name,
    make_extent,
    map_extent,
    populate,
    stamp_of,
)
from relax_hpc.transfer.owner import Owner
from relax_hpc.transfer.wire import BlockRef

logger = logging.getLogger(__name__)

_POPULATE_SLICE = 8 << 20
_MIN_EXTENT = 1 << 20
"""Less than this is not asked for in advance at the cap."""
_RESERVE_TIMEOUT_S = 120.0
_RETRY_S = 1.0
_MAX_RETRY_S = 10.0
Place = tuple[str, int, int]
"""A block: extent, offset, epoch."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArenaLimits:
    """Sizes of an arena, in bytes."""

    extent_bytes: int = 64 << 20
    """Unit in which memory is asked for; a larger block gets an extent of its own size."""
    max_bytes: int = 4096 << 20
    """All extents together; beyond it a put waits (or spills)."""
    low_water: int = 16 << 20
    """The next extent is asked for when less than this is free."""
    spill_after_s: float = 1.0
    """A put waits this long for memory before it goes to the spill, where there is one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArenaStats:
    """An arena at one moment; bytes."""

    reserved: int
    """Size of all extents."""
    used: int
    """In blocks that are not free."""
    high_water: int
    """Largest `used` so far."""
    num_blocks: int
    num_extents: int
    blocked_s: float
    """Time that puts waited for memory, summed over threads."""
    spilled_bytes: int
    """Written to the spill so far."""
    ignored_frees: int
    """Frees of blocks that were free already, or of another epoch (repeated messages)."""


class AgentGate(Protocol):
    """Who makes extents for an arena: the node's agent."""

    node: str
    folder: Path
    """SHM/arenas of the node."""

    def reserve_extent(self, request: ReserveExtent, timeout_s: float) -> None:
        """Make the extent. Raises ArenaFullError when the node has no room."""

    def close(self) -> None:
        """Nothing more will be asked for."""


class RpcGate:
    """The agent of this node, over the control plane."""

    def __init__(self, identity: Identity) -> None:
        self.node = identity.node
        self.folder = identity.run.shm(identity.node) / "arenas"
        self._client = RpcClient(identity.run, wire.agent_service(identity.node), identity)

    def reserve_extent(self, request: ReserveExtent, timeout_s: float) -> None:
        """Ask the agent; waits for its restart."""
        why = f"{request.nbytes} bytes of shared memory"
        self._client.call("reserve_extent", request, Empty, timeout_s=timeout_s, why=why)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


class LocalGate:
    """Makes extents itself: for tests and measurements without an agent."""

    def __init__(self, folder: Path, node: str = "local") -> None:
        self.node = node
        self.folder = folder

    def reserve_extent(self, request: ReserveExtent, timeout_s: float) -> None:
        """Make the extent in this process."""
        make_extent(self.folder, request)

    def close(self) -> None:
        """Nothing to do."""


class Spill(Protocol):
    """Where blocks go when the arena stays full: segments ARENA.sK."""

    def append(self, image: memoryview, *, epoch: int, digest: int) -> BlockRef:
        """Store a whole, committed block. Raises ArenaFullError over the budget."""

    def free(self, blocks: Sequence[Place]) -> object:
        """Blocks that are not referenced any more."""


MakeSpill = Callable[[str, bytes], Spill]
"""From the arena's name and the stamp that its segments begin with."""


class _Extent:
    """One mapped extent and its holes. Every method under the arena's lock."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.memory = np.frombuffer(map_extent(path, writable=True), np.uint8)
        self.view = self.memory.data
        self.nbytes = self.memory.nbytes
        self.holes: list[tuple[int, int]] = []
        """(offset, nbytes), sorted, never adjacent."""
        self.used = 0
        self.is_populated = False

    def allocate(self, nbytes: int) -> int | None:
        """First fit: low addresses are the ones that are warm."""
        for index, (offset, size) in enumerate(self.holes):
            if size >= nbytes:
                if size == nbytes:
                    del self.holes[index]
                else:
                    self.holes[index] = (offset + nbytes, size - nbytes)
                self.used += nbytes
                return offset
        return None

    def release(self, offset: int, nbytes: int) -> None:
        self.used -= nbytes
        self.add(offset, nbytes)

    def add(self, offset: int, nbytes: int) -> None:
        """Insert a hole and join it with its neighbours."""
        holes = self.holes
        index = bisect.bisect_left(holes, (offset, 0))
        if index < len(holes) and offset + nbytes == holes[index][0]:
            nbytes += holes.pop(index)[1]
        if index > 0 and sum(holes[index - 1]) == offset:
            before, size = holes[index - 1]
            holes[index - 1] = (before, size + nbytes)
        else:
            holes.insert(index, (offset, nbytes))


@dataclasses.dataclass(slots=True)
class _Block:
    extent: _Extent
    offset: int
    nbytes: int
    """Allocated: a multiple of 64."""
    epoch: int


@dataclasses.dataclass(eq=False, slots=True)
class _Waiter:
    """A put that waits for memory."""

    sizes: Sequence[int]


class Arena:
    """Producer half of a node's shared memory. Thread-safe; of one process, never a fork of it."""

    def __init__(
        self,
        agent: AgentGate,
        owner: Owner,
        limits: ArenaLimits,
        make_spill: MakeSpill | None = None,
    ) -> None:
        self.name = arena_name(owner)
        """Start of the names of its extents, unique in the run."""
        self._agent = agent
        self._owner = owner
        self._limits = limits
        self._spill = None if make_spill is None else make_spill(self.name, stamp_of(owner))
        self._changed = threading.Condition(threading.Lock())
        self._extents: dict[str, _Extent] = {}
        self._blocks: dict[tuple[str, int], _Block] = {}
        self._waiting: collections.deque[_Waiter] = collections.deque()
        """Oldest first; only the first may allocate."""
        self._epoch = 0
        self._num_asked = 0
        self._refusal = ""
        """Why the last extent was refused."""
        self._retry_at = 0.0
        self._retry_s = _RETRY_S
        self._is_closed = False
        self._reserved = 0
        self._used = 0
        self._high_water = 0
        self._blocked_s = 0.0
        self._spilled_bytes = 0
        self._is_stuck = False
        """A put went to the spill, and nothing became free since: the next ones do not wait."""
        self._ignored_frees = 0
        self._grower = threading.Thread(target=self._grow, name="arena-grow", daemon=True)
        self._grower.start()

    def put(
        self,
        entries: Columns | Sequence[Entry],
        *,
        timeout_s: float,
        checks: Mapping[str, Check] | None = None,
    ) -> BlockRef:
        """Write one block and return its reference; nobody knows of it before that.

        Args:
            entries: fields of one group (or one field of several rows).
            timeout_s: how long to wait for memory.
            checks: see `write_block`.

        Raises:
            ArenaFullError: no memory became free in time; says how much there is of what.
            TransferError: a value was refused. In both cases nothing is left behind.
        """
        return self.put_many(
            [entries], timeout_s=timeout_s, checks=None if checks is None else [checks]
        )[0]

    def put_many(
        self,
        groups: Sequence[Columns | Sequence[Entry]],
        *,
        timeout_s: float,
        checks: Sequence[Mapping[str, Check]] | None = None,
    ) -> list[BlockRef]:
        """Write one block for each group, all or none: see `put`. `checks`: one for each group."""
        if os.getpid() != self._owner.pid:
            raise TransferError(
                f"arena {self.name} belongs to process {self._owner.pid}, this is {os.getpid()}: "
                "a forked process makes an arena of its own"
            )
        plans = [plan_block(entries) for entries in groups]
        sizes = [-(-plan.nbytes // ALIGN) * ALIGN for plan in plans]
        deadline = time.monotonic() + timeout_s
        while True:
            blocks = self._allocate(sizes, deadline)
            refs: list[BlockRef] = []
            try:
                for index, (plan, block) in enumerate(zip(plans, blocks, strict=True)):
                    refs.append(self._write(plan, block, checks[index] if checks else None))
                return refs
            except BaseException as err:
                self._give_up(blocks, refs)
                # Only the spill is full: wait for either.
                if not isinstance(err, ArenaFullError) or time.monotonic() >= deadline:
                    raise
                self._is_stuck = False  # not at once, but after a while

    def free(self, blocks: Sequence[Place]) -> None:
        """Recycle blocks that nobody will read again: (extent, offset, epoch).

        References to them are stale from now on. What is free already or has another epoch is
        ignored (and counted), so a list may be given twice.
        """
        others = []
        with self._changed:
            for extent, offset, epoch in blocks:
                block = self._blocks.get((extent, offset))
                if block is None or block.epoch != epoch:
                    others.append((extent, offset, epoch))
                    continue
                del self._blocks[extent, offset]
                mark_free(block.extent.view, offset)
                block.extent.release(offset, block.nbytes)
                self._used -= block.nbytes
                self._is_stuck = False
            spilled = [b for b in others if b[0].startswith(f"{self.name}.s")]
            self._ignored_frees += len(others) - len(spilled)
            if self._waiting:
                self._changed.notify_all()
        if spilled and self._spill is not None:
            self._spill.free(spilled)

    def stats(self) -> ArenaStats:
        """Return counters and sizes."""
        with self._changed:
            return ArenaStats(
                reserved=self._reserved,
                used=self._used,
                high_water=self._high_water,
                num_blocks=len(self._blocks),
                num_extents=len(self._extents),
                blocked_s=self._blocked_s,
                spilled_bytes=self._spilled_bytes,
                ignored_frees=self._ignored_frees,
            )

    def close(self) -> None:
        """Ask for no more memory; waiting puts fail. Extents stay for those who read them."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._grower.join(timeout=2.0)  # a daemon: it may wait for an agent that is gone
        self._agent.close()

    # -- writing ------------------------------------------------------------------------------

    def _write(
        self, plan: BlockPlan, block: _Block | None, checks: Mapping[str, Check] | None
    ) -> BlockRef:
        if block is None:
            return self._write_to_spill(plan, checks)
        offset, extent = block.offset, block.extent
        digest = write_block(plan, extent.view[offset : offset + block.nbytes], block.epoch, checks)
        return BlockRef(self._agent.node, extent.name, offset, plan.nbytes, block.epoch, digest)

    def _write_to_spill(self, plan: BlockPlan, checks: Mapping[str, Check] | None) -> BlockRef:
        assert self._spill is not None
        with self._changed:
            self._epoch += 1
            epoch = self._epoch
        image = memoryview(bytearray(plan.nbytes))
        digest = write_block(plan, image, epoch, checks)
        ref = self._spill.append(image, epoch=epoch, digest=digest)
        with self._changed:
            self._spilled_bytes += plan.nbytes
        return ref

    def _give_up(self, blocks: Sequence[_Block | None], refs: Sequence[BlockRef]) -> None:
        """Take back what a failed put reserved and wrote."""
        places = [(b.extent.name, b.offset, b.epoch) for b in blocks if b is not None]
        places += [(r.extent, r.offset, r.epoch) for r in refs if r.tier != "shm"]
        self.free(places)

    # -- allocating (all under the lock) ------------------------------------------------------

    def _allocate(self, sizes: Sequence[int], deadline: float) -> list[_Block | None]:
        """Get memory for all blocks at once; None for those that go to the spill.

        Puts are served in the order in which they came: small ones do not starve a large one.
        """
        with self._changed:
            self._refuse_impossible(sizes)
            blocks = None if self._waiting else self._try_all(sizes)
            if blocks is None:
                blocks = self._wait_for_room(_Waiter(sizes), deadline)
            elif self._is_low() and self._reserved < self._limits.max_bytes:
                self._changed.notify_all()  # the grower
            self._high_water = max(self._high_water, self._used)
            return blocks

    def _refuse_impossible(self, sizes: Sequence[int]) -> None:
        if self._is_closed:
            raise TransferError(f"arena {self.name} is closed")
        if self._spill is None and sum(sizes) + STAMP_BYTES > self._limits.max_bytes:
            raise ArenaFullError(
                f"{len(sizes)} blocks of {sum(sizes)} bytes in one put can never fit into arena "
                f"{self.name} of {self._limits.max_bytes} bytes: raise transfer.arena_mb or put "
                "less at once"
            )

    def _wait_for_room(self, me: _Waiter, deadline: float) -> list[_Block | None]:
        begin = time.monotonic()
        patience_s = 0.0 if self._is_stuck else self._limits.spill_after_s
        spill_at = min(begin + patience_s, deadline)
        self._waiting.append(me)
        self._changed.notify_all()  # the grower
        try:
            while True:
                if self._waiting[0] is me:
                    blocks = self._try_all(me.sizes)
                    if blocks is not None:
                        return blocks
                now = time.monotonic()
                if self._spill is not None and now >= spill_at:
                    self._is_stuck = True
                    return [self._try(size) for size in me.sizes]
                if now >= deadline or self._is_closed:
                    raise self._full(me.sizes, now - begin)
                wake_at = deadline if self._spill is None else spill_at
                self._changed.wait(wake_at - now)
        finally:
            self._waiting.remove(me)
            self._blocked_s += time.monotonic() - begin
            self._changed.notify_all()  # the next one in line

    def _try_all(self, sizes: Sequence[int]) -> list[_Block | None] | None:
        blocks: list[_Block | None] = []
        for size in sizes:
            block = self._try(size)
            if block is None:
                self._take_back(blocks)
                return None
            blocks.append(block)
        return blocks

    def _fits(self, waiter: _Waiter) -> bool:
        """True if there is room for a put that has only not woken up yet."""
        blocks = self._try_all(waiter.sizes)
        self._take_back(blocks or [])
        return blocks is not None

    def _try(self, nbytes: int) -> _Block | None:
        for extent in self._extents.values():
            offset = extent.allocate(nbytes)
            if offset is not None:
                self._epoch += 1
                self._used += nbytes
                block = _Block(extent, offset, nbytes, self._epoch)
                self._blocks[extent.name, offset] = block
                return block
        return None

    def _take_back(self, blocks: Sequence[_Block | None]) -> None:
        for block in blocks:
            if block is not None:
                del self._blocks[block.extent.name, block.offset]
                block.extent.release(block.offset, block.nbytes)
                self._used -= block.nbytes

    def _full(self, sizes: Sequence[int], waited_s: float) -> TransferError:
        if self._is_closed:
            return TransferError(f"arena {self.name} was closed while a put waited for memory")
        holes = [size for extent in self._extents.values() for _, size in extent.holes]
        refusal = f"; the last extent was refused: {self._refusal}" if self._refusal else ""
        return ArenaFullError(
            f"arena {self.name} is full: a put of {sum(sizes)} bytes (largest block {max(sizes)}) "
            f"waited {waited_s:.1f} s; {self._used} of {self._reserved} bytes are in use by "
            f"{len(self._blocks)} blocks, the largest hole has {max(holes, default=0)}, the arena "
            f"may have {self._limits.max_bytes}{refusal}. Consumers do not train fast enough: "
            "lower rollout.groups_per_step or max_staleness, or raise transfer.arena_mb"
        )

    # -- growing (a thread) -------------------------------------------------------------------

    def _grow(self) -> None:
        while (nbytes := self._wait_for_need()) > 0:
            try:
                self._add_extent(nbytes)
            except RelaxError as err:
                self._note_refusal(str(err), nbytes)
            except Exception as err:
                logger.exception("arena cannot grow %s", kv(arena=self.name, nbytes=nbytes))
                self._note_refusal(repr(err), nbytes)

    def _wait_for_need(self) -> int:
        """Wait until an extent is needed; returns its size, 0 when the arena was closed."""
        with self._changed:
            while not self._is_closed:
                wait_s = self._retry_at - time.monotonic()
                if wait_s <= 0:
                    nbytes = self._needed()
                    if nbytes > 0:
                        return nbytes
                self._changed.wait(wait_s if wait_s > 0 else None)
            return 0

    def _needed(self) -> int:
        """Size of the extent to ask for now, 0 if none; may drop empty extents to make room."""
        limits = self._limits
        if self._waiting:
            if self._fits(self._waiting[0]):
                return 0
            least = max(self._waiting[0].sizes) + STAMP_BYTES
            self._drop_empty(least)
        elif self._is_low():
            least = min(_MIN_EXTENT, limits.max_bytes)
        else:
            return 0
        least = -(-least // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = min(max(limits.extent_bytes, least), limits.max_bytes - self._reserved)
        return nbytes if nbytes >= least else 0

    def _is_low(self) -> bool:
        return self._reserved - self._used < self._limits.low_water

    def _drop_empty(self, nbytes: int) -> None:
        """Remove empty extents that are too small for the waiting put, if that makes room."""
        missing = self._reserved + nbytes - self._limits.max_bytes
        if 0 < missing <= sum(extent.nbytes for extent in self._empty()):
            for extent in self._empty():
                if self._reserved + nbytes > self._limits.max_bytes:
                    self._drop(extent)

    def _empty(self) -> list[_Extent]:
        return [e for e in self._extents.values() if e.used == 0 and e.is_populated]

    def _drop(self, extent: _Extent) -> None:
        (self._agent.folder / extent.name).unlink(missing_ok=True)
        del self._extents[extent.name]
        self._reserved -= extent.nbytes

    def _add_extent(self, nbytes: int) -> None:
        self._num_asked += 1
        name = f"{self.name}.{self._num_asked}"
        path = self._agent.folder / name
        request = ReserveExtent(name, self._owner, nbytes)
        try:
            self._agent.reserve_extent(request, _RESERVE_TIMEOUT_S)
            extent = _Extent(name, path)
        except BaseException:
            path.unlink(missing_ok=True)  # made, but the answer was lost
            raise
        with self._changed:
            self._extents[name] = extent
            self._reserved += nbytes
            self._refusal, self._retry_s = "", _RETRY_S
        for begin in range(0, nbytes, _POPULATE_SLICE):
            end = min(begin + _POPULATE_SLICE, nbytes)
            populate(extent.memory, begin, end, writable=True)
            with self._changed:
                extent.add(max(begin, STAMP_BYTES), end - max(begin, STAMP_BYTES))
                extent.is_populated = end == nbytes
                self._changed.notify_all()
        logger.info("extent added %s", kv(extent=name, nbytes=nbytes, reserved=self._reserved))

    def _note_refusal(self, reason: str, nbytes: int) -> None:
        with self._changed:
            self._refusal = reason
            least = max(self._waiting[0].sizes) + STAMP_BYTES if self._waiting else 0
            # Too small for the put that waits, but the node has no more. Others would come back.
            empty = [extent for extent in self._empty() if extent.nbytes < least]
            for extent in empty:
                self._drop(extent)
            if not empty:
                self._retry_at = time.monotonic() + self._retry_s
                self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)
        logger.warning("no extent %s", kv(arena=self.name, nbytes=nbytes, reason=reason))
