"""Baseline measurements: a workload's buckets timed, and their memory."""
