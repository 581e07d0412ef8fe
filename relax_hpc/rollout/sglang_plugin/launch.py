"""Start script of an engine: `python launch.py --model-path ... --port ...` in its own session.

The same as `python -m sglang.launch_server`, but the server dies with the job step that started
it, and the API key comes from a file, so that no process list shows it.
"""

import os
import runpy
import sys

if __name__ == "__main__":  # SGLang spawns its processes: they import this file again
    from relax_sglang import process

    process.die_with_parent(int(os.environ["RELAX_SGLANG_PARENT"]))
    sys.argv = ["sglang.launch_server", *sys.argv[1:], f"--api-key={process.api_key()}"]
    runpy.run_module("sglang.launch_server", run_name="__main__")
