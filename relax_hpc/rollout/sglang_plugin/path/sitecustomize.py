"""Python imports this at start-up in every process that has this folder on its path.

Those are the processes of one SGLang engine. Without RELAX_SGLANG nothing happens.
"""

import os

if os.environ.get("RELAX_SGLANG"):
    from relax_sglang import process

    process.prepare()
