"""The SGLang server as a child process: command line, environment, log, life and death."""

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import typing
from pathlib import Path

from relax_hpc.config import Config
from relax_hpc.control.identity import VISIBLE_GPUS, visible_gpus
from relax_hpc.errors import ConfigError, EngineError
from relax_hpc.log import kv
from relax_hpc.rollout import sglang_shm

if typing.TYPE_CHECKING:
    from relax_hpc.control.identity import Identity

log = logging.getLogger(__name__)

PLUGIN = Path(__file__).with_name("sglang_plugin")
LOADER = "relax_sglang.loader.pull"
_OURS = frozenset(
    [
        *("model-path", "tokenizer-path", "dtype", "device", "skip-tokenizer-init", "config"),
        *("host", "port", "api-key", "admin-api-key", "custom-weight-loader"),
        *("tp", "tp-size", "tensor-parallel-size"),
    ]
)
"""Options that `rollout.sglang_args` must not set: the engine depends on them."""
_NOISE = "Ignore import error"
"""SGLang logs one such line for each model that needs a package of another platform."""


def server_arguments(config: Config, model: Path, device: str) -> dict[str, str]:
    """Return the options of the server without port: name -> value, empty for a flag.

    Raises:
        ConfigError: `rollout.sglang_args` names an option that belongs to the engine.
    """
    taken = sorted(set(config.rollout.sglang_args) & _OURS)
    if taken:
        raise ConfigError(f"rollout.sglang_args: {', '.join(taken)} is set by relax_hpc, remove it")
    arguments = {
        "model-path": str(model),
        "load-format": "dummy",  # the weights come from the weight service, never from the folder
        "skip-tokenizer-init": "",
        "skip-server-warmup": "",
        "dtype": config.model.dtype,
        "tp-size": str(config.rollout.engine_tp),
        "sampling-backend": "pytorch",  # the one that knows per-request seeds
        "grammar-backend": "none",
        "custom-weight-loader": LOADER,
        "random-seed": str(config.run.seed),
        "log-level-http": "warning",  # no line per request
        "device": device,
        "host": "127.0.0.1",  # only the rollout loop beside it talks to it
    }
    if device == "cpu":
        arguments["attention-backend"] = "torch_native"
        arguments["max-total-tokens"] = str(config.rollout.max_tokens_in_cache)
    return arguments | {name: str(value) for name, value in config.rollout.sglang_args.items()}


def server_environment(
    config: Config, identity: "Identity", key_file: Path, weights: Path, scratch: Path
) -> dict[str, str]:
    """Return the environment of the server: ours without RELAX_*, plus the plugin's."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("RELAX_")}
    sglang_only = Path(sys.prefix) / "sglang-only"  # packages that nothing else may see
    path = [str(PLUGIN / "path"), str(sglang_only), base.get("PYTHONPATH", "")]
    device = "cuda" if identity.gpus else "cpu"
    own = {
        "PYTHONPATH": os.pathsep.join(entry for entry in path if entry),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(scratch),
        "RELAX_SGLANG": "1",
        "RELAX_SGLANG_DEVICE": device,
        "RELAX_SGLANG_KEY_FILE": str(key_file),
        "RELAX_SGLANG_PARENT": str(os.getpid()),
        "RELAX_SGLANG_WEIGHTS": str(weights),
        VISIBLE_GPUS: ",".join(visible_gpus(identity.gpus, base.get(VISIBLE_GPUS))),
    }
    return base | own | (_cpu_environment(config) if device == "cpu" else {})


def _cpu_environment(config: Config) -> dict[str, str]:
    threads, ranks = config.resources.rollout.cpus_per_rank, config.rollout.engine_tp
    own = {
        "SGLANG_PLATFORM": "relax_cpu",
        "OMP_NUM_THREADS": str(threads),
        "TORCHDYNAMO_DISABLE": "1",  # compiling needs a C++ compiler and a minute, for one hash
        "SGLANG_NCCL_SO_PATH": "/nonexistent",  # where NCCL is installed, TP would try it on a CPU
    }
    if ranks > 1:  # without it SGLang wants one NUMA node for each rank
        cpus = sorted(os.sched_getaffinity(0))
        own["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            ",".join(str(cpus[(rank * threads + i) % len(cpus)]) for i in range(threads))
            for rank in range(ranks)
        )
    return own


def free_port() -> int:
    """Return a port that was free just now; the caller retries when somebody was faster."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclasses.dataclass(slots=True, eq=False)
class ServerProcess:
    """A running server in its own session. It dies with this process (launch.py), or in `kill`."""

    process: asyncio.subprocess.Process
    port: int
    log_file: Path
    shm_record: Path
    """Names of its shared memory, for `kill` and for the next incarnation of the engine."""

    @classmethod
    async def spawn(
        cls,
        arguments: dict[str, str],
        environment: dict[str, str],
        log_file: Path,
        shm_record: Path,
    ) -> "ServerProcess":
        """Start a server on a free port; its output is appended to `log_file`.

        What an older server, which is dead, left in shared memory is removed first.

        Call it from a thread that lives as long as the server: the kernel ends the server when the
        thread that started it ends (prctl(2), PR_SET_PDEATHSIG).
        """
        sglang_shm.remove(shm_record)
        port = free_port()
        command = [sys.executable, str(PLUGIN / "launch.py"), "--port", str(port)]
        for name, value in arguments.items():
            command += [f"--{name}", value] if value else [f"--{name}"]
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        log.info("sglang server started %s", kv(pid=process.pid, port=port, log=log_file))
        return cls(process, port, log_file, shm_record)

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the main process runs."""
        return self.process.returncode is None

    @property
    def port_was_taken(self) -> bool:
        """Whether the server ended because another process had one of its ports."""
        return not self.alive and "address already in use" in self.last_lines(60).lower()

    def last_lines(self, count: int = 15) -> str:
        """Return the end of the server's log for an error message."""
        try:
            with self.log_file.open(encoding="utf-8", errors="replace") as file:
                lines = collections.deque((x for x in file if _NOISE not in x), maxlen=count)
        except OSError as err:
            return f"(log {self.log_file} cannot be read: {err})"
        return "".join(lines).rstrip()

    def note_shared_memory(self) -> None:
        """Write down what it has mapped by now, for the case that it, or we, are killed."""
        try:
            sglang_shm.note(self.shm_record, self.process.pid)
        except OSError as err:  # a full /dev/shm; the server will tell
            log.warning("shared memory not noted %s", kv(record=self.shm_record, reason=err))

    async def kill(self, deadline_s: float = 20.0) -> None:
        """SIGKILL the server's process group and reap it; there is no state worth a goodbye.

        Its shared memory is removed.

        Raises:
            EngineError: it is still there at the deadline (uninterruptible sleep of a driver).
        """
        await asyncio.to_thread(self.note_shared_memory)
        with contextlib.suppress(ProcessLookupError):  # the whole group is gone already
            os.killpg(self.process.pid, signal.SIGKILL)  # session leader: pid == group id
        try:
            await asyncio.wait_for(self.process.wait(), deadline_s)
        except TimeoutError as err:
            raise EngineError(
                f"sglang server pid {self.process.pid} survived SIGKILL for {deadline_s} s: "
                "look at it with ps and dmesg, the node may need a reboot"
            ) from err
        sglang_shm.remove(self.shm_record)


def scratch_folder(owner: Path) -> Path:
    """Make an empty, private folder for the server's sockets; its path is short (limit 108 bytes).

    The name follows from `owner`, so that the next incarnation removes what a killed one left.

    Raises:
        EngineError: the folder cannot be made, or is not ours.
    """
    digest = hashlib.sha256(str(owner).encode()).hexdigest()[:12]
    path = Path(tempfile.gettempdir()) / f"relax-sgl-{os.getuid()}-{digest}"
    shutil.rmtree(path, ignore_errors=True)
    try:
        path.mkdir(mode=0o700)  # fails where something of another user is in the way
    except OSError as err:
        raise EngineError(f"scratch folder of the sglang server: {err}; remove {path}") from err
    return path
