"""Adapters, links, queue pairs, peers that went away."""

from collections import Counter
from collections.abc import Iterator, Sequence

from relax_hpc.postmortem.evidence import Event, EventKind
from relax_hpc.postmortem.facts import Facts
from relax_hpc.postmortem.rules.proposal import (
    ESTABLISHED,
    LIKELY,
    UNDETERMINED,
    Proposal,
    propose,
)

_FLUSHED = 5
_RETRY = (12, 13)
_MEMORY = (1, 2, 4, 6, 8, 9, 10, 11)
"""Local or remote protection, access, length, invalid request: registration, not the link."""


def _host(facts: Facts, address: str) -> str:
    return facts.host_of_address.get(address, address)


def adapters(facts: Facts) -> Iterator[Proposal]:
    """Async events on one node explain what its peers see; adapters that cannot be opened."""
    fatal = facts.of(EventKind.LINK_EVENT, fatal=1)
    opened = [e for e in fatal if e.attrs.get("layer") == "open"]
    if opened:
        hcas = list(dict.fromkeys(str(e.attrs["hca"]) for e in opened if e.attrs["hca"]))
        yield propose(
            51,
            "nic-missing",
            LIKELY,
            f"A node cannot open its adapter {', '.join(hcas) or '(unnamed)'}; others use it.",
            events=opened,
            nodes=[e.node for e in opened if e.node],
            ranks=[r for e in opened if (r := facts.rank(e)) is not None],
            links=[f"{e.node or '?'}:{e.attrs['hca']}" for e in opened if e.attrs["hca"]],
            alternatives=[("network-config", "the name is wrong on all nodes (NCCL_IB_HCA)")],
        )
    down = [e for e in fatal if e.attrs.get("layer") != "open"]
    if not down:
        return
    nodes = list(dict.fromkeys(e.node for e in down if e.node))
    ranks = sorted({r for e in down if (r := facts.rank(e)) is not None})
    many = len(nodes) > 2
    broken = facts.of(EventKind.NET_ERROR)
    yield propose(
        50,
        "nic-fatal",
        ESTABLISHED if not many and (broken or _is_final(down)) else LIKELY,
        f"Adapter event '{down[0].attrs['what']}' "
        f"on {', '.join(nodes[:4]) or 'a node'}; errors of its peers are consequences.",
        events=down + facts.of(EventKind.NET_ERROR)[:4],
        nodes=nodes,
        ranks=ranks,
        links=[f"{e.node or '?'}:{e.attrs['hca']}" for e in down if e.attrs["hca"]],
        alternatives=[("network-lost", "several nodes at once: a switch or the fabric")]
        if many
        else [],
    )


def _is_final(events: Sequence[Event]) -> bool:
    """A port that is down may come back; an adapter after a fatal error does not."""
    return any(w in str(e.attrs["what"]).lower() for e in events for w in ("catastr", "fatal"))


def completions(facts: Facts) -> Iterator[Proposal]:
    """The first error that is not a flush tells; flushes are consequences."""
    errors = [e for e in facts.of(EventKind.NET_ERROR) if "status" in e.attrs]
    causes = [e for e in errors if e.attrs["status"] != _FLUSHED]
    if not causes:
        if errors:
            yield propose(
                59,
                "network-lost",
                UNDETERMINED,
                "Only flushed requests (status 5) are logged: consequences of an error elsewhere.",
                events=errors,
            )
        return
    first = causes[0]
    status = int(str(first.attrs["status"]))
    flushed = [e for e in errors if e.attrs["status"] == _FLUSHED]
    if status in _MEMORY:
        where = f" on {first.node}" if first.node else ""
        yield propose(
            52,
            "rdma-protection",
            LIKELY,
            f"The adapter{where} refused memory (status {status}): registration or "
            f"GPUDirect, not the link.",
            events=[first, *causes[1:3], *flushed[:3]],
            nodes=[first.node] if first.node else [],
            ranks=_own_rank(facts, first),
            alternatives=[("network-retry-exceeded", "the link itself: it would give status 12")],
        )
        return
    same = [e for e in causes if e.attrs["status"] in _RETRY] or causes
    suspect = _common_end(facts, same)
    yield propose(
        53,
        "network-retry-exceeded",
        LIKELY,
        f"{_link(facts, first)}: retries exceeded (status {status}), packets were lost"
        + (f"; {suspect} is an end of all failing links." if suspect else " on this path."),
        events=[*same[:6], *flushed[:3]],
        nodes=[suspect] if suspect else [],
        links=[_link(facts, e) for e in same[:32]],
        alternatives=[("remote-crash", "the peer's process or node died: its own log tells")],
    )


def _own_rank(facts: Facts, event: Event) -> list[int]:
    rank = facts.rank(event)
    return [] if rank is None else [rank]


def _link(facts: Facts, event: Event) -> str:
    attrs = event.attrs
    hca = f":{attrs['hca']}" if attrs.get("hca") else ""
    device = f" GPU {attrs['cuda_device']}" if "cuda_device" in attrs else ""
    local = f"{event.node or 'this node'}{hca}{device}" + (
        f" ({attrs['local_gid']})" if attrs.get("local_gid") else ""
    )
    remote = _host(facts, str(attrs.get("peer") or "?")) + (
        f" ({attrs['remote_gid']})" if attrs.get("remote_gid") else ""
    )
    return f"{local} <-> {remote}"


def _common_end(facts: Facts, events: Sequence[Event]) -> str:
    """The host that is an end of all failing links, if at least three different links fail."""
    pairs = {
        (e.node, _host(facts, str(e.attrs.get("peer") or "")))
        for e in events
        if e.node and e.attrs.get("peer")
    }
    if len(pairs) < 3:
        return ""
    ends = Counter(end for pair in pairs for end in set(pair))
    (best, count), *rest = ends.most_common(2)
    return best if count == len(pairs) and (not rest or rest[0][1] < count) else ""


def queue_pairs(facts: Facts) -> Iterator[Proposal]:
    """ibv_modify_qp and registration calls that failed."""
    modify = facts.of(EventKind.NET_ERROR, call="modify_qp")
    if modify:
        words = str(modify[0].attrs.get("what") or modify[0].attrs.get("errno", "")).lower()
        # "unreachable" is this host's own routing table; a time-out can be anywhere on the way.
        local = (
            "unreachable" in words
            or "no route" in words
            or "invalid" in words
            or modify[0].attrs.get("errno") in (101, 22, 113)
        )
        nodes = [e.node for e in modify if e.node] if local else []
        ranks = sorted({r for e in modify if (r := facts.rank(e)) is not None}) if local else []
        links = [
            f"{e.attrs.get('dev', e.node)} {e.attrs.get('local_gid', '')} "
            f"<-> {e.attrs.get('remote_gid', '')}".strip()
            for e in modify
            if "remote_gid" in e.attrs
        ]
        where = f" on {', '.join(dict.fromkeys(nodes))}" if nodes else ""
        yield propose(
            54,
            "network-config",
            LIKELY,
            f"Queue pairs cannot be connected{where} ({words or 'modify_qp failed'}): "
            f"GID, route or rails do not fit"
            + ("." if local else "; no node is at fault by this."),
            events=modify,
            nodes=nodes,
            ranks=ranks,
            links=links,
            alternatives=[("nic-fatal", "the port at one end is down")],
        )
    other = [
        e for e in facts.of(EventKind.NET_ERROR) if e.attrs.get("call") not in (None, "modify_qp")
    ]
    if other:
        register = other[0].attrs.get("call") == "reg_mr"
        yield propose(
            55,
            "rdma-protection" if register else "nic-fatal",
            LIKELY,
            f"{other[0].attrs.get('call')} "
            f"failed{' on ' + other[0].node if other[0].node else ''} "
            f"({other[0].attrs.get('what')}).",
            events=other,
            nodes=[other[0].node] if other[0].node else [],
        )


def peers(facts: Facts) -> Iterator[Proposal]:
    """Sockets that a peer closed: it died first, unless it is ourselves or everybody aborts."""
    lost = [
        e
        for e in facts.of(EventKind.PEER_LOST)
        if e.attrs.get("layer") in ("nccl", "gloo", "nccl-remote")
    ]
    others = [e for e in lost if e.attrs.get("peer") and not e.attrs.get("self")]
    late = facts.hung()
    if others:
        reporters = {e.node for e in lost if e.node} | {
            str(e.rank) for e in lost if e.rank is not None
        }
        named = Counter(_host(facts, str(e.attrs["peer"])) for e in others)
        silent = [
            name for name in named if name not in reporters and name.split(".")[0] not in reporters
        ]
        suspects = silent or list(named)
        best = max(suspects, key=lambda name: named[name])
        refused = all(e.attrs.get("connect") for e in others)
        dead = [e for e in others if _host(facts, str(e.attrs["peer"])) == best]
        peer_ranks = sorted(
            {int(str(e.attrs["peer_rank"])) for e in dead if "peer_rank" in e.attrs}
        )
        yield propose(
            76 if late else 57,
            "network-config" if refused and not silent else "remote-crash",
            LIKELY,
            f"Peer {best} went away first ({dead[0].attrs.get('what')}); the ranks "
            f"that log this are its victims.",
            events=dead,
            nodes=[best] if not best.isdigit() else [],
            ranks=peer_ranks or facts_ranks(facts, best),
            alternatives=[("network-lost", "the path to it broke while the process lived")],
        )
    elif lost and not late:
        yield propose(
            58,
            "remote-crash",
            UNDETERMINED,
            "A remote process or the network went away; the log does not say which one.",
            events=lost,
        )


def facts_ranks(facts: Facts, node: str) -> list[int]:
    """Ranks on a node, only if there is exactly one (else the node is the culprit, not all)."""
    ranks = [rank for rank, name in facts.node_of_rank.items() if name == node]
    return ranks if len(ranks) == 1 else []


def store(facts: Facts) -> Iterator[Proposal]:
    """TCPStore connections reset: the process that hosts it ended."""
    lost = facts.of(EventKind.PEER_LOST, layer="store")
    if not lost:
        return
    victims = {e.rank for e in lost if e.rank is not None}
    if 0 in victims:  # rank 0 itself complains: then the store is somewhere else
        yield propose(
            77,
            "store-host-died",
            UNDETERMINED,
            "The process that hosts the store went away.",
            events=lost,
        )
        return
    yield propose(
        76 if facts.hung() else 58,
        "store-host-died",
        LIKELY,
        "The store's host (rank 0) went away first; ranks that log this are its victims.",
        events=lost,
        ranks=[0],
        nodes=facts.nodes([0]),
        alternatives=[
            ("network-lost", "the path to rank 0 broke"),
            ("host-oom", "rank 0 was killed for memory"),
        ],
    )


RULES = (adapters, completions, queue_pairs, peers, store)
