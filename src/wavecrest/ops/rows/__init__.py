"""Ops over the last dimension of [..., N] that share one kernel: norms, softmax, quantization."""
