"""Weights in 8 or 4 bits: what of a model is packed, and how."""
