"""Parts of tools/bench_transfer: the work, both queues, the floors of the machine."""
