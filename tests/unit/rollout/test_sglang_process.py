"""Command line, environment and death of the server process, with a stub instead of SGLang."""

import asyncio
import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_hpc.errors import ConfigError, EngineError
from relax_hpc.rollout import sglang_process, sglang_server, sglang_shm
from relax_hpc.rollout.sglang_process import ServerProcess, server_arguments, server_environment
from tests.conformance import engines
from tests.sglang.beds import config_of, identity_of

STUB = """
import os, subprocess, sys, time
print("Ignore import error when loading x", flush=True)
print("line", sys.argv, flush=True)
if mode == "busy": sys.exit(print("OSError: [Errno 98] Address already in use") or 1)
if mode == "crash": sys.exit(print("ValueError: no such thing") or 3)
import mmap, pathlib
for name in os.environ.get("STUB_SHM", "").split():
    path = pathlib.Path("/dev/shm") / name
    path.write_bytes(bytes(4096))
    mapped = mmap.mmap(os.open(path, os.O_RDWR), 4096)
    globals()["keep " + name] = mapped
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(mode: str) -> None:
        (tmp_path / "launch.py").write_text(f"mode = {mode!r}\n" + STUB)
        monkeypatch.setattr(sglang_process, "PLUGIN", tmp_path)

    return install


def test_arguments_of_a_cpu_and_a_gpu_engine(tmp_path: Path) -> None:
    given = {"attention-backend": "fa3", "log-requests": "", "mem-fraction-static": 0.4}
    config = config_of(tmp_path, tp=2, sglang_args=given)
    cpu = server_arguments(config, tmp_path / "m", "cpu")
    assert (cpu["tp-size"], cpu["model-path"]) == ("2", str(tmp_path / "m"))
    assert (cpu["attention-backend"], cpu["log-requests"]) == ("fa3", "")
    assert cpu["mem-fraction-static"] == "0.4"
    assert cpu["max-total-tokens"] == "20000"
    assert "max-total-tokens" not in server_arguments(config, tmp_path, "cuda")


@pytest.mark.parametrize("name", ["api-key", "port", "custom-weight-loader", "tp-size"])
def test_options_that_the_engine_needs_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        server_arguments(config_of(tmp_path, sglang_args={name: "1"}), tmp_path, "cpu")


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_RUN", "/somewhere")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 6, 8})
    config, identity = config_of(tmp_path, tp=2), identity_of(tmp_path)
    got = server_environment(config, identity, tmp_path / "key", tmp_path, tmp_path)
    assert "RELAX_RUN" not in got
    path = got["PYTHONPATH"].split(os.pathsep)
    assert path[0].endswith("sglang_plugin/path")
    assert path[1:] == [str(Path(sys.prefix) / "sglang-only"), "/mine"]
    assert got["SGLANG_CPU_OMP_THREADS_BIND"] == "4|6"
    assert (got["RELAX_SGLANG_DEVICE"], got["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")


def test_gpus_count_among_those_that_the_step_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    identity = dataclasses.replace(identity_of(tmp_path), gpus=(1, 2))
    config = config_of(tmp_path, tp=2)
    got = server_environment(config, identity, tmp_path / "key", tmp_path, tmp_path)
    assert (got["RELAX_SGLANG_DEVICE"], got["CUDA_VISIBLE_DEVICES"]) == ("cuda", "5,6")


async def spawn(tmp_path: Path, **environment: str) -> ServerProcess:
    return await ServerProcess.spawn(
        {"a": "1", "flag": ""},
        {**os.environ, **environment},
        tmp_path / "l",
        tmp_path / "shared-memory",
    )


async def wait_for_child(server: ServerProcess) -> None:
    async with asyncio.timeout(30):
        while "child" not in server.last_lines():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("end", ["kill", "crash", "next incarnation"])
def test_shared_memory_of_a_dead_server_is_removed(stub: Any, tmp_path: Path, end: str) -> None:
    stub("run")
    names = [f"sglang_loads_{os.getpid()}_x.shm", f"sgl_shm_mq_{os.getpid()}_0"]
    other = Path("/dev/shm") / f"sgl_shm_mq_{os.getpid()}_other"  # of somebody else's server
    other.touch()

    async def check() -> None:
        server = await spawn(tmp_path, STUB_SHM=" ".join(names))
        await wait_for_child(server)
        if end != "kill":
            server.note_shared_memory()
            os.killpg(server.process.pid, signal.SIGKILL)
            await server.process.wait()
        assert all((Path("/dev/shm") / name).exists() for name in names)
        if end == "next incarnation":
            server = await spawn(tmp_path)
        else:
            await server.kill()
        assert not any((Path("/dev/shm") / name).exists() for name in names)
        assert other.exists()
        await server.kill()
        assert not (tmp_path / "shared-memory").exists()

    try:
        asyncio.run(check())
    finally:
        for name in (*names, other.name):
            (Path("/dev/shm") / name).unlink(missing_ok=True)


def test_a_record_removes_nothing_else(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    record = tmp_path / "record"
    record.write_text(f"{victim}\n/dev/shm/sgl_shm_mq/../{victim}\n\n")
    sglang_shm.remove(record)
    assert victim.exists() and not record.exists()


def test_kill_takes_the_whole_group(stub: Any, tmp_path: Path) -> None:
    stub("run")

    async def check() -> None:
        server = await spawn(tmp_path)
        async with asyncio.timeout(30):
            while "child" not in server.last_lines():
                await asyncio.sleep(0.05)
        child = int(server.last_lines().split("child ")[1])
        assert os.getsid(child) == server.process.pid
        await server.kill()
        await server.kill()
        assert not server.alive
        async with asyncio.timeout(10):
            while is_running(child):
                await asyncio.sleep(0.05)
        lines = server.last_lines()
        assert "Ignore import" not in lines and "'--a', '1', '--flag'" in lines

    asyncio.run(check())


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("mode", ["busy", "crash"])
def test_a_server_that_ends_at_its_start(stub: Any, tmp_path: Path, mode: str) -> None:
    """A taken port is tried again, anything else is reported at once, with the end of the log."""
    stub(mode)
    model = engines.make_model(tmp_path / "model")
    engine = sglang_server.SglangEngine(config_of(model), identity_of(tmp_path))
    expected = "already in use" if mode == "busy" else "no such thing"
    with pytest.raises(EngineError, match=expected):
        asyncio.run(engine.start())
    (log_file,) = tmp_path.glob("sgl-1/logs/attempt_1/rollout/*.log")
    tries = log_file.read_text().count("line")
    assert tries == (sglang_server.START_TRIES if mode == "busy" else 1)
    assert not engine._folder.exists()
    engine._folder.parent.rmdir()


def test_a_server_that_never_answers(stub: Any, tmp_path: Path) -> None:
    stub("run")
    model = engines.make_model(tmp_path / "model")
    config = config_of(model)
    object.__setattr__(config.recovery, "start_timeout_s", 1.0)
    engine = sglang_server.SglangEngine(config, identity_of(tmp_path))
    with pytest.raises(EngineError, match=r"did not generate within 1\.0 s"):
        asyncio.run(engine.start())
    assert engine._server is not None and not engine._server.alive
    engine._folder.parent.rmdir()


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    engine = sglang_server.SglangEngine(config_of(tmp_path / "none"), identity_of(tmp_path))
    with pytest.raises(EngineError, match="none"):
        asyncio.run(engine.start())


def test_scratch_folder_is_short_private_and_emptied(tmp_path: Path) -> None:
    first = sglang_process.scratch_folder(tmp_path)
    (first / "socket").touch()
    assert sglang_process.scratch_folder(tmp_path) == first
    assert list(first.iterdir()) == []
    assert first.stat().st_mode & 0o777 == 0o700
    assert len(str(first)) < 60
    assert sglang_process.scratch_folder(tmp_path / "other") != first
    for path in (first, sglang_process.scratch_folder(tmp_path / "other")):
        path.rmdir()


def test_a_scratch_folder_that_is_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_process.tempfile, "gettempdir", lambda: str(tmp_path))
    path = sglang_process.scratch_folder(tmp_path)
    path.rmdir()
    path.symlink_to(tmp_path)
    with pytest.raises(EngineError, match="remove"):
        sglang_process.scratch_folder(tmp_path)


@pytest.mark.parametrize("changes", [{"world": 2}, {"gpus": (0, 1, 2)}])
def test_an_engine_in_the_wrong_place(tmp_path: Path, changes: dict[str, Any]) -> None:
    identity = dataclasses.replace(identity_of(tmp_path), **changes)
    with pytest.raises(ConfigError, match="engine_tp=2"):
        sglang_server.SglangEngine(config_of(tmp_path, tp=2), identity)
