"""Life and death of a real server: owner killed, server killed, what other users can see."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from relax_hpc.errors import EngineError
from relax_hpc.rollout import sglang_shm, sglang_weights
from relax_hpc.rollout.sglang_server import SglangEngine
from relax_hpc.runfolder import RunFolder
from tests.conformance import engines
from tests.sglang.beds import bed_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

OWNER = """
import asyncio, sys
from pathlib import Path
from tests.sglang.beds import maker

async def main():
    engine = maker(Path(sys.argv[1]), Path(sys.argv[2]))()
    await engine.start()
    print(engine.server_pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engines.make_model(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture
def owner(tmp_path: Path, model: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that owns an engine, like a rollout step."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), str(model)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate(timeout=60)
    for run in tmp_path.glob("sgl-*"):
        shutil.rmtree(RunFolder(run).shm("n01"), ignore_errors=True)


def is_gone(process: psutil.Process) -> bool:
    try:  # an init that reaps nothing leaves zombies behind
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(processes: list[psutil.Process], deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while not all(is_gone(p) for p in processes):
        assert time.monotonic() < end, [p for p in processes if not is_gone(p)]
        time.sleep(0.1)


def test_nothing_outlives_a_killed_owner(owner: subprocess.Popen[str], tmp_path: Path) -> None:
    assert owner.stdout is not None
    server = psutil.Process(int(owner.stdout.readline()))
    processes = [server, *server.children(recursive=True)]
    assert len(processes) >= 3  # main, scheduler, detokenizer
    owner.send_signal(signal.SIGKILL)
    wait_until_gone(processes)
    (run,) = tmp_path.glob("sgl-*")
    (record,) = RunFolder(run).shm("n01").glob(sglang_shm.RECORDS)
    segments = [Path(line) for line in record.read_text().splitlines()]
    assert segments and all(path.exists() for path in segments)
    sglang_shm.remove(record)  # as the next incarnation does, or the dcs step at the end
    assert not any(path.exists() for path in segments)


def status_of(url: str, key: str = "") -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as err:
        return err.code


def check_the_key(engine: SglangEngine, folder: Path) -> None:
    """Not in the command line of any process, not in a log; the file is private; it is needed."""
    server = engine._server
    assert server is not None
    main = psutil.Process(server.process.pid)
    for process in (main, *main.children(recursive=True)):
        assert engine._key not in " ".join(process.cmdline())
    (log_file,) = folder.glob("sgl-1/logs/attempt_1/rollout/sglang-0.1.log")
    text = log_file.read_text(errors="replace")
    assert "server_args" in text and engine._key not in text
    (key_file,) = folder.glob("sgl-1/secret/sglang-0.key")
    assert key_file.stat().st_mode & 0o777 == 0o600
    url = f"{server.url}/get_model_info"
    assert [status_of(url), status_of(url, "wrong"), status_of(url, engine._key)] == [401, 401, 200]


def test_key_then_a_server_that_dies(tmp_path: Path, model: Path) -> None:
    """Running requests fail with the cause, and the engine says that it is not healthy."""
    bed = bed_of(tmp_path, model)
    segments: set[str] = set()

    async def check(bed: engines.EngineBed) -> None:
        engine = bed.engine
        assert isinstance(engine, SglangEngine)
        await bed.serve(0)
        assert engine.server_pid is not None
        segments.update(sglang_shm.mapped_by(engine.server_pid))
        await asyncio.to_thread(check_the_key, engine, tmp_path)
        assert await engine.healthy()
        running = asyncio.create_task(bed.generate(engines.prompt(5), max_new_tokens=900))
        await asyncio.sleep(0.1)
        main = psutil.Process(engine.server_pid)
        scheduler = next(p for p in main.children() if "sched" in " ".join(p.cmdline()))
        os.kill(scheduler.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="end of"):
            await asyncio.wait_for(running, 60)
        assert not await engine.healthy()
        for call in (bed.generate(engines.prompt(5)), bed.serve(1)):
            with pytest.raises(EngineError):
                await call

    try:
        bed.run(check)
    finally:
        bed.close()
    assert not list(tmp_path.glob("sgl-1/**/*.safetensors"))
    assert segments and not any(Path(path).exists() for path in segments)


def test_damaged_weights_break_the_engine(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits that change on the way are found by the checksum, and nothing is served after it."""
    bed = bed_of(tmp_path, model)

    async def check(bed: engines.EngineBed) -> None:
        await bed.serve(0)
        tensors = bed.tensors(1)
        write = sglang_weights.write_version

        def damaged(*args: object) -> Path:
            path = write(*args)  # type: ignore[arg-type]
            with path.open("r+b") as file:
                file.seek(-5, os.SEEK_END)
                byte = file.read(1)
                file.seek(-5, os.SEEK_END)
                file.write(bytes([byte[0] ^ 1]))
            return path

        monkeypatch.setattr(sglang_weights, "write_version", damaged)
        with pytest.raises(EngineError, match="does not hold what was sent"):
            await bed.engine.update_weights(1, tensors)
        assert bed.engine.version == 0
        assert not await bed.engine.healthy()
        with pytest.raises(EngineError, match="update to version 1 failed"):
            await bed.generate(engines.prompt(5))

    with contextlib.closing(bed):
        bed.run(check)
