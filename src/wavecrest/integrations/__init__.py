"""Adapters to other libraries; each optional package is imported in one file, inside functions."""
