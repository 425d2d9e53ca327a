"""Code that kernels of several ops share: launches, layouts, checks, device functions, quantization."""
