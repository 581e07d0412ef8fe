"""Payload of one process: an arena that its rows are written to, and a reader of everybody's.

put      a block per group in the arena, then its reference goes to the controller
refused  a block that the controller did not keep is freed here at once
free     a thread asks the controller which blocks nobody will read again, and recycles them

The arena is made by the first put: processes that only read ask for no memory.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from relax_hpc.config import TransferConfig
from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import RpcClient
from relax_hpc.errors import RelaxError, StaleIncarnationError
from relax_hpc.log import kv
from relax_hpc.transfer import wire
from relax_hpc.transfer.arena import Arena, ArenaLimits, ArenaStats, RpcGate
from relax_hpc.transfer.block import Check, Columns, Rows
from relax_hpc.transfer.extent import spill_folder
from relax_hpc.transfer.owner import Owner
from relax_hpc.transfer.reader import Reader
from relax_hpc.transfer.spill import SpillLimits, SpillWriter
from relax_hpc.transfer.wire import BlockRef

_log = logging.getLogger(__name__)

_LONG_POLL_S = 10.0
_RETRY_S = 2.0
_READ_TIMEOUT_S = 120.0
"""A block that cannot be read for this long is lost: its prompt is dispatched again."""
_MB = 1 << 20


class Payload:
    """Writes and reads blocks for `TransferQueue`. Thread-safe."""

    def __init__(self, identity: Identity, config: TransferConfig, grace_s: float) -> None:
        """Touches nothing yet.

        Args:
            identity: this task.
            config: sizes and deadlines.
            grace_s: how long the controller may be away.
        """
        self._identity, self._config, self._grace_s = identity, config, grace_s
        self._lock = threading.Lock()
        self._arena: Arena | None = None
        self._reader = Reader(identity, config)
        self._stop = threading.Event()

    def write(
        self, groups: Sequence[Columns], checks: Sequence[Mapping[str, Check]] | None = None
    ) -> list[BlockRef]:
        """Write one block for each group, all or none; waits for memory.

        Args:
            groups: fields of the rows of a group (or one field of several rows).
            checks: for each group, who looks at which column; see `write_block`.

        Raises:
            ArenaFullError: none became free within transfer.put_timeout_s.
            TransferError: a value is refused.
        """
        timeout_s = self._config.put_timeout_s
        return self._writer().put_many(groups, timeout_s=timeout_s, checks=checks)

    def give_up(self, refs: Sequence[BlockRef]) -> None:
        """Free blocks that the controller does not reference."""
        if refs:
            self._writer().free([(ref.extent, ref.offset, ref.epoch) for ref in refs])

    def read(self, refs: Sequence[BlockRef]) -> "list[Rows | RelaxError]":
        """Read blocks of any node; what cannot be read is an error in its place."""
        return self._reader.read_each(refs, deadline=time.monotonic() + _READ_TIMEOUT_S)

    def warm_up(self) -> None:
        """Ask for the first memory now, in the background, instead of at the first put."""
        self._writer()

    def stats(self) -> ArenaStats | None:
        """Return the state of the arena; None before the first put."""
        with self._lock:
            return None if self._arena is None else self._arena.stats()

    def close(self) -> None:
        """End the threads. What was read stays valid, what was put stays for its readers."""
        self._stop.set()
        with self._lock:
            arena = self._arena
        if arena is not None:
            arena.close()
        self._reader.close()

    # -- freeing (a thread) -------------------------------------------------------------------

    def _writer(self) -> Arena:
        with self._lock:
            if self._arena is None:
                config = self._config
                limits = ArenaLimits(
                    extent_bytes=config.extent_mb * _MB,
                    max_bytes=config.arena_mb * _MB,
                    low_water=config.extent_mb * _MB // 4,
                )
                me = self._identity
                spill = self._spill if config.spill_mb else None
                self._arena = Arena(RpcGate(me), Owner.of(me), limits, spill)
                threading.Thread(
                    target=self._collect, args=(self._arena,), name="arena-free", daemon=True
                ).start()
            return self._arena

    def _spill(self, arena: str, stamp: bytes) -> SpillWriter:
        config, me = self._config, self._identity
        folder = spill_folder(me.run, me.node, config.spill_folder)
        limits = SpillLimits(max_bytes=config.spill_mb * _MB)
        return SpillWriter(folder, me.node, arena, limits, stamp)

    def _collect(self, arena: Arena) -> None:
        """Long-poll the controller for blocks to recycle, until closed or replaced."""
        me = self._identity
        client = RpcClient(me.run, wire.SERVICE, me)
        acked: list[tuple[str, int, int]] = []
        while not self._stop.is_set():
            request = wire.CollectFree(arena.name, acked, _LONG_POLL_S)
            try:
                freed = client.call(
                    "collect_free", request, wire.Freed,
                    timeout_s=_LONG_POLL_S + self._grace_s, why=f"free blocks of {arena.name}",
                )  # fmt: skip
            except StaleIncarnationError as err:
                _log.warning("no blocks are freed any more %s", kv(arena=arena.name, reason=err))
                break
            except RelaxError as err:
                _log.warning("no list of free blocks %s", kv(arena=arena.name, reason=err))
                self._stop.wait(_RETRY_S)
                continue
            arena.free(freed.blocks)
            acked = freed.blocks
        client.close()
