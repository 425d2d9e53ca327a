"""Two-dimensional convolution as an implicit matrix product, with bias and activation."""

from wavecrest.ops.conv2d.op import conv2d

__all__ = ["conv2d"]
