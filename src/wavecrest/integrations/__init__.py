"""Ways into other libraries; each optional package is imported in its one file, inside functions."""
