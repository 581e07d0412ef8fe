"""What runs inside SGLang's processes: start script, plugin, weight loader, CPU stand-ins.

`path/` goes to the front of PYTHONPATH of the engine's processes and of nothing else, so trainer,
tests and tools see a plain environment. Its modules are imported by SGLang, never by relax_hpc.
"""
