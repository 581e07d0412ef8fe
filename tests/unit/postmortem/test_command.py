"""`relax-hpc postmortem` as a user runs it: exit codes, outputs, paths, stdin."""

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.postmortem import command
from relax_hpc.postmortem.command import host_list, logs_of
from relax_hpc.postmortem.verdict import Confidence, Finding, Report, Verdict
from tests.launcher_samples import ROOT, environment_of, relax

XID = (
    "2026-06-26T16:48:25.440+00:00 gpu07 kernel: NVRM: Xid (PCI:0000:dc:00): 79, pid=4242, "
    "name=python, GPU has fallen off the bus.\n"
)
TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "/w/train.py", line 12, in <module>\n'
    "    step(batch)\n"
    '  File "/w/train.py", line 7, in step\n'
    '    raise ValueError("bad sample 17")\n'
    "ValueError: bad sample 17\n"
)


def verdict_of(done: Any) -> dict[str, Any]:
    verdict: dict[str, Any] = json.loads(done.stdout)["verdict"]
    return verdict


def test_a_verdict_in_every_form(tmp_path: Path) -> None:
    (tmp_path / "gpu07.kernel.log").write_text(XID)
    arguments = ["gpu07.kernel.log", "--html", "report.html"]
    done = relax("postmortem", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "gpu07.kernel.log:1" in done.stdout
    assert "<svg" in (tmp_path / "report.html").read_text()
    told = verdict_of(relax("postmortem", "--json", ".", cwd=tmp_path))
    assert told["nodes"] == ["gpu07"]
    assert told["class"].startswith("gpu-")
    assert told["evidence"][0]["line"] == 1
    assert relax("postmortem", "--exclude", ".", cwd=tmp_path).stdout == "gpu07\n"


def test_standard_input(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "relax_hpc.cli", "postmortem", "--json", "-"],
        cwd=tmp_path,
        env=environment_of(),
        input=TRACEBACK,
        capture_output=True,
        text=True,
        check=False,
    )
    assert verdict_of(done)["class"] == "python-exception", done.stderr


def test_nothing_is_known(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("epoch 1 loss 2.0\n" * 50)
    done = relax("postmortem", ".", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("undetermined: ")
    assert "what to do" in done.stdout
    assert relax("postmortem", "--exclude", ".", cwd=tmp_path).stdout == "\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["absent.log"], "absent.log: no such file or folder, and no run"),
        (["a.log", "--html", "gone/x.html"], "--html gone/x.html"),
        ([], "usage"),
        (["a.log", "--json", "--exclude"], "not allowed with"),
    ],
)
def test_wrong_use(tmp_path: Path, arguments: list[str], says: str) -> None:
    (tmp_path / "a.log").write_text("x\n")
    done = relax("postmortem", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bug_of_ours_is_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from relax_hpc import cli

    def broken(paths: list[str], history: bool) -> Report:
        raise KeyError("rank")

    monkeypatch.setattr(command, "_analyse", broken)
    (tmp_path / "a.log").write_text("x\n")
    assert cli.main(["postmortem", str(tmp_path)]) == 70
    assert "this is a bug" in capsys.readouterr().err


def test_of_a_run_folder_the_newest_attempt_is_read(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny-42"
    for attempt, text in ((1, XID), (2, TRACEBACK), (10, "fine\n")):
        logs = run / "logs" / f"attempt_{attempt}" / "train"
        logs.mkdir(parents=True)
        (logs / "0-i1-rank3.log").write_text(text)
    (run / "config.json").write_text("{}")
    (run / "state.json").write_text('{"cause": "NVRM: Xid 79"}')
    assert logs_of(str(run), history=False) == [str(run / "logs" / "attempt_10")]
    assert [Path(p).name[8:] for p in logs_of(str(run), history=True)] == ["1", "2", "10"]
    assert logs_of(str(run / "logs"), history=False) == [str(run / "logs")]
    assert relax("postmortem", "42", cwd=tmp_path).returncode == 1


def report_of(class_: str, nodes: list[str], confidence: Confidence) -> Report:
    verdict = Verdict(class_=class_, confidence=confidence, sentence="x", nodes=nodes)
    return Report(verdict=verdict)


def test_only_nodes_that_are_to_blame_are_excluded() -> None:
    likely = Confidence.LIKELY
    assert host_list(report_of("gpu-ecc", ["n02", "n01", "n07"], likely)) == "n[01-02,07]"
    assert host_list(report_of("python-exception", ["n01"], Confidence.ESTABLISHED)) == ""
    assert host_list(report_of("gpu-ecc", ["n01"], Confidence.UNDETERMINED)) == ""
    assert host_list(report_of("of-tomorrow", ["n01"], likely)) == ""
    odd = ["10.1.2.3", "--partition=x", "a b", "$(rm)", "fe80::1", "n1;ls", ""]
    assert host_list(report_of("gpu-ecc", [*odd, "gpu-3.site"], likely)) == "gpu-3.site"
    report = report_of("missing-rank", ["n05"], likely)
    for confidence, node in ((Confidence.ESTABLISHED, "n09"), (likely, "n08")):
        report.findings.append(
            Finding(class_="gpu-ecc", confidence=confidence, sentence="x", nodes=[node])
        )
    assert host_list(report) == "n09"


def tool(name: str) -> Any:
    """Import a script of tools/ that has no suffix."""
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "tools" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("failure", ["missing-rank", "gpu-ecc", "host-oom"])
@pytest.mark.parametrize("seed", [1, 2])
def test_generated_logs_are_understood(tmp_path: Path, failure: str, seed: int) -> None:
    truth = tool("make_postmortem_logs").make_logs(tmp_path / "x", 24, 0.05, failure, seed)
    done = relax("postmortem", "--json", "x/logs", cwd=tmp_path)
    told = verdict_of(done)
    assert (told["class"], told["ranks"]) == (failure, [int(truth["rank"])])
    assert told["nodes"] in ([], [truth["node"]])


def test_the_benchmark_runs(tmp_path: Path) -> None:
    tool("make_postmortem_logs").make_logs(tmp_path / "x", 8, 0.1, "missing-rank", 3)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "bench_postmortem"), str(tmp_path / "x")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "right" in done.stdout


def test_the_command_loads_no_torch_and_no_rich(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(XID)
    code = (
        "import sys, relax_hpc.cli as c\n"
        f"c.main(['postmortem', {str(tmp_path)!r}])\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} "
        "& {'torch', 'numpy', 'submitit', 'rich', 'zmq'}), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == "[]"
