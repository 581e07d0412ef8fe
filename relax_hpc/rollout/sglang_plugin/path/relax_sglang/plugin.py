"""SGLang's plugin hooks (entry points of relax_sglang-1.dist-info): request seeds, CPU platform.

SGLang 0.5.23 calls `load` early in each of its processes, and `activate` where SGLANG_PLATFORM
names it.
"""

import os


def load() -> None:
    """General plugin: make `sampling_seed` of a request count, on a CPU and on a GPU."""
    if not os.environ.get("RELAX_SGLANG"):
        return
    from relax_sglang import kernels, seeds

    if os.environ["RELAX_SGLANG_DEVICE"] == "cpu":
        kernels.register()
    seeds.install()


def activate() -> str | None:
    """Platform plugin: SGLang's own CPU platform, without a compiled sgl_kernel."""
    import torch

    if not os.environ.get("RELAX_SGLANG") or torch.cuda.is_available():
        return None
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    return "sglang.srt.platforms.cpu.CpuSRTPlatform"
