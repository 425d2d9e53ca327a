"""The command line: one file per command, each with a `run()` that Python can call."""
