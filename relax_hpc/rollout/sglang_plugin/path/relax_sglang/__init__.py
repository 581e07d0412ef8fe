"""relax_hpc's code inside SGLang's processes (main, schedulers, detokenizer)."""
