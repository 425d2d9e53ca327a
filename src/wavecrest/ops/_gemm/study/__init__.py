"""What tuning, benchmarking and evidence need of the op; not loaded by a call."""
