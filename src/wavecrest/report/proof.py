"""How the claims of a run were come to: the timer, and the accuracy gate; for the page and for the terminal."""

from __future__ import annotations

from wavecrest.records import BucketError, GateBucket, GateSummary, OptimizeRecord, Result
from wavecrest.report import numbers

# the gate's note on a bucket whose shapes are the only ones that were tried
ONLY = "these shapes only"
UNITS = {
    "processes": "{pairs} fresh processes a side that alternate; the interval is over pairs of processes",
    "phases": "one process: {pairs} phases a side that alternate; no interval, as other processes may differ",
    "blocks": "one process: {pairs} interleaved blocks",
}


def timer(record: OptimizeRecord) -> list[tuple[str, str]]:
    """(name, value) of how speed was measured."""
    rows = []
    if record.resolution:
        floors = ", ".join(f"{bucket} {numbers.percent(floor)}" for bucket, floor in record.resolution.items())
        rows.append(("Resolution", f"{floors}: one model against itself; smaller differences do not count"))
    if record.result is not None and record.result.speed:
        rows.append(("Final claim", final_claim(record.result)))
        if record.result.drift is not None:
            drift = f"{record.result.drift * 100:+.1f} %"
            rows.append(("Drift of the host", f"{drift}: the original, from its first measurement to its last"))
    if record.seconds is not None:
        rows.append(("The whole run", numbers.seconds(record.seconds)))
    if record.final_seconds is not None and record.final_expected is not None:
        expected = f"{numbers.seconds(record.final_expected)} were kept for it"
        parts = ", ".join(f"{name} {numbers.seconds(seconds)}" for name, seconds in record.final_parts.items())
        text = f"{numbers.seconds(record.final_seconds)}; {expected}"
        rows.append(("The final check and measurement", f"{text}; {parts}" if parts else text))
    return rows


def final_claim(result: Result) -> str:
    """The unit and number of measurements behind the final speed-up."""
    return UNITS[result.unit].format(pairs=max(row.blocks for row in result.speed))


def gate(record: OptimizeRecord) -> list[tuple[str, str]]:
    """(name, value) of the work of the accuracy gate; empty for a record without one."""
    found = record.gate
    if found is None:
        return []
    rows = [
        ("Rules", f"{len(found.rules) - len(found.not_run)} of {len(found.rules)} run for every candidate"),
        ("Compared", compared(found)),
        *((f"Values of {row.bucket}", tried(row)) for row in found.buckets),
        ("Seed", str(found.seed)),
        ("Time", time(record)),
    ]
    return rows + [(f"Not run: {rule}", reason) for rule, reason in sorted(found.not_run.items())]


def compared(found: GateSummary) -> str:
    """The counts of a gate's work."""
    models, calls, outputs = _of(found.checks, "model"), _of(found.calls, "call"), _of(found.leaves, "output")
    return f"{models}, {calls}, {outputs} against their limits, {_of(found.timed, 'answer')} of timed calls"


def _of(number: int, noun: str) -> str:
    return f"{numbers.count(number)} {noun}{'' if number == 1 else 's'}"


def tried(bucket: GateBucket) -> str:
    """Values and shapes of a bucket, and what was left out."""
    return "; ".join([_inputs(bucket), *(note for note in bucket.notes if note != ONLY)])


def _inputs(bucket: GateBucket) -> str:
    shapes = f"also {', '.join(bucket.shapes)}" if bucket.shapes else ONLY
    return f"{', '.join(bucket.values) or 'nothing'}, {shapes}"


def time(record: OptimizeRecord) -> str:
    """Seconds that the gate took, and their share of the run."""
    assert record.gate is not None
    text = numbers.seconds(record.gate.seconds)
    return (
        text if not record.seconds else f"{text}, {numbers.percent(record.gate.seconds / record.seconds, 0)} of the run"
    )


def lines(record: OptimizeRecord) -> list[str]:
    """The gate's work for a terminal."""
    found = record.gate
    if found is None:
        return []
    run = len(found.rules) - len(found.not_run)
    rows = [f"accuracy gate: {run} of {len(found.rules)} rules; {compared(found)}; {time(record)}; seed {found.seed}"]
    # the page has the notes, which may be long
    rows += [f"accuracy gate, {row.bucket}: {_inputs(row)}" for row in found.buckets]
    if found.not_run:
        left_out = ", ".join(sorted(found.not_run))
        rows.append(f"accuracy gate, rules not run for some model: {left_out}; the report has the reason of each")
    return rows


def worst_error(checks: list[BucketError]) -> str:
    """Error over limit of the output nearest to its limit, a failed check first."""
    if not checks:
        return numbers.DASH
    worst = max(checks, key=lambda check: (not check.passed, numbers.is_nan(check.error), _share(check)))
    return numbers.error_share(worst.error, worst.limit)


def _share(check: BucketError) -> float:
    # comparisons with NaN are all false, so it has a place of its own
    if numbers.is_nan(check.error):
        return 0.0
    return check.error / check.limit if check.limit else check.error
