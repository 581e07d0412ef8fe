"""Parts of tools/bench_weights."""
