"""Settings for the next failure never replace a user's own."""

from pathlib import Path

from relax_hpc.launcher.recorder import recorder_environment

PREFIX = Path("/run/logs/0-i1-nccl_trace_rank_")


def test_everything_is_set_when_nobody_did() -> None:
    settings = recorder_environment(PREFIX, {}, {"PATH": "/bin"})
    assert settings["TORCH_FR_DUMP_TEMP_FILE"] == str(PREFIX)
    assert settings["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert settings["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert settings["NCCL_DEBUG"] == "WARN"


def test_old_names_and_empty_values_count_as_set() -> None:
    site = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}
    user = {"NCCL_DEBUG": "", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/x"}
    settings = recorder_environment(PREFIX, site, user)
    assert sorted(settings) == ["PYTHONFAULTHANDLER", "TORCH_NCCL_DUMP_ON_TIMEOUT"]
