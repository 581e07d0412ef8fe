"""Which blocks of payload are in use, and which their producers may free."""

from relax_hpc.transfer.wire import BlockRef, arena_of

FreeBlock = tuple[str, int, int]


class BlockIndex:
    """Counts users of blocks and extents; a block without users is free. O(1) per block."""

    def __init__(self, free: dict[str, set[FreeBlock]]) -> None:
        """`free` is the part of the state that is kept over restarts: arena -> free blocks."""
        self._free = free
        self._users: dict[FreeBlock, int] = {}
        self._extents: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._users)

    def use(self, ref: BlockRef, num_users: int = 1) -> None:
        """More groups (or prompts with saved tokens) need the block."""
        key = (ref.extent, ref.offset, ref.epoch)
        self._users[key] = self._users.get(key, 0) + num_users
        self._extents[ref.extent] = self._extents.get(ref.extent, 0) + num_users

    def release(self, ref: BlockRef) -> str | None:
        """One user less; returns the arena when the block is free now."""
        key = (ref.extent, ref.offset, ref.epoch)
        self._extents[ref.extent] -= 1
        if not self._extents[ref.extent]:
            del self._extents[ref.extent]
        self._users[key] -= 1
        if self._users[key]:
            return None
        del self._users[key]
        arena = arena_of(ref.extent)
        self._free.setdefault(arena, set()).add(key)
        return arena

    def has_block(self, ref: BlockRef) -> bool:
        """True while somebody needs the block."""
        return (ref.extent, ref.offset, ref.epoch) in self._users

    def has_extent(self, extent: str) -> bool:
        """True while somebody needs a block of the extent."""
        return extent in self._extents

    def free_of(self, arena: str) -> set[FreeBlock]:
        """Free blocks of an arena that were not acknowledged."""
        return self._free.get(arena, set())

    def has_free(self, extent: str) -> bool:
        """True while blocks of the extent are free and not acknowledged."""
        return any(block[0] == extent for block in self.free_of(arena_of(extent)))

    def acknowledge(self, arena: str, blocks: list[FreeBlock]) -> None:
        """The producer freed them (or its arena is gone)."""
        known = self._free.get(arena)
        if known is None:
            return
        known.difference_update(blocks)
        if not known:
            del self._free[arena]

    def forget_extent(self, extent: str) -> None:
        """The extent will be removed: nobody is left to free single blocks of it."""
        arena = arena_of(extent)
        self.acknowledge(arena, [block for block in self.free_of(arena) if block[0] == extent])
