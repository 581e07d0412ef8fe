"""Messages of slurmstepd, srun, slurmctld, sacct, seff and submitit. Slurm 17 to 26."""

import re
from collections.abc import Iterator, Sequence

from relax_hpc.errors import ConfigError
from relax_hpc.postmortem.evidence import Event, EventKind
from relax_hpc.postmortem.parse.record import Parser, Record, read_stamp
from relax_hpc.slurm_notation import expand_hostlist

_CANCELLED = re.compile(
    r"\*\*\* (?P<what>JOB|STEP) (?P<id>[\w+.\[\]-]+) ON (?P<node>\S+) "
    r"(?:(?P<verb>CANCELLED|FAILED)[^*]*? AT |(?P<verb2>STEPD TERMINATED|"
    r"UNCORRECTABLE MEMORY ERROR).*? AT )"
    r"(?P<when>\S+)(?P<reason>[^*]*)(?:\*\*\*|$)"
)
_REASONS = (
    ("time-limit", "TIME LIMIT"),
    ("preemption", "PREEMPTION"),
    ("node-failure", "NODE FAILURE"),
    ("requeue", "JOB REQUEUE"),
    ("task-failure", "TASK FAILURE"),
    ("signal", "SIGNAL"),
    ("deadline", "DEADLINE"),
    ("suspended", "SUSPEN"),
)
MAX_NODES = 512


def _job(text: str) -> str:
    return re.split(r"[.+_]", text)[0]


def parse_cancelled(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`*** JOB|STEP id ON node CANCELLED AT t [DUE TO reason] ***`; the node is the first one."""
    record = records[index]
    for found in _CANCELLED.finditer(record.text):
        words = found["reason"].upper()
        reason = next((name for name, part in _REASONS if part in words), "cancelled")
        yield record.event(
            EventKind.SCHEDULER,
            node="",
            time=read_stamp(found["when"]),
            attrs={
                "reason": reason,
                "what": found["what"].lower(),
                "job": _job(found["id"]),
                "step": found["id"],
                "printed_on": found["node"],
            },
        )


_TASKS = re.compile(
    r"srun: error: (?P<nodes>\S+): tasks? (?P<tasks>[\d,\[\]-]+):? (?P<end>Exited with "
    r"exit code (?P<code>\d+)|Out Of Memory|Bus error|Killed|Terminated|Aborted|"
    r"Segmentation fault|Illegal instruction|Floating point exception|Hangup|Interrupt|"
    r"User defined signal \d|unknown|[A-Z][\w ]+?)(?: \(core dumped\))?\s*$"
)


def parse_tasks(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`srun: error: gpu[1-2]: tasks 0-5,7: Exited with exit code 1|Killed|...`."""
    record = records[index]
    found = _TASKS.search(record.text.rstrip())
    if found is None:
        return
    tasks = _numbers(found["tasks"])
    end = found["end"].strip()
    kind = EventKind.PROCESS_EXIT
    attrs: dict[str, str | int | float | tuple[int, ...]] = {
        "end": end,
        "tasks": tuple(tasks[:4096]),
    }
    if found["code"]:
        attrs["exit_code"] = int(found["code"])
    if end == "Out Of Memory":
        kind = EventKind.OUT_OF_MEMORY
        attrs["where"] = "host"
    nodes = _nodes(found["nodes"])
    attrs["nodes"] = ",".join(nodes)
    yield record.event(
        kind,
        node=nodes[0] if len(nodes) == 1 else "",
        rank=tasks[0] if len(tasks) == 1 else None,
        attrs=attrs,
    )


def _nodes(text: str) -> list[str]:
    try:
        return expand_hostlist(text)[:MAX_NODES]
    except ConfigError:
        return [text]


def _numbers(text: str) -> list[int]:
    numbers: list[int] = []
    for part in text.strip("[]").split(","):
        low, _, high = part.strip("[]").partition("-")
        if low.isdigit():
            last = int(high) if high.isdigit() else int(low)
            numbers += range(int(low), min(last, int(low) + 65536) + 1)
    return numbers


_OOM = re.compile(
    r"Detected \d+ oom[-_]kill event(?:\(s\)|s)? in (?:StepId=|step )(?P<step>\S+)|"
    r"Exceeded (?:job|step) memory limit|oom-kill event\(s\)|"
    r"[Ss]ome of the step tasks have been OOM Killed"
)


def parse_oom(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`Detected 1 oom-kill event(s)` (<= 22.05) and `oom_kill event in StepId` (>= 23.02)."""
    record = records[index]
    if found := _OOM.search(record.text):
        multi = re.search(r"slurmstepd-([\w.-]+?):", record.text)
        yield record.event(
            EventKind.OUT_OF_MEMORY,
            node=multi[1] if multi else "",
            attrs={"where": "host", "step": (found["step"] or "").rstrip("."), "words": "oom-kill"},
        )


_NODE_FAILURE = re.compile(
    r"Node failure on (?P<node>\S+)|due to failure of node (?P<node2>\S+)|"
    r"[Nn]odes? (?P<node3>\S+) (?:not responding|is down|DOWN)|"
    r"error: Aborting, .*? not responding|"
    r"Batch JobId=\d+ missing from batch node (?P<node4>\S+)"
)


def parse_node_failure(records: Sequence[Record], index: int) -> Iterator[Event]:
    """Lines that name the failed node itself (srun, slurmctld)."""
    record = records[index]
    if found := _NODE_FAILURE.search(record.text):
        nodes = _nodes(
            (found["node"] or found["node2"] or found["node3"] or found["node4"] or "").rstrip(
                ".,:;"
            )
        )
        sure = bool(found["node"] or found["node2"])
        for node in nodes:
            yield record.event(
                EventKind.SCHEDULER,
                node=node,
                attrs={"reason": "node-failure" if sure else "not-responding", "what": "node"},
            )


_LAUNCH = (
    (
        "cpu-bind",
        re.compile(
            r"CPU binding outside of job step allocation|Unable to satisfy cpu bind request"
        ),
    ),
    (
        "step-create",
        re.compile(
            r"Unable to create step for job \d+: (?P<why>.+)|"
            r"[Jj]ob step creation (?:still )?disabled|"
            r"Unable to confirm allocation for job|"
            r"Unable to allocate resources: (?P<why4>.+)|Batch job submission failed: (?P<why5>.+)"
        ),
    ),
    ("step-busy", re.compile(r"step creation (?:temporarily|still) disabled, retrying")),
    (
        "exec",
        re.compile(
            r"execve\(\): (?P<why>.+)|error: Unable to exec|couldn't exec|"
            r"task_p_pre_launch|"
            r"error: Task launch .*failed on node (?P<node>\S+?): (?P<why2>.+)|"
            r"Application launch failed: (?P<why3>.+)|launch failed requeued held|"
            r"Job launch failed|[Pp]rolog (?:failed|error)|Invalid (?:account|"
            r"partition|qos)|Invalid hostfile|Too few NodeNames"
        ),
    ),
)


def parse_launch(records: Sequence[Record], index: int) -> Iterator[Event]:
    """Steps and tasks that never began."""
    record = records[index]
    for reason, pattern in _LAUNCH:
        if found := pattern.search(record.text):
            groups = found.groupdict()
            why = next((text for key, text in groups.items() if text and key != "node"), found[0])
            yield record.event(
                EventKind.LAUNCHER_ERROR,
                node=groups.get("node") or "",
                attrs={"reason": reason, "words": why[:120]},
            )
            return


_SUBMITIT = re.compile(
    r"submitit.*?(?:Bypassing signal (?P<bypass>\S+)|"
    r"Caught signal (?P<caught>\S+?) on (?P<node>\S+?): this job is (?P<why>preempted|"
    r"timed.?out))|(?P<requeued>Requeued job \d+)"
)
_TERMINATING = re.compile(
    r"srun: (?:.*?: )?(?:Force )?Terminat(?:ing|ed) (?:StepId=|job step )(?P<step>\S+)|"
    r"Job step aborted|forcing job termination|got SIGCONT|interrupt \(one more"
)


def parse_orderly(records: Sequence[Record], index: int) -> Iterator[Event]:
    """Signals that somebody announced, and srun's own ending of a step."""
    record = records[index]
    if found := _SUBMITIT.search(record.text):
        if found["requeued"]:
            yield record.event(EventKind.SCHEDULER, attrs={"reason": "requeue", "what": "submitit"})
        elif found["bypass"] or found["caught"]:
            yield record.event(
                EventKind.SCHEDULER,
                attrs={
                    "reason": "signal-bypassed" if found["bypass"] else "signal-handled",
                    "what": "process",
                    "signal": found["bypass"] or found["caught"],
                    "why": (found["why"] or "").replace("-", " "),
                },
            )
    elif found := _TERMINATING.search(record.text):
        yield record.event(
            EventKind.SCHEDULER,
            attrs={
                "reason": "terminating",
                "what": "step",
                "step": (found["step"] or "").rstrip("."),
            },
        )


_WAITED = re.compile(r"StepId=\S+ tasks? (?P<tasks>[\d,-]+): exited(?P<how> abnormally)?")


def parse_waited(records: Sequence[Record], index: int) -> Iterator[Event]:
    """`StepId=9.4 task 3: exited abnormally`: what srun --wait lists below `First task exited`."""
    record = records[index]
    if found := _WAITED.search(record.text):
        tasks = _numbers(found["tasks"])
        yield record.event(
            EventKind.PROCESS_EXIT,
            rank=tasks[0] if len(tasks) == 1 else None,
            attrs={"end": f"exited{found['how'] or ''}", "tasks": tuple(tasks[:4096])},
        )


_UNKILLABLE = re.compile(
    r"STEPD TERMINATED ON (?P<node>\S+) AT \S+ DUE TO JOB NOT ENDING WITH SIGNALS|"
    r"Kill task failed|STEPD TERMINATED.*NOT ENDING"
)


def parse_unkillable(records: Sequence[Record], index: int) -> Iterator[Event]:
    """Processes that SIGKILL does not end: they are stuck in the kernel."""
    record = records[index]
    if found := _UNKILLABLE.search(record.text):
        yield record.event(
            EventKind.SCHEDULER, node=found["node"], attrs={"reason": "unkillable", "what": "step"}
        )


_SACCT = re.compile(
    r"^\s*(?P<id>\d+(?:[_+]\S*?)?(?:\.\S+)?)[\s|].*?\b(?P<state>BOOT_FAIL|"
    r"CANCELLED(?: by \d+)?\+?|COMPLETED|DEADLINE|FAILED|NODE_FAIL|OUT_OF_ME\w*\+?|"
    r"PREEMPTED|REQUEUED|TIMEOUT|SUSPENDED|LAUNCH_FAILED)[\s|]+"
    r"(?:.*?[\s|])?(?P<code>\d+):(?P<signal>\d+)"
)
_SEFF = re.compile(
    r"^\s*(?:State|JobState)\s*[:=]\s*(?P<state>[A-Z_]+)(?:\s*\(exit code (?P<code>\d+)\))?"
)
_STATES = {
    "NODE_FAIL": "node-failure",
    "TIMEOUT": "time-limit",
    "PREEMPTED": "preemption",
    "BOOT_FAIL": "node-failure",
    "REQUEUED": "requeue",
    "DEADLINE": "time-limit",
    "SUSPENDED": "suspended",
}


def parse_accounting(records: Sequence[Record], index: int) -> Iterator[Event]:
    """Rows of sacct (also truncated ids) and the state line of seff or scontrol."""
    record = records[index]
    found = _SACCT.search(record.text) or _SEFF.search(record.text)
    if found is None:
        return
    state, parts = found["state"].split(" ")[0].rstrip("+"), found.groupdict()
    code, signal = int(parts.get("code") or 0), int(parts.get("signal") or 0)
    if state.startswith("OUT_OF_ME"):
        yield record.event(EventKind.OUT_OF_MEMORY, attrs={"where": "host", "words": state})
    elif state in _STATES:
        yield record.event(
            EventKind.SCHEDULER,
            attrs={"reason": _STATES[state], "what": "sacct", "step": parts.get("id") or ""},
        )
    elif state in ("FAILED", "CANCELLED", "LAUNCH_FAILED"):
        yield record.event(
            EventKind.SCHEDULER,
            attrs={
                "reason": f"sacct-{state.lower()}",
                "what": "sacct",
                "exit_code": code,
                "signal_number": signal,
            },
        )


PARSERS = (
    Parser("cancelled", ("*** JOB", "*** STEP"), parse_cancelled),
    Parser("tasks", ("srun: error:",), parse_tasks),
    Parser("oom", ("oom-kill event", "oom_kill event", "memory limit", "OOM Killed"), parse_oom),
    Parser(
        "node_failure",
        ("Node failure on", "failure of node", "not responding", "missing from batch node"),
        parse_node_failure,
    ),
    Parser(
        "launch",
        (
            "CPU binding outside",
            "cpu bind request",
            "Unable to create step",
            "step creation",
            "execve()",
            "Batch job submission",
            "allocate resources",
            "launch failed",
            "Task launch",
            "rolog",
            "confirm allocation",
            "Invalid hostfile",
            "Too few NodeNames",
            "Can't chdir",
        ),
        parse_launch,
    ),
    Parser(
        "orderly",
        ("submitit", "Terminating", "Terminated", "Job step aborted", "forcing job", "got SIGCONT"),
        parse_orderly,
    ),
    Parser("waited", (": exited",), parse_waited),
    Parser("unkillable", ("NOT ENDING", "Kill task failed"), parse_unkillable),
    Parser(
        "accounting",
        (
            "CANCELLED",
            "NODE_FAIL",
            "OUT_OF_ME",
            "PREEMPTED",
            "TIMEOUT",
            "FAILED",
            "DEADLINE",
            "REQUEUED",
        ),
        parse_accounting,
    ),
)
