"""Faults of a machine and of a run, planted in facts and really made on this machine."""

import dataclasses
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relax_hpc.launcher import diagnosis, memory_fit, run_checks
from relax_hpc.launcher.check_list import FAULTS, Finding, Severity, found, merged
from relax_hpc.launcher.diagnosis import Facts, FoundNode, LastPreflight, diagnose
from relax_hpc.launcher.node_checks import NodeNeeds, check_node
from relax_hpc.launcher.plan import build_plan
from relax_hpc.launcher.run_checks import FolderFacts, RunFacts, check_run
from relax_hpc.launcher.site import Site
from relax_hpc.topology import node_facts
from relax_hpc.topology.node_facts import GpuFacts, NodeFacts
from relax_hpc.trainer.model_config import ModelShape
from tests.launcher_samples import HEADLINE, ROOT, SMALL, config_of, relax, write_recipe

GB = 2**30
GOOD = NodeFacts(
    node="n1", shm_bytes=500 * GB, shm_free_bytes=400 * GB, rdma_active=("mlx5_0/1",),
    gpus=(GpuFacts(uuid="GPU-1", name="H800", memory_mb=81559),),
)  # fmt: skip
NEEDS = NodeNeeds(shm_least_bytes=8 * GB, shm_wanted_bytes=64 * GB, gpus=1)
QWEN3_4B = ModelShape(
    model_type="qwen3", num_layers=36, hidden_size=2560, ffn_hidden_size=9728, num_heads=32,
    num_kv_heads=8, head_dim=128, vocab_size=151936, max_positions=40960, norm_eps=1e-6,
    rope_theta=1e6, tied_embeddings=True,
)  # fmt: skip


def test_nothing_is_found_on_a_good_node() -> None:
    assert check_node(GOOD, NEEDS) == []
    assert check_node(NodeFacts(node="bare"), NodeNeeds()) == []


@pytest.mark.parametrize(
    ("facts", "needs", "name", "severity"),
    [
        ({"shm_bytes": 64 * 2**20}, {}, "shm-size", "error"),
        ({"shm_bytes": 32 * GB}, {}, "shm-size", "warning"),
        ({"shm_free_bytes": GB}, {}, "shm-full", "error"),
        ({"memlock_bytes": 8 << 20}, {}, "memlock", "error"),
        ({"memlock_bytes": 8 << 20, "rdma_active": ()}, {}, "memlock", "warning"),
        ({"max_open_files": 1024}, {}, "open-files", "warning"),
        ({"removes_ipc": True}, {}, "remove-ipc", "warning"),
        ({"ephemeral_used": 27_000}, {}, "ephemeral-ports", "error"),
        ({"ephemeral_used": 15_000}, {}, "ephemeral-ports", "warning"),
        ({"listening": (29500,)}, {"ports": (("environment.MASTER_PORT", 29500),)}, "fixed-port",
         "error"),
        ({}, {"ports": (("environment.MASTER_PORT", 40000),)}, "fixed-port", "warning"),
        ({"clock_offset_s": -90.0}, {}, "clock-skew", "error"),
        ({"clock_offset_s": 5.0}, {}, "clock-skew", "warning"),
        ({"rdma_down": ("mlx5_1/1",)}, {}, "rdma-port", "warning"),
        ({"rdma_active": ()}, {"forces_rdma": True}, "rdma-port", "error"),
        ({"folder_fault": "/runs: Stale file handle"}, {}, "run-folder", "error"),
        ({"model_fault": "/models/x: Permission denied"}, {}, "model-folder", "error"),
        ({"gpus": ()}, {}, "gpu", "error"),
    ],
)  # fmt: skip
def test_each_fault_of_a_node_is_found(
    facts: dict[str, Any], needs: dict[str, Any], name: str, severity: str
) -> None:
    (finding,) = check_node(
        msgspec.structs.replace(GOOD, **facts), dataclasses.replace(NEEDS, **needs)
    )
    assert (finding.check, finding.severity, finding.node) == (name, severity, "n1")
    assert finding.remedy == FAULTS[name].remedy


def run_facts(site: Site | None = None, **changes: Any) -> RunFacts:
    facts = {k: changes.pop(k) for k in list(changes) if "__" not in k}
    config = config_of(HEADLINE, **changes)
    site = site or Site(name="centre", gpu_memory_gb=80)
    values: dict[str, Any] = {
        "config": config,
        "site": site,
        "plan": build_plan(config, site),
        "folder": FolderFacts(path="/runs", file_system="lustre", free_bytes=10**13),
        "shape": QWEN3_4B,
    }
    return RunFacts(**{**values, **facts})


def folder(**changes: Any) -> FolderFacts:
    return dataclasses.replace(run_facts().folder, **changes)


FITS = {"model__dtype": "bfloat16", "train__recompute": True}


def test_nothing_is_found_in_a_good_run() -> None:
    assert check_run(run_facts(**FITS)) == []


@pytest.mark.parametrize(
    ("changes", "name", "severity"),
    [
        ({"folder": folder(fault="/runs: Permission denied")}, "run-folder", "error"),
        ({"folder": folder(file_system="xfs")}, "shared-folder", "error"),
        ({"folder": folder(clock_offset_s=70.0)}, "clock-skew", "error"),
        ({"folder": folder(free_bytes=10**10)}, "disk-space", "error"),
        ({"folder": folder(free_bytes=10**11)}, "disk-space", "warning"),
        ({"folder": folder(free_files=12)}, "disk-space", "error"),
        ({"resources__mem_per_node_gb": 1}, "job-memory", "error"),
        ({"resources__mem_per_node_gb": 16}, "job-memory", "warning"),
        ({"model_fault": "model.path='x': no such folder"}, "model-folder", "error"),
        ({"input_faults": ("data.train='x': no such file",)}, "inputs", "error"),
        ({"train__micro_batch_tokens": 200_000}, "train-memory", "error"),
        ({"train__recompute": False, "train__micro_batch_tokens": 60_000}, "train-memory", "error"),
        ({"data__max_prompt_tokens": 1_200_000, "train__tp": 8}, "kv-memory", "error"),
        ({"data__max_prompt_tokens": 300_000, "train__tp": 8}, "kv-memory", "warning"),
    ],
)
def test_each_fault_of_a_run_is_found(changes: dict[str, Any], name: str, severity: str) -> None:
    found_ones = {f.check: f.severity for f in check_run(run_facts(**{**FITS, **changes}))}
    assert found_ones.get(name) == severity, found_ones
    assert set(found_ones) <= {name, "train-memory"}


def test_a_folder_of_one_machine_is_fine_when_it_is_the_cluster() -> None:
    assert check_run(run_facts(**FITS, folder=folder(file_system="xfs"), one_host=True)) == []


def test_memory_of_a_known_model() -> None:
    """Qwen3-4B: 4.02 B weights (model card); 147,456 bytes of KV cache per token in bfloat16."""
    assert memory_fit.num_parameters(QWEN3_4B) == pytest.approx(4.02e9, rel=0.01)
    config = config_of(HEADLINE, **FITS)
    memory = memory_fit.engine_memory(config, QWEN3_4B, 80)
    tokens = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    assert memory.sample_gb == pytest.approx(147_456 * tokens / 2 / 1e9)
    assert memory.weights_gb == pytest.approx(4.02, rel=0.01)
    # tp 2, dp 4: half of the weights, 2 + 4 + 12 / 4 bytes each
    assert memory_fit.train_memory(config, QWEN3_4B).state_gb == pytest.approx(18.1, rel=0.01)


def test_needs_are_those_of_the_fullest_node() -> None:
    config = config_of(HEADLINE, transfer__arena_mb=1024, transfer__extent_mb=64)
    needs = run_checks.node_needs(config, Site(name="x"), build_plan(config, Site(name="x")), None)
    assert (needs.shm_least_bytes, needs.shm_wanted_bytes) == (4 * 64 << 20, 4 << 30)
    assert needs.gpus == 8


def test_fixed_ports_are_found_where_people_set_them() -> None:
    arguments = {"nccl-port": "29555", "mem-fraction-static": "0.8"}
    assert list(run_checks.fixed_ports(arguments, {"MASTER_PORT": "29500", "X": "1"})) == [
        ("rollout.sglang_args.nccl-port", 29555),
        ("environment.MASTER_PORT", 29500),
    ]


def test_mount_types() -> None:
    mounts = "/dev/a / ext4 rw 0 0\nfs /data lustre rw 0 0\nx /data/my\\040tmp tmpfs rw 0 0\n"
    assert run_checks.mount_type(Path("/data/runs"), mounts) == "lustre"
    assert run_checks.mount_type(Path("/database"), mounts) == "ext4"
    assert run_checks.mount_type(Path("/data/my tmp/x"), mounts) == "tmpfs"


def test_a_fault_of_most_nodes_is_no_reason_to_leave_them_out() -> None:
    findings = [found("memlock", Severity.ERROR, "8 MiB", f"n{i}") for i in range(3)]
    findings.append(found("gpu", Severity.ERROR, "7 GPUs", "n3"))
    one, other = sorted(merged(findings, 4), key=lambda finding: finding.check)
    assert (one.check, one.node) == ("gpu", "n3")
    assert (other.check, other.node) == ("memlock", "")
    assert other.what == "3 of 4 nodes, e.g. n0: 8 MiB"


def test_what_a_preflight_named_is_remembered_for_a_day(tmp_path: Path) -> None:
    last = LastPreflight(time=1000.0, nodes=(FoundNode(node="n3", what="slow-node: 1 GB/s"),))
    facts = Facts(machine=GOOD, is_node_of_run=True, last=last, now_s=1000.0 + 3600)
    (finding,) = diagnose(facts)
    assert (finding.check, finding.node) == ("slow-node", "n3")
    assert "1.0 h ago" in finding.what
    assert diagnose(dataclasses.replace(facts, now_s=1000.0 + 90_000)) == []
    (tmp_path / "preflight.json").write_text("{")
    assert diagnosis.read_last(tmp_path) is None


def test_faults_of_a_login_node_are_warnings() -> None:
    bad = Facts(
        machine=NodeFacts(node="login", clock_offset_s=100.0),
        is_node_of_run=False,
        slurm_fault="slurmctld is silent",
    )
    assert {f.check: f.severity for f in diagnose(bad)} == {
        "clock-skew": "warning",
        "no-slurm": "warning",
    }
    with_run = dataclasses.replace(bad, run=run_facts(**FITS))
    assert {f.check: f.severity for f in diagnose(with_run)}["no-slurm"] == "error"


# ---- really made on this machine


def test_a_small_shared_memory(small_shm: Path) -> None:
    facts = node_facts.gather("here", shm=small_shm, with_gpus=False)
    assert facts.shm_bytes == 1 << 20
    finding = check_node(facts, NodeNeeds(shm_least_bytes=GB))[0]
    assert (finding.check, finding.severity) == ("shm-size", "error")


@pytest.fixture
def small_shm(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB of its own, where that is allowed."""
    mount = tmp_path / "shm"
    mount.mkdir()
    options = ["-t", "tmpfs", "-o", "size=1m", "none", str(mount)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("mount(8) needs root")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_low_memlock_limit() -> None:
    """In a process of its own, as a limit that was lowered stays low."""
    program = (
        "import resource; from relax_hpc.topology import node_facts;"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536));"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256));"
        "f = node_facts.gather('x', with_gpus=False); print(f.memlock_bytes, f.max_open_files)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.split() == ["65536", "256"]
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    here = node_facts.gather("x", with_gpus=False).memlock_bytes
    assert here == (node_facts.UNLIMITED if unlimited else soft)


def test_a_port_that_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        facts = node_facts.gather("x", with_gpus=False)
        needs = NodeNeeds(ports=(("environment.MASTER_PORT", port),))
        findings = [f for f in check_node(facts, needs) if f.check == "fixed-port"]
    assert [f.severity for f in findings] == ["error"]
    assert facts.ephemeral_used >= 1


def test_an_unreadable_model(tmp_path: Path) -> None:
    """Root reads everything, so it becomes nobody first."""
    (tmp_path / "weights").touch(mode=0)
    program = (
        "import os, sys; from pathlib import Path; from relax_hpc.topology import node_facts;"
        "os.getuid() or os.setuid(65534); print(node_facts.readable_fault(Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "Permission denied" in done.stdout


def test_folders_that_are_not_there_or_not_writable(tmp_path: Path) -> None:
    assert node_facts.folder_fault(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []
    assert "No such file" in node_facts.folder_fault(tmp_path / "gone")
    assert "No such file" in node_facts.readable_fault(tmp_path / "gone")
    (tmp_path / "canary").write_text("old")
    assert "another content" in node_facts.folder_fault(tmp_path, "canary", "new")


def test_rdma_ports_of_sysfs(tmp_path: Path) -> None:
    for device, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    assert node_facts.rdma_ports(tmp_path) == (("mlx5_0/1",), ("mlx5_1/1",))


def doctor(place: Path, *arguments: str) -> tuple[int, dict[str, Finding]]:
    done = relax("doctor", *arguments, "--json", cwd=place)
    findings = json.loads(done.stdout)["findings"]
    return done.returncode, {one["check"]: Finding(**one) for one in findings}


def test_the_command_names_what_is_wrong_with_a_recipe(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, SMALL, transfer__arena_mb=64)
    code, findings = doctor(tmp_path, str(recipe))
    assert code == 0, findings
    (tmp_path / "model" / "config.json").unlink()
    (tmp_path / "train.jsonl").unlink()
    code, findings = doctor(tmp_path, str(recipe))
    assert code == 1
    assert {"model-folder", "inputs"} <= set(findings)
    assert "has no config.json" in findings["model-folder"].what
    text = relax("doctor", str(recipe), cwd=tmp_path).stdout
    assert any(line.startswith("error    model-folder: ") for line in text.splitlines())
    assert "  -> correct model.path" in text


def test_a_run_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A file is in its place: that stops root too."""
    recipe = write_recipe(tmp_path, SMALL)
    facts = run_checks.look_at(Path("/proc/nothing/here"))
    assert facts.path == "/proc"
    assert facts.fault
    code, findings = doctor(tmp_path, str(recipe), "--set", "run.folder=/proc/nothing/here")
    assert code == 1
    assert findings["run-folder"].severity == "error"


def test_a_port_in_use_is_told_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        recipe = write_recipe(tmp_path, SMALL, rollout__sglang_args={"nccl-port": str(port)})
        code, findings = doctor(tmp_path, str(recipe))
    assert code == 1
    assert f"nccl-port={port}" in findings["fixed-port"].what


def test_slurm_that_is_not_there(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, SMALL, resources__launcher="slurm")
    done = relax("doctor", str(recipe), "--json", cwd=tmp_path, SLURM_CONF="/no/such/slurm.conf")
    assert done.returncode == 1
    checks = {one["check"] for one in json.loads(done.stdout)["findings"]}
    assert "no-slurm" in checks


def test_clean_and_a_recipe_do_not_go_together(tmp_path: Path) -> None:
    done = relax("doctor", "recipe.toml", "--clean", cwd=tmp_path)
    assert done.returncode == 2


def test_a_clock_that_is_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = time.time
    monkeypatch.setattr(run_checks.time, "time", lambda: real() + 300.0)
    assert run_checks.look_at(tmp_path).clock_offset_s == pytest.approx(300.0, abs=30.0)
