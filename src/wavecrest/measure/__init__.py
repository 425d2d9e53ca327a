"""Measuring: workloads, the timer, accuracy limits, CUDA graphs of one call."""
