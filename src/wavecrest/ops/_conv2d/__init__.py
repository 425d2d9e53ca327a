"""Two-dimensional convolution as an implicit matrix product, with bias and activation."""

from wavecrest.ops._conv2d.backend import conv2d

__all__ = ["conv2d"]
