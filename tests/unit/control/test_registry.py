"""Registry: joins, progress, keys over a restart, replaced incarnations."""

import dataclasses
import threading
from pathlib import Path

import pytest

from relax_hpc.control.heartbeat import Heartbeat
from relax_hpc.control.identity import Identity, observer_identity
from relax_hpc.control.registry import SERVICE, Membership, Registry, members
from relax_hpc.control.rpc import RpcClient, RpcServer, create_keys
from relax_hpc.errors import DeadlineError, StaleIncarnationError
from relax_hpc.runfolder import RunFolder, create_run_folder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = create_run_folder(tmp_path, "run")
    create_keys(run)
    return run


def _identity(folder: RunFolder, **changes: object) -> Identity:
    base = Identity(run=folder, role="rollout", node="n1", address_prefix="127.")
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def _serve(folder: RunFolder, **changes: object) -> RpcServer:
    identity = _identity(folder, role="dcs", **changes)
    server = RpcServer(folder, SERVICE, identity)
    Registry(server, identity)
    server.start_thread()
    return server


def test_members_and_progress(folder: RunFolder) -> None:
    server = _serve(folder)
    first, second = (
        Membership(_identity(folder, index=i, node=f"n{i}", incarnation=i + 1)) for i in (0, 1)
    )
    first.report(step=3, phase="generate")
    first.join({"http": "127.0.0.1:5"})
    second.join()
    observer = RpcClient(folder, SERVICE, observer_identity(folder))
    found = members(observer)
    assert [(m.role, m.index, m.node, m.incarnation) for m in found] == [
        ("rollout", 0, "n0", 1),
        ("rollout", 1, "n1", 2),
    ]
    assert found[0].progress == {"step": 3, "phase": "generate"}
    assert found[0].address_info == {"http": "127.0.0.1:5"}
    assert 0 <= found[0].last_seen_s < 60
    second.leave()
    assert [m.index for m in members(observer)] == [0]
    first.leave()
    server.stop()


def test_a_newer_incarnation_replaces_the_older(folder: RunFolder) -> None:
    server = _serve(folder)
    old, new = (Membership(_identity(folder, incarnation=i)) for i in (1, 2))
    old.join()
    new.join()
    observer = RpcClient(folder, SERVICE, observer_identity(folder))
    assert [m.incarnation for m in members(observer)] == [2]
    with pytest.raises(StaleIncarnationError):
        old.publish("k", "v")
    assert old._heartbeat is not None
    old._heartbeat._thread.join(30)
    assert old.is_replaced and not new.is_replaced
    new.leave()
    server.stop()


def test_keys_wake_waiters_and_survive_a_restart(folder: RunFolder) -> None:
    server = _serve(folder)
    member = Membership(_identity(folder))
    found: list[str] = []
    waiter = threading.Thread(
        target=lambda: found.append(member.wait_for("train/1/store", 60, "rendezvous"))
    )
    waiter.start()
    member.publish("other", "x")
    server.stop()
    again = _serve(folder, incarnation=2)
    member.publish("train/1/store", "127.0.0.1:99")
    waiter.join()
    assert found == ["127.0.0.1:99"]
    assert member.wait_for("other", 10, "kept") == "x"
    with pytest.raises(DeadlineError, match=r"'nothing' in 0\.2 s \(test\)"):
        member.wait_for("nothing", 0.2, "test")
    again.stop()


def test_members_come_back_after_a_restart_of_the_service(folder: RunFolder) -> None:
    server = _serve(folder)
    member = Membership(_identity(folder))
    member.join({"a": "b"})
    server.stop()
    again = _serve(folder, incarnation=2)
    observer = RpcClient(folder, SERVICE, observer_identity(folder))
    for _ in range(200):
        found = members(observer)
        if found:
            break
        threading.Event().wait(0.1)
    assert found[0].address_info == {"a": "b"}
    member.leave()
    again.stop()


def test_a_failing_beat_does_not_end_the_thread() -> None:
    enough = threading.Event()
    calls: list[int] = []

    def beat() -> None:
        calls.append(1)
        if len(calls) >= 3:
            enough.set()
        raise DeadlineError("service is away")

    heartbeat = Heartbeat(beat, interval_s=0.01)
    heartbeat.start()
    assert enough.wait(30)
    heartbeat.stop()
