"""Starting the daemons and waiting until they answer."""

import os
import re
import subprocess
from collections.abc import Callable

from local_slurm.files import user_name
from local_slurm.packages import search_path
from local_slurm.process import ClusterError, wait_until
from local_slurm.state import DEADLINE_S, MARK, Shape, State, tail


def daemon_environment(state: State) -> dict[str, str]:
    """A clean environment: what slurmd has is what every job's prolog and slurmstepd get."""
    keep = {k: v for k, v in os.environ.items() if k in ("HOME", "LANG", "USER", "LOGNAME", "TZ")}
    return {**keep, "PATH": search_path(), "SLURM_CONF": str(state.conf), MARK: str(state.path)}


def start_daemon(state: State, name: str, command: list[str], **more: str) -> int:
    """Start a daemon in the foreground of its own session, so that its pid is known at once."""
    with (state.log / f"{name}.out").open("ab") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**daemon_environment(state), **more},
            cwd=state.path,
            start_new_session=True,
        )
    state.remember(name, process.pid)
    return process.pid


def commands_of(state: State, shape: Shape) -> dict[str, list[str]]:
    """Daemon -> command line, in the order of starting (database and slurmdbd: see accounting)."""
    munged = ["munged", "--foreground", "--force", "--origin=127.0.0.1", f"--socket={state.socket}"]
    munged += [f"--key-file={state.path}/munge.key", f"--seed-file={state.path}/run/munged.seed"]
    munged += [f"--pid-file={state.path}/run/munged.pid", f"--log-file={state.log}/munged.log"]
    commands = {"munged": munged, "slurmctld": ["slurmctld", "-D", "-f", str(state.conf)]}
    for name in shape.node_names:
        commands[f"slurmd.{name}"] = ["slurmd", "-D", "-N", name, "-f", str(state.conf)]
    return commands


def start_cluster(state: State, shape: Shape) -> None:
    """Start what does not run, each after what it needs, and wait until all nodes answer."""
    for name, command in commands_of(state, shape).items():
        if name == "slurmctld" and shape.accounting:
            start_accounting(state)
        if name not in state.recorded():
            start_daemon(state, name, command)
        if name == "munged":
            wait_for(state, "munged", lambda: munged_answers(state))
        elif name == "slurmctld":
            wait_for(state, "slurmctld", lambda: run_slurm(state, "scontrol", "ping")[0] == 0)
    wait_for(state, "slurmd.", lambda: not silent_nodes(state, shape))


def munged_answers(state: State) -> bool:
    """The socket file alone proves nothing: it outlives a killed munged."""
    return run_slurm(state, "munge", "--no-input", f"--socket={state.socket}")[0] == 0


def wait_for(state: State, name: str, ready: Callable[[], bool]) -> None:
    """Wait until `ready`, but not longer than the deadline nor than the daemons live."""
    started = {n for n in expected_daemons(state) if n.startswith(name)}

    def settled() -> bool:
        return ready() or not started <= set(state.recorded())

    in_time = wait_until(settled, DEADLINE_S)
    dead = sorted(started - set(state.recorded()))
    if not in_time or dead:
        what = f"{', '.join(dead)} ended" if dead else f"{name} not ready after {DEADLINE_S:g} s"
        if name == "slurmd." and not dead:
            what += f" (sinfo says: {node_states(state)})"
        logs = [path for path in state.log.iterdir() if path.name.startswith((dead or [name])[0])]
        text = "\n".join(tail(path) for path in sorted(logs)[:6])
        raise ClusterError(f"{what}; state folder {state.path}; its log says:\n{text}")


def expected_daemons(state: State) -> list[str]:
    shape = state.shape()
    if shape is None:
        return []
    more = ["mariadbd", "slurmdbd"] if shape.accounting else []
    return [*more, *commands_of(state, shape)]


def run_slurm(state: State, *command: str) -> tuple[int, str]:
    """Run a command against this cluster. Returns: its exit code (1 at a time-out) and output."""
    try:
        done = subprocess.run(
            command,
            env=daemon_environment(state),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if command[0] == "mariadb-install-db" else subprocess.DEVNULL,
            text=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, ""
    return done.returncode, done.stdout.strip()


def node_states(state: State) -> dict[str, str]:
    """Node -> state as sinfo says; a `*` behind it means that its slurmd does not answer."""
    _, text = run_slurm(state, "sinfo", "-h", "-N", "-o", "%N %T")
    return dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)


def silent_nodes(state: State, shape: Shape) -> list[str]:
    """Nodes whose slurmd does not answer, or that Slurm takes for down."""
    good = re.compile(r"(idle|mixed|allocated|completing|planned|draining|drained|reserved)[+-]?$")
    states = node_states(state)
    return [name for name in shape.node_names if not good.match(states.get(name, "absent"))]


def start_accounting(state: State) -> None:
    """Start mariadbd (socket only) and slurmdbd, then make the cluster known to them."""
    data, sock = state.path / "mysql", state.run / "mysql.socket"
    who = f"--user={user_name()}"
    if not data.exists():
        install = ["mariadb-install-db", "--no-defaults", f"--datadir={data}", who]
        quick = ["--auth-root-authentication-method=socket", "--skip-test-db"]
        code, text = run_slurm(state, *install, *quick, f"--auth-root-socket-user={user_name()}")
        if code != 0:
            raise ClusterError(f"mariadb-install-db failed in {data}:\n{text[-2000:]}")
    if "mariadbd" not in state.recorded():
        options = ["--no-defaults", f"--datadir={data}", f"--socket={sock}", "--skip-networking"]
        # Small: this database serves one test cluster.
        size = ["--innodb-buffer-pool-size=64M", f"--log-error={state.log}/mariadbd.log"]
        start_daemon(state, "mariadbd", ["mariadbd", *options, *size, who])
        wait_for(state, "mariadbd", lambda: run_mysql(state, "select 1") == 0)
        run_mysql(state, "create database if not exists slurm_acct_db")
    if "slurmdbd" not in state.recorded():
        write_slurmdbd_conf(state)
        start_daemon(state, "slurmdbd", ["slurmdbd", "-D"], MYSQL_UNIX_PORT=str(sock))
        wait_for(state, "slurmdbd", lambda: knows_cluster(state))


def knows_cluster(state: State) -> bool:
    """Register the cluster; adding it twice is harmless."""
    run_slurm(state, "sacctmgr", "-i", "add", "cluster", "relax")
    return run_slurm(state, "sacctmgr", "-n", "show", "cluster", "format=cluster")[1] == "relax"


def run_mysql(state: State, statement: str) -> int:
    command = ["mariadb", "--no-defaults", f"--socket={state.run}/mysql.socket", "-u"]
    return run_slurm(state, *command, "root", "-e", statement)[0]


def write_slurmdbd_conf(state: State) -> None:
    port = re.search(r"AccountingStoragePort=(\d+)", state.conf.read_text())
    lines = [
        f"AuthInfo=socket={state.socket}",
        "AuthType=auth/munge",
        "DbdHost=localhost",
        "DbdAddr=127.0.0.1",
        f"DbdPort={port[1] if port else ''}",
        f"SlurmUser={user_name()}",
        "StorageType=accounting_storage/mysql",
        "StorageUser=root",
        f"LogFile={state.log}/slurmdbd.log",
        f"PidFile={state.path}/run/slurmdbd.pid",
    ]
    path = state.path / "slurmdbd.conf"
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)
