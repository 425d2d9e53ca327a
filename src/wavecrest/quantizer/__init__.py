"""Quantized models: which layers of a model take 8 or 4 bits, by measured error, and files of the result."""
