"""What the rules look at: events sorted by kind, and the state of every process group."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from relax_hpc.postmortem.evidence import Event, EventKind
from relax_hpc.postmortem.parse.hardware import CONSEQUENCES
from relax_hpc.postmortem.parse.record import MAX_RANK


class Waiter(msgspec.Struct):
    """A rank that timed out (or is stuck) in one operation of one group."""

    rank: int
    seq: int | None = None
    op: str = ""
    num_in: int | None = None
    num_out: int | None = None
    enqueued: int | None = None
    completed: int | None = None
    duration_s: float | None = None
    timeout_s: float | None = None
    group_rank: int | None = None
    is_blocking: bool = False
    events: list[Event] = []

    @property
    def is_synchronous(self) -> bool:
        """The host waited: nothing was enqueued behind the stuck operation."""
        return self.enqueued is not None and self.enqueued == self.seq


class GroupState(msgspec.Struct):
    """All that is known of one process group."""

    uid: str
    name: str = ""
    waiters: dict[int, Waiter] = {}
    idle: dict[int, Event] = {}
    """Ranks whose counters are equal: nothing of this group in flight."""
    observers: dict[int, Event] = {}
    """Ranks that saw a dump signal of another rank and print no counters of their own."""
    signalled: dict[int, Event] = {}
    """Ranks that asked for the dump themselves (they timed out)."""

    @property
    def is_known(self) -> bool:
        """Whether messages name this group; sequence numbers may be compared only then."""
        return self.uid != "?"

    @property
    def is_default(self) -> bool:
        """The group of all ranks."""
        return self.name == "default_pg" or self.uid in ("0", "id0")

    def label(self) -> str:
        """Words for a sentence."""
        name = self.name or (f"group {self.uid.removeprefix('id')}" if self.is_known else "")
        return name or "an unnamed group"


class Facts(msgspec.Struct):
    """Everything the rules may ask."""

    events: list[Event]
    kinds: dict[EventKind, list[Event]]
    groups: dict[str, GroupState]
    vague: dict[int, Event]
    """Ranks that say a collective failed, but not where."""
    world: int | None
    """World size, if some line tells it."""
    node_of_rank: dict[int, str]
    rank_of: dict[tuple[str, int], int]
    """(node, pid) to global rank."""
    host_of_address: dict[str, str]
    phases: list[Event]
    place: dict[int, int] = {}
    """id() of an event to its place in `events`."""
    rank_files: dict[int, str] = {}
    """Logs of one rank each; a rank that says nothing has one, too."""

    def of(self, kind: EventKind, **attrs: object) -> list[Event]:
        """Events of a kind whose attributes have these values, in order."""
        return [
            event
            for event in self.kinds.get(kind, [])
            if all(event.attrs.get(name) == value for name, value in attrs.items())
        ]

    def notes(self, note: str) -> list[Event]:
        """CONFIG_NOTE events of one name."""
        return self.of(EventKind.CONFIG_NOTE, note=note)

    def node(self, rank: int) -> str:
        """Node of a global rank, if known."""
        return self.node_of_rank.get(rank, "")

    def nodes(self, ranks: Iterable[int]) -> list[str]:
        """Nodes of ranks, without doubles, in order."""
        return list(dict.fromkeys(node for rank in ranks if (node := self.node(rank))))

    def rank(self, event: Event) -> int | None:
        """Global rank of an event, by its prefix or by node and pid."""
        if event.rank is not None:
            return event.rank
        return self.rank_of.get((event.node, event.pid)) if event.pid is not None else None

    def after_hang(self, event: Event) -> bool:
        """Whether a rank had already timed out when this happened: then it is an echo."""
        hangs = self.kinds.get(EventKind.COLLECTIVE_TIMEOUT, [])
        return bool(hangs) and self.place[id(event)] > self.place[id(hangs[0])]

    def hung(self) -> bool:
        """Whether any rank reports a time-out, dump signal or stuck watchdog."""
        kinds = (EventKind.COLLECTIVE_TIMEOUT, EventKind.DUMP_SIGNAL, EventKind.HEARTBEAT)
        return any(self.kinds.get(kind) for kind in kinds)


def gather(events: Sequence[Event]) -> Facts:
    """Sort events into facts."""
    kinds: dict[EventKind, list[Event]] = defaultdict(list)
    for event in events:
        kinds[event.kind].append(event)
    facts = Facts(
        events=list(events),
        kinds=dict(kinds),
        groups={},
        vague={},
        world=_world(kinds[EventKind.CONFIG_NOTE]),
        node_of_rank={},
        rank_of={},
        host_of_address={},
        place={id(event): index for index, event in enumerate(events)},
        phases=[e for e in kinds[EventKind.PHASE] if "phase" in e.attrs],
    )
    _places(facts)
    _groups(facts)
    return facts


def _world(notes: Sequence[Event]) -> int | None:
    sizes = [int(str(event.attrs["world"])) for event in notes if "world" in event.attrs]
    sizes += [int(str(event.attrs["nranks"])) for event in notes if "nranks" in event.attrs]
    return max((size for size in sizes if size <= MAX_RANK), default=None)


def _places(facts: Facts) -> None:
    whole = facts.world
    for event in facts.events:
        if event.rank is not None and event.node:
            facts.node_of_rank.setdefault(event.rank, event.node)
            if event.pid is not None:
                facts.rank_of.setdefault((event.node, event.pid), event.rank)
        if "comm_rank" in event.attrs and event.attrs.get("nranks") == whole and event.node:
            rank = int(str(event.attrs["comm_rank"]))
            facts.node_of_rank.setdefault(rank, event.node)
            if event.pid is not None:
                facts.rank_of.setdefault((event.node, event.pid), rank)
        if "ip" in event.attrs:
            facts.host_of_address[str(event.attrs["ip"])] = event.node


def _groups(facts: Facts) -> None:
    named: dict[tuple[int, int], str] = {}
    for event in facts.of(EventKind.WORK_STATUS) + facts.of(EventKind.COLLECTIVE_TIMEOUT):
        if event.rank is not None and event.seq is not None and event.group is not None:
            named.setdefault((event.rank, event.seq), _key(event))
    for event in facts.of(EventKind.COLLECTIVE_TIMEOUT):
        _add_timeout(facts, event, named)
    _adopt_unnamed(facts)
    for event in facts.of(EventKind.WORK_STATUS):
        _add_status(facts, event)
    for event in facts.of(EventKind.DUMP_SIGNAL):
        _add_signal(facts, event)
    _idle_of_late(facts)
    for group in facts.groups.values():
        for rank in group.waiters:
            group.idle.pop(rank, None)
            group.observers.pop(rank, None)
            facts.vague.pop(rank, None)


def _key(event: Event) -> str:
    return "?" if event.group is None else event.group.uid or event.group.name or "?"


def _state(facts: Facts, key: str, event: Event) -> GroupState:
    state = facts.groups.setdefault(key, GroupState(uid=key))
    if event.group is not None and event.group.name and not state.name:
        state.name = event.group.name
    return state


def _add_timeout(facts: Facts, event: Event, named: dict[tuple[int, int], str]) -> None:
    if event.rank is None or event.attrs.get("by") == "gloo":  # rules/gloo.py knows those
        return
    if event.attrs.get("vague"):
        facts.vague.setdefault(event.rank, event)
        return
    key = _key(event)
    if key == "?" and event.seq is not None:
        key = named.get((event.rank, event.seq), "?")
    state = _state(facts, key, event)
    waiter = state.waiters.setdefault(event.rank, Waiter(rank=event.rank))
    waiter.events.append(event)
    if event.seq is not None and waiter.seq is not None and event.seq > waiter.seq:
        return  # several works of a rank time out together; the oldest one is stuck
    same = event.seq == waiter.seq
    waiter.seq = event.seq if event.seq is not None else waiter.seq
    waiter.is_blocking = waiter.is_blocking or bool(event.attrs.get("blocking"))
    for name in ("op", "num_in", "num_out", "duration_s", "timeout_s", "group_rank"):
        value = getattr(event, name)
        if value is not None and value != "":
            setattr(waiter, name, value)
        elif not same and name in ("num_in", "num_out"):
            setattr(waiter, name, None)


def _adopt_unnamed(facts: Facts) -> None:
    """Cut-off logs: a time-out without its group line joins the group where its number waits."""
    unnamed = facts.groups.get("?")
    if unnamed is None:
        return
    for rank, waiter in list(unnamed.waiters.items()):
        homes = [
            state
            for key, state in facts.groups.items()
            if key != "?"
            and rank not in state.waiters
            and any((w.seq, w.op) == (waiter.seq, waiter.op) for w in state.waiters.values())
        ]
        if len(homes) == 1:
            homes[0].waiters[rank] = unnamed.waiters.pop(rank)
    if not unnamed.waiters:
        del facts.groups["?"]


def _add_status(facts: Facts, event: Event) -> None:
    if event.rank is None:
        return
    state = _state(facts, _key(event), event)
    if event.attrs.get("failed") and event.seq is not None:
        waiter = state.waiters.setdefault(event.rank, Waiter(rank=event.rank, seq=event.seq))
        waiter.events.append(event)
        if waiter.seq is None:
            waiter.seq = event.seq
        if waiter.seq == event.seq:
            waiter.enqueued = event.enqueued if event.enqueued is not None else waiter.enqueued
            waiter.completed = event.completed if event.completed is not None else waiter.completed
            waiter.group_rank = event.group_rank
    elif event.enqueued is not None and event.enqueued == event.completed:
        state.idle.setdefault(event.rank, event)


def _add_signal(facts: Facts, event: Event) -> None:
    if event.rank is None:
        return
    state = _state(facts, _key(event), event)
    if event.attrs.get("local"):
        state.signalled.setdefault(event.rank, event)
    if event.enqueued is None:
        if event.attrs.get("observed"):
            state.observers.setdefault(event.rank, event)
    elif event.enqueued == event.completed:
        state.idle.setdefault(event.rank, event)
    elif event.completed is not None:
        waiter = state.waiters.setdefault(event.rank, Waiter(rank=event.rank))
        waiter.events.append(event)
        if waiter.seq is None:
            # The oldest unfinished operation of this group is the next after the completed one.
            waiter.seq = max(event.completed, 0) + 1
        waiter.enqueued = waiter.enqueued if waiter.enqueued is not None else event.enqueued
        waiter.completed = event.completed


def _idle_of_late(facts: Facts) -> None:
    """A rank that later prints counters is no mere observer."""
    for state in facts.groups.values():
        for rank in list(state.observers):
            if rank in state.idle or rank in state.signalled:
                del state.observers[rank]


def is_fatal_fault(event: Event) -> bool:
    """Whether a GPU_FAULT event is a cause rather than noise or a consequence."""
    if str(event.attrs.get("what")) == "aer-corrected":
        return False
    return event.attrs.get("xid") not in CONSEQUENCES


def phase_words(facts: Facts) -> str:
    """Words for a sentence: what the program did last, if that may take long."""
    names = list(dict.fromkeys(str(e.attrs["phase"]) for e in facts.phases[-5:]))
    names = [name for name in names if name in ("checkpoint", "evaluation", "rollout", "data")]
    return f", around {' and '.join(names)}" if names else ""
