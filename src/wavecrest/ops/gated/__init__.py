"""Gated activations, act(gate) · up."""
