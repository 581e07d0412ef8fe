"""The transfer queue: rows x fields x tasks; payload in shared memory, metadata in one place."""
