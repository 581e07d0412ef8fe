"""The prompt ledger: which prompt was dispatched, trained, dropped, or is to be dispatched again.

Every (epoch, prompt) is at any moment in exactly one place: ahead of the cursor, in flight, in the
list of those to dispatch again, trained in a step, or dropped. Copies of one prompt have different
uids `EPOCH.INDEX.K`, K counting its dispatches; an uid is never used twice in a run.
"""

from collections.abc import Iterable

import msgspec
import numpy as np

from relax_hpc.errors import TransferError


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """One dispatch of one prompt."""

    epoch: int
    prompt_index: int
    k: int

    @property
    def uid(self) -> str:
        """Unique id of the dispatch."""
        return f"{self.epoch}.{self.prompt_index}.{self.k}"

    def again(self) -> "Ticket":
        """The same prompt's next dispatch."""
        return Ticket(self.epoch, self.prompt_index, self.k + 1)


def ticket_of(uid: str) -> Ticket:
    """Parse an uid."""
    parts = uid.split(".")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        raise TransferError(f"uid {uid!r}: must be EPOCH.INDEX.K")
    return Ticket(*(int(part) for part in parts))


class LedgerData(msgspec.Struct):
    """What is kept over restarts."""

    num_prompts: int = 0
    """0 until the data set is known."""
    fingerprint: str = ""
    position: int = 0
    """Prompts taken from the cursor so far, over epochs."""
    again: list[Ticket] = msgspec.field(default_factory=list)
    """To dispatch before the cursor goes on, in order."""
    trained: dict[int, list[str]] = msgspec.field(default_factory=dict)
    """Group uids by train step, in the order of their chunks."""
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
    redispatched: dict[str, int] = msgspec.field(default_factory=dict)


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
        return sum(len(uids) for uids in self._data.trained.values())

    def peek(self, num_prompts: int) -> tuple[list[Ticket], int]:
        """Return the next tickets, and how many of them are second dispatches."""
        data = self._data
        tickets = data.again[:num_prompts]
        num_again = len(tickets)
        for position in range(data.position, data.position + num_prompts - num_again):
            epoch, place = divmod(position, data.num_prompts)
            tickets.append(Ticket(epoch, int(self._order(epoch)[place]), 0))
        return tickets, num_again

    def advance(self, num_tickets: int, num_again: int) -> None:
        """Take what `peek` returned."""
        del self._data.again[:num_again]
        self._data.position += num_tickets - num_again

    def dispatch_again(self, tickets: Iterable[Ticket], reason: str, is_first: bool) -> None:
        """Put prompts into the list of those to dispatch again, under new uids."""
        data = self._data
        again = [ticket.again() for ticket in tickets]
        data.again = [*again, *data.again] if is_first else [*data.again, *again]
        if again:
            data.redispatched[reason] = data.redispatched.get(reason, 0) + len(again)

    def drop(self, reason: str) -> None:
        """Count a prompt that was used up without being trained."""
        self._data.dropped[reason] = self._data.dropped.get(reason, 0) + 1

    def train(self, step: int, uids: list[str]) -> None:
        """Record what a step consumed."""
        self._data.trained[step] = uids

    def untrain(self, step: int) -> list[Ticket]:
        """Forget steps >= `step` and return their prompts in the order of training."""
        tickets = []
        for later in sorted(s for s in self._data.trained if s >= step):
            tickets += [ticket_of(uid) for uid in self._data.trained.pop(later)]
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
