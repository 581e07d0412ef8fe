"""The way between two nodes, over loopback."""

import concurrent.futures
import secrets
import socket
from collections.abc import Iterator

import pytest

from relax_hpc.steps import preflight_pair
from relax_hpc.steps.preflight_pair import PairListener, measure_pair
from relax_hpc.topology.node_report import TOKEN_BYTES, Measured, PairTold


@pytest.fixture
def listener() -> Iterator[PairListener]:
    made = PairListener("127.0.0.1")
    yield made
    made.close()


def pair(listener: PairListener, *, leads: bool, token: bytes) -> PairTold:
    return PairTold(
        rank=0 if leads else 1,
        address="127.0.0.1",
        port=listener.port,
        is_leader=leads,
        token=token,
    )


def measure(
    listener: PairListener, leader_token: bytes, token: bytes
) -> tuple[Measured | None, Measured | None]:
    """Both ends, in two threads."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        lead = pool.submit(
            measure_pair, 1, 0, pair(listener, leads=True, token=leader_token), listener
        )
        answer = pool.submit(measure_pair, 0, 0, pair(listener, leads=False, token=token), listener)
        return lead.result(), answer.result()


def test_both_ends_of_a_pair(listener: PairListener) -> None:
    token = secrets.token_bytes(TOKEN_BYTES)
    lead, answer = measure(listener, token, token)
    assert answer is None
    assert lead is not None
    assert (lead.rank, lead.peer, lead.fault) == (1, 0, "")
    assert lead.latency_us > 0
    assert lead.gbytes_per_s > 0


def test_a_partner_of_a_later_round_waits_its_turn(listener: PairListener) -> None:
    tokens = [secrets.token_bytes(TOKEN_BYTES) for _ in range(2)]
    early = socket.create_connection(("127.0.0.1", listener.port))
    early.sendall(tokens[1])
    lead, answer = measure(listener, tokens[0], tokens[0])
    assert lead is not None
    assert (lead.fault, answer) == ("", None)
    with early, listener.accept(tokens[1]) as kept:
        kept.sendall(b"x")
        assert preflight_pair.receive(early, 1) == b"x"


def test_a_partner_that_does_not_come_is_a_fault(
    listener: PairListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight_pair, "PAIR_TIMEOUT_S", 0.2)
    gone = measure_pair(0, 2, pair(listener, leads=False, token=bytes(TOKEN_BYTES)), listener)
    assert gone is not None
    assert "TimeoutError" in gone.fault
    port = listener.port
    listener.close()
    away = PairTold(rank=1, address="127.0.0.1", port=port, is_leader=True, token=b"x" * 16)
    refused = measure_pair(0, 2, away, listener)
    assert refused is not None
    assert "ConnectionRefusedError" in refused.fault


@pytest.mark.parametrize("word", [b"x", b"d\xff\xff\xff\xff"])
def test_what_no_partner_says_ends_the_connection(word: bytes) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(word)
        with pytest.raises(OSError, match="the partner"):
            preflight_pair.answer(right)
