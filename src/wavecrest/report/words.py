"""The sentences of the report: verdict, summary, evidence, how to reproduce."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from wavecrest.records import BucketError, OptimizeRecord, QualityResult, Result, Verdict
from wavecrest.report import numbers, proof

Tone = Literal["good", "neutral", "bad"]

VERDICTS = {
    "kept": "faster beyond its interval and within the error limit: part of the result",
    "tie": "neither faster nor slower beyond the interval: the simpler version stays",
    "reverted": "slower or not gaining enough: undone",
    "refused": "failed a check or could not be applied: undone",
    "skipped": "not tried",
}
ENDINGS: dict[Verdict, tuple[str, str]] = {
    "kept": ("was kept", "were kept"),
    "tie": ("made no clear difference", "made no clear difference"),
    "reverted": ("was reverted", "were reverted"),
    "refused": ("was refused", "were refused"),
    "skipped": ("was skipped", "were skipped"),
}


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict as the report's first line: `title`, `interval` (may be empty), and one sentence on its meaning."""

    title: str
    interval: str
    meaning: str
    tone: Tone


def failed_checks(result: Result) -> list[str]:
    """The accuracy and quality checks of the final measurement that failed, by name."""
    numerics = [f"output {check.output} of {check.bucket}" for check in result.numerics if not check.passed]
    return numerics + [f"quality check {check.name}" for check in result.quality if not check.passed]


def headline(record: OptimizeRecord) -> Headline:
    """The verdict of a run.

    A record that says "faster" but holds a failed check, or whose interval reaches 1, is not announced as faster: no
    speed-up is reported on a red gate.
    """
    result = record.result
    if result is None:
        return Headline(
            "Interrupted",
            "",
            "The run stopped before the final measurement, so no overall speed-up is claimed."
            + (" The steps below are what had been measured by then." if record.steps else ""),
            "neutral",
        )
    decimals = numbers.headline_decimals(result.ratio, result.ci)
    speed = numbers.ratio(result.ratio, decimals)
    span = numbers.interval(result.ci, decimals)
    failed = failed_checks(result)
    if failed:
        return Headline(
            "Accuracy check failed", "", f"No speed-up is claimed: {', '.join(failed)} failed at the end.", "bad"
        )
    if result.unit == "phases":
        # of one process, which has no interval
        span = ""
    if result.verdict != "faster":
        return _no_gain(record, result, f"{speed} {span}".strip())
    if result.ci.low <= 1:
        return Headline(
            "Not proven faster",
            f"{speed} {span}",
            "The 95 % interval of the final measurement reaches 1, so no speed-up is claimed.",
            "bad",
        )
    return Headline(
        f"Faster by {speed}",
        span,
        f"Original against optimized: {proof.final_claim(result)}."
        if result.speed
        else "Original against optimized; in brackets the 95 % interval.",
        "good",
    )


def unchanged(result: Result) -> bool:
    """True if nothing was kept, so that there was no final model to measure: its ratio is then no measurement."""
    return result.verdict != "faster" and not result.speed


def _no_gain(record: OptimizeRecord, result: Result, measured: str) -> Headline:
    gain = numbers.percent(record.min_gain, 0 if (record.min_gain * 100).is_integer() else 1)
    kept = [step.title for step in record.steps if step.verdict == "kept"]
    if kept and unchanged(result):
        # only the environment step is kept without changing the model
        meaning = (
            f"The model stays as it is. Kept beside it, timed in fresh processes: {_listed(kept)} (see its reason)."
        )
    elif kept:
        meaning = (
            "Steps were kept one by one, but measured together at the end they are not faster than the original "
            "beyond the 95 % interval."
        )
    elif record.steps:
        meaning = f"No step that was tried is faster by more than {gain} beyond its 95 % interval."
    else:
        meaning = "No step was tried."
    if result.verdict == "undecided" and result.reason:
        meaning += f" Undecided: {result.reason}."
    elif result.verdict == "undecided":
        meaning += " Not every step could be tried or confirmed: the table says why (--budget gives more time)."
    title = "Undecided" if result.verdict == "undecided" else "Already optimal"
    return Headline(title, "" if unchanged(result) else measured, meaning, "neutral")


# input shapes whose times the first line names
MOST_TIMES = 3


def times(record: OptimizeRecord) -> list[str]:
    """The milliseconds of each input shape, "27.0 ms → 21.0 ms" for a proven gain; of several "b16 131 ms → 105 ms"."""
    if record.result is not None and record.result.speed and headline(record).tone == "good":
        speed = record.result.speed
        shown = [(row.bucket, f"{numbers.ms(row.base_ms)} ms → {numbers.ms(row.new_ms)} ms") for row in speed]
    else:
        shown = [
            (row.bucket, f"{numbers.ms(row.measurement.median)} ms")
            for row in record.baseline
            if not row.measurement.unstable
        ]
    if len(shown) == 1:
        return [shown[0][1]]
    more = [f"and {len(shown) - MOST_TIMES} more"] if len(shown) > MOST_TIMES else []
    return [f"{bucket} {text}" for bucket, text in shown[:MOST_TIMES]] + more


def first_line(record: OptimizeRecord) -> str:
    """The run in one line: "Llama: 27.0 ms → 21.0 ms, faster by 1.29× [1.27, 1.30]"."""
    head = headline(record)
    verdict = f"{head.title[0].lower()}{head.title[1:]} {head.interval}".strip()
    return f"{record.workload}: {', '.join([*times(record), verdict])}"


def evidence(record: OptimizeRecord) -> str:
    """The evidence behind the figures: "measured on AMD Instinct MI300X"."""
    device = str(record.header.device.get("name", "an unnamed device"))
    arch = str(record.header.device.get("arch", "an unnamed architecture"))
    return {
        "measured": f"measured on {device}",
        "compiled": f"compiled for {arch}, not timed",
        "emulated": f"emulated {arch}, not timed on hardware",
        "model": f"cost model of {arch}, not measured",
    }[record.header.evidence]


def summary(record: OptimizeRecord) -> str:
    """The run in plain words, for somebody who reads nothing else."""
    sentences = [_speed_sentence(record), _steps_sentence(record), _accuracy_sentence(record)]
    return " ".join(sentence for sentence in sentences if sentence)


def _speed_sentence(record: OptimizeRecord) -> str:
    result = record.result
    if result is None or failed_checks(result) or not result.speed:
        return ""
    single = len(result.speed) == 1
    if result.verdict != "faster":
        if single:
            return f"{record.workload} takes {numbers.ms(result.speed[0].base_ms)} ms."
        times = [f"{speed.bucket} {numbers.ms(speed.base_ms)} ms" for speed in result.speed[:3]]
        more = f" and {len(result.speed) - 3} more" if len(result.speed) > 3 else ""
        return f"{record.workload} takes {_listed(times) if not more else ', '.join(times) + more}."
    if len(result.speed) <= 3:
        times = [
            f"{numbers.ms(speed.new_ms)} ms instead of {numbers.ms(speed.base_ms)} ms"
            + ("" if single else f" on {speed.bucket}")
            for speed in result.speed
        ]
        return f"{record.workload} now takes {_listed(times)}."
    slowest = min(result.speed, key=lambda speed: speed.ratio)
    fastest = max(result.speed, key=lambda speed: speed.ratio)
    return (
        f"Over {len(result.speed)} input shapes the gain runs from {numbers.ratio(slowest.ratio, 2)} "
        f"({slowest.bucket}) to {numbers.ratio(fastest.ratio, 2)} ({fastest.bucket})."
    )


def _steps_sentence(record: OptimizeRecord) -> str:
    if not record.steps:
        return "No step was tried."
    last = {step.id: step.verdict for step in record.steps}
    counts = Counter(last.values())
    parts = [f"{counts[name]} {words[counts[name] > 1]}" for name, words in ENDINGS.items() if counts[name]]
    return f"Of {len(last)} step{'s' if len(last) != 1 else ''} {_listed(parts)}."


def _accuracy_sentence(record: OptimizeRecord) -> str:
    result = record.result
    if result is None:
        return ""
    checks: list[BucketError | QualityResult] = [*result.numerics, *result.quality]
    if unchanged(result):
        return "The model itself is unchanged."
    if not checks:
        return "No accuracy check is recorded for the final model."
    failed = sum(not check.passed for check in checks)
    if failed:
        return f"{failed} of {len(checks)} accuracy checks failed."
    return "Every output stays within its error limit" + (
        ", and the workload's own checks pass." if result.quality else "."
    )


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def commands(record: OptimizeRecord) -> list[tuple[str, str]]:
    """(what it does, command) to reproduce the run; RUN is the folder the report lies in."""
    rows = [("Run the optimization again", record.header.command)]
    if record.spec is not None:
        rows.append(
            ("Verify the plan in fresh processes", f"wavecrest verify {_spec(record.spec)} --plan RUN/plan.json")
        )
    rows.append(("Write this report again", "wavecrest report RUN"))
    return rows


def _spec(spec: str) -> str:
    option, space, folder = spec.partition(" ")
    return f"{option} {shlex.quote(folder)}" if option == "--hf" and space else shlex.quote(spec)
