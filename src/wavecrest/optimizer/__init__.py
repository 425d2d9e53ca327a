"""The optimizer: benchmark → profile → analyse → implement → verify, one measured step at a time."""
