"""A few thousand mutated files, always the same ones: only named errors. `tests/unit/fuzzed.py` runs more."""

from __future__ import annotations

import warnings

from tests.unit.fuzzed import run


def test_mutated_files_are_read_or_refused_by_name() -> None:
    with warnings.catch_warnings():
        # plans for other versions and keys that are not used say so
        warnings.simplefilter("ignore")
        ends, raw = run(3300, seed=20261125)
    assert not raw, raw
    assert ends["read"] > 100 and {"PlanError", "RecordError", "TableError", "CheckpointError"} <= set(ends)
