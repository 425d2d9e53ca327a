"""Native PyTorch as a backend of every op: a candidate for each shape, the path of the CPU and of gradients."""
