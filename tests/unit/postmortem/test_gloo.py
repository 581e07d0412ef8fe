"""Gloo's messages, as real processes wrote them (torch 2.13 and older)."""

# ruff: noqa: E501 - real lines

from pathlib import Path

import pytest

from relax_hpc.postmortem.diagnose import analyse
from relax_hpc.postmortem.evidence import Event, EventKind
from relax_hpc.postmortem.parse.gloo import PARSERS
from relax_hpc.postmortem.parse.record import records
from relax_hpc.postmortem.verdict import Confidence

TCP = "/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp"
FRAMES = """\
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/home/me/train.py", line 122, in train
[rank{rank}]:     dist.all_reduce(gradient, group=group)
[rank{rank}]:   File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83, in wrapper
[rank{rank}]:     return func(*args, **kwargs)
[rank{rank}]:   File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252, in {op}
[rank{rank}]:     work.wait()
[rank{rank}]: RuntimeError: {error}
"""
TIMEOUT = f"[{TCP}/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"
OLD_TIMEOUT = "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"
RESET = f"[{TCP}/pair.cc:537] Read error [10.0.0.7]:32466: Connection reset by peer. This is typically caused by a remote worker hanging"
CLOSED = f"[{TCP}/pair.cc:553] Connection closed by peer [10.0.0.7]:54695. This is typically caused by a remote worker crashing."
OLD_CLOSED = "[../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [2001:db8::7]:1024"
SIZE = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    f"  what():  [enforce fail at {TCP}/pair.cc:456] op.preamble.length <= op.nbytes. 668 vs 8."
    " Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?\n"
)
LISTENER = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    f"  what():  [enforce fail at {TCP}/listener.cc:63] false. accept: Invalid argument\n"
)


def events(text: str) -> list[Event]:
    lines = list(enumerate(text.splitlines(), 1))
    found = list(records("rank_3.log", lines, 2026))
    return [
        event
        for index, record in enumerate(found)
        for parser in PARSERS
        if any(literal in record.text for literal in parser.literals)
        for event in parser.function(found, index)  # type: ignore[operator]
    ]


def failed(error: str, rank: int = 3, op: str = "all_reduce") -> str:
    return FRAMES.format(rank=rank, op=op, error=error)


@pytest.mark.parametrize(("error", "timeout_s"), [(TIMEOUT, 4.0), (OLD_TIMEOUT, 1800.0)])
def test_time_out(error: str, timeout_s: float) -> None:
    (event,) = events(failed(error))
    assert event.kind == EventKind.COLLECTIVE_TIMEOUT
    assert (event.rank, event.op, event.timeout_s) == (3, "all_reduce", timeout_s)
    assert event.attrs["site"] == "train.py:122 train"


@pytest.mark.parametrize(
    ("error", "peer", "reason"),
    [
        (RESET, "10.0.0.7", "connection reset by peer"),
        (CLOSED, "10.0.0.7", "closed"),
        (OLD_CLOSED, "2001:db8::7", "closed"),
    ],
)
def test_lost_peer(error: str, peer: str, reason: str) -> None:
    (event,) = events(failed(error))
    assert event.kind == EventKind.PEER_LOST
    assert (event.attrs["peer"], event.attrs["reason"]) == (peer, reason)


def test_wrong_size_and_broken_listener() -> None:
    (size,) = events(SIZE)
    assert (size.kind, size.attrs["got"], size.attrs["want"]) == ("collective_mismatch", 668, 8)
    (listener,) = events(LISTENER)
    assert (listener.kind, listener.attrs["where"]) == (EventKind.PEER_LOST, "listener")


def test_other_programs_words_are_not_gloos() -> None:
    assert events("nginx: upstream: Connection closed by peer [10.0.0.7]:443") == []


STEP = "2026-11-29 21:20:01,875 INFO train: step=3 begins\n"


@pytest.mark.parametrize(
    ("logs", "class_", "ranks"),
    [
        ([failed(TIMEOUT, 0), STEP, failed(TIMEOUT, 2)], "missing-rank", [1]),
        ([failed(RESET, 0), failed(CLOSED, 1), STEP], "rank-died", [2]),
        ([failed(TIMEOUT, 0), failed(CLOSED, 1), failed(TIMEOUT, 2)], "straggler", [1]),
        (
            [failed(TIMEOUT, 0), failed(TIMEOUT, 1, "reduce"), failed(TIMEOUT, 2)],
            "op-mismatch",
            [1],
        ),
        ([SIZE, failed(RESET, 1), failed(RESET, 2)], "size-mismatch", [0, 1]),
        ([failed(CLOSED, 0), STEP + LISTENER, failed(CLOSED, 2)], "network-lost", [1]),
    ],
)
def test_who_did_it(tmp_path: Path, logs: list[str], class_: str, ranks: list[int]) -> None:
    for rank, text in enumerate(logs):
        (tmp_path / f"rank_{rank}.log").write_text(text)
    verdict = analyse([str(tmp_path)]).verdict
    assert (verdict.class_, verdict.ranks) == (class_, ranks)
    assert verdict.confidence == Confidence.LIKELY
    assert verdict.alternatives


def test_the_sender_that_failed_elsewhere_in_the_program_is_named(tmp_path: Path) -> None:
    elsewhere = failed(RESET, 2).replace("line 122, in train", "line 300, in evaluate")
    logs = [failed(CLOSED, 0), failed(RESET, 1), elsewhere, SIZE]
    for rank, text in enumerate(logs):
        (tmp_path / f"rank_{rank}.log").write_text(text)
    verdict = analyse([str(tmp_path)]).verdict
    assert (verdict.class_, verdict.ranks) == ("size-mismatch", [2, 3])


def test_nobody_is_blamed_when_all_say_the_same(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank_{rank}.log").write_text(failed(TIMEOUT, rank))
    verdict = analyse([str(tmp_path)]).verdict
    assert (verdict.confidence, verdict.ranks) == (Confidence.UNDETERMINED, [])
