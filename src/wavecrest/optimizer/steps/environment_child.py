"""The child of an environment trial: loads the workload, times every bucket, writes the samples.

Run as `python -m wavecrest.optimizer.steps.environment_child SPEC DEVICE SECONDS OUT.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from wavecrest.measure import timing, workload


def main(spec: str, device: str, seconds: float, target: Path) -> None:
    """Time each bucket of the workload for `seconds`."""
    loaded = workload.load(spec, device=device)
    samples = {
        bucket: list(timing.measure(workload.Call(loaded, bucket), device=loaded.device, seconds=seconds).samples)
        for bucket in loaded.buckets
    }
    target.write_text(json.dumps(samples))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]))
