"""The prompt ledger: which prompt was dispatched, trained, dropped, or is to be dispatched again.

Every (epoch, prompt) is at any moment in exactly one place: ahead of the cursor, in flight, in the
list of those to dispatch again, trained in a step, or dropped. Copies of one prompt have different
uids `EPOCH.INDEX.K`, K counting its dispatches; an uid is never used twice in a run.

What was trained is kept for the whole run, so that a rollback to any checkpoint is exact; packed it
takes a few bytes per group.
"""

from collections.abc import Iterable

import msgspec
import numpy as np

from relax_hpc.errors import TransferError
from relax_hpc.transfer.wire import BlockRef

LIFE = 1000
"""Where the uids of a lost branch are not known, those of the next one begin at a multiple as K."""
LIVES = 100
"""Lives of one attempt, at most: each begins with a restore from a checkpoint."""


class Ticket(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One dispatch of one prompt."""

    epoch: int
    prompt_index: int
    k: int

    @property
    def uid(self) -> str:
        """Unique id of the dispatch."""
        return f"{self.epoch}.{self.prompt_index}.{self.k}"

    def again(self, first_k: int = 0) -> "Ticket":
        """The same prompt's next dispatch."""
        return Ticket(self.epoch, self.prompt_index, max(self.k + 1, first_k))

    def at_least(self, first_k: int) -> "Ticket":
        """The same dispatch with a K of this life."""
        return Ticket(self.epoch, self.prompt_index, max(self.k, first_k))


def ticket_of(uid: str) -> Ticket:
    """Parse an uid."""
    parts = uid.split(".")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        raise TransferError(f"uid {uid!r}: must be EPOCH.INDEX.K")
    return Ticket(*(int(part) for part in parts))


class PackedTickets(msgspec.Struct, frozen=True, array_like=True):
    """Tickets as columns of the smallest integers that hold them; a constant column is one."""

    count: int
    columns: list[tuple[str, bytes]]
    """(numpy dtype, little-endian bytes) of epoch, prompt index, k."""

    @classmethod
    def pack(cls, tickets: Iterable[Ticket]) -> "PackedTickets":
        """Pack in the order given."""
        rows = [(t.epoch, t.prompt_index, t.k) for t in tickets]
        columns = []
        for column in np.array(rows, np.int64).reshape(-1, 3).T:
            values = column[:1] if column.size and (column == column[0]).all() else column
            dtype = np.min_scalar_type(int(values.max())) if values.size else np.dtype(np.uint8)
            columns.append((dtype.str, values.astype(dtype).tobytes()))
        return cls(len(rows), columns)

    def unpack(self) -> list[Ticket]:
        """Return the tickets in order."""
        arrays = [np.frombuffer(data, np.dtype(dtype)) for dtype, data in self.columns]
        lists = [np.broadcast_to(a, self.count).tolist() for a in arrays]
        return [Ticket(*row) for row in zip(*lists, strict=True)]


class Partial(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of an unfinished group."""

    block: BlockRef
    oldest_version: int
    newest_version: int


class LedgerData(msgspec.Struct):
    """What is kept over restarts."""

    num_prompts: int = 0
    """0 until the data set is known."""
    fingerprint: str = ""
    is_change_allowed: bool = False
    """Whoever opened the data set last accepts another one than the run began with."""
    first_epoch: int = 0
    """Prompts of earlier epochs belong to another data set: they are not dispatched again."""
    first_k: int = 0
    """Smallest K of new dispatches."""
    position: int = 0
    """Prompts taken from the cursor so far, over epochs."""
    again: list[Ticket] = msgspec.field(default_factory=list)
    """To dispatch before the cursor goes on, in order."""
    trained: dict[int, PackedTickets] = msgspec.field(default_factory=dict)
    """Groups by train step, in the order of their chunks."""
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
    redispatched: dict[str, int] = msgspec.field(default_factory=dict)
    partials: dict[str, Partial] = msgspec.field(default_factory=dict)
    """Saved tokens of prompts in `again`, by the uid of their next dispatch."""


class Ledger:
    """Rules over LedgerData. `peek` plans, the other methods change the data."""

    def __init__(self, data: LedgerData, seed: int, is_shuffled: bool) -> None:
        self._data = data
        self._seed = seed
        self._is_shuffled = is_shuffled
        self._orders: dict[int, np.ndarray] = {}

    @property
    def epoch(self) -> int:
        """Epoch of the cursor."""
        data = self._data
        return data.position // data.num_prompts if data.num_prompts else 0

    @property
    def trained_groups(self) -> int:
        """Groups trained in steps that still count."""
        return sum(packed.count for packed in self._data.trained.values())

    def open(self, num_prompts: int, fingerprint: str, is_change_allowed: bool) -> bool:
        """Set the data set; another one than before begins with its next epoch.

        Returns:
            True: it is another one, what was to dispatch again is dropped.
        """
        data = self._data
        is_changed = data.num_prompts > 0 and (data.num_prompts, data.fingerprint) != (
            num_prompts,
            fingerprint,
        )
        if is_changed:
            data.first_epoch = self.epoch + 1
            data.position = data.first_epoch * num_prompts
            for _ in data.again:
                self.drop("dataset_changed")
            data.again = []
            self._orders = {}
        data.num_prompts, data.fingerprint = num_prompts, fingerprint
        data.is_change_allowed = is_change_allowed
        return is_changed

    def restore(self, other: LedgerData) -> None:
        """Go on from a checkpoint's ledger."""
        for field in other.__struct_fields__:
            setattr(self._data, field, getattr(other, field))
        self._orders = {}

    def peek(self, num_prompts: int) -> tuple[list[Ticket], int]:
        """Return the next tickets, and how many of them are second dispatches."""
        data = self._data
        tickets = data.again[:num_prompts]
        num_again = len(tickets)
        position, end = data.position, data.position + num_prompts - num_again
        while position < end:
            epoch, place = divmod(position, data.num_prompts)
            places = self._order(epoch)[place : place + end - position].tolist()
            tickets += [Ticket(epoch, index, data.first_k) for index in places]
            position += len(places)
        return tickets, num_again

    def advance(self, num_tickets: int, num_again: int) -> None:
        """Take what `peek` returned."""
        del self._data.again[:num_again]
        self._data.position += num_tickets - num_again

    def dispatch_again(
        self, tickets: Iterable[Ticket], reason: str, is_first: bool
    ) -> list[Ticket]:
        """Put prompts into the list of those to dispatch again, under new uids.

        Returns:
            The new tickets; prompts of a data set that was replaced are dropped instead.
        """
        data = self._data
        again = []
        for ticket in tickets:
            if ticket.epoch < data.first_epoch:
                self.drop("dataset_changed")
            else:
                again.append(ticket.again(data.first_k))
        data.again = [*again, *data.again] if is_first else [*data.again, *again]
        if again:
            data.redispatched[reason] = data.redispatched.get(reason, 0) + len(again)
        return again

    def drop(self, reason: str) -> None:
        """Count a prompt that was used up without being trained."""
        self._data.dropped[reason] = self._data.dropped.get(reason, 0) + 1

    def train(self, step: int, tickets: Iterable[Ticket]) -> None:
        """Record what a step consumed."""
        self._data.trained[step] = PackedTickets.pack(tickets)

    def trained_uids(self, step: int) -> list[str]:
        """Group uids that a step consumed, in the order of its chunks; [] if it does not count."""
        packed = self._data.trained.get(step)
        return [] if packed is None else [ticket.uid for ticket in packed.unpack()]

    def untrain(self, step: int) -> list[Ticket]:
        """Forget steps >= `step` and return their prompts in the order of training."""
        tickets = []
        for later in sorted(s for s in self._data.trained if s >= step):
            tickets += self._data.trained.pop(later).unpack()
        return tickets

    def _order(self, epoch: int) -> np.ndarray:
        """Prompt order of an epoch: a permutation seeded by (run seed, epoch)."""
        if epoch not in self._orders:
            count = self._data.num_prompts
            generator = np.random.default_rng([self._seed, epoch])
            order = generator.permutation(count) if self._is_shuffled else np.arange(count)
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = order
        return self._orders[epoch]
