"""Gate: prepared once from the original, it checks candidates."""

from __future__ import annotations

import random
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from wavecrest import records
from wavecrest.errors import StepRefused
from wavecrest.measure import numerics
from wavecrest.measure.workload import Workload, from_example
from wavecrest.ops.common.triton import interpreted_launches
from wavecrest.optimizer.gate import accuracy, behaviour
from wavecrest.optimizer.gate.leaves import Answer
from wavecrest.optimizer.gate.prepare import Preparation
from wavecrest.optimizer.gate.process import ProcessState
from wavecrest.optimizer.gate.reference import Reference, call
from wavecrest.optimizer.gate.rules import ALL_RULES, RULE_OF_KIND, RuleBroken
from wavecrest.optimizer.gate.site import CallWay, Case, Outcome, Site, first_line
from wavecrest.optimizer.gate.watch import OutputWatch

# calls of a candidate beside one for each set of values: a few in every bucket, the others in the bucket whose calls
# take least
CALLS, CALLS_A_BUCKET = 64, 12
# a trial makes fewer where they would take longer than this; the result is always called CALLS times
SECONDS_A_TRIAL, FEWEST_CALLS = 2.0, 6
Rows = list[records.BucketError]


@dataclass(slots=True)
class Gate:
    """The right answers of the original model on several sets of values, and the comparison with candidates.

    Attributes:
        workload: the original with its buckets.
        dtype: whose tolerance floor applies (the model's, or the one the user asked for).
        seed: what the values were drawn from.
        rules: names of `rules.RULES` in force.
        note: why the reference is not in higher precision, if it is not.
        problem: why no candidate can be checked at all, if so.
        summary: what the gate has done so far, for the record.
        behind: gates of models that are held to the original in another way, by what they are.
    """

    workload: Workload
    dtype: str
    seed: int
    rules: frozenset[str] = ALL_RULES
    note: str = ""
    problem: RuleBroken | None = None
    now: Callable[[], float] = time.perf_counter
    summary: records.GateSummary = field(init=False)
    sites: list[Site] = field(default_factory=list)
    other_sites: list[Site] = field(default_factory=list)
    behind: dict[str, Gate] = field(default_factory=dict)
    _ways: dict[str, CallWay] = field(default_factory=dict)
    _concurrent: bool = False
    _random: random.Random = field(init=False)
    _process: ProcessState = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.summary = records.GateSummary(seed=self.seed, rules=sorted(self.rules), buckets=[])
        self._process = ProcessState(self.workload.model)

    @classmethod
    def prepare(
        cls,
        workload: Workload,
        *,
        dtype: str | None = None,
        seed: int | None = None,
        rules: frozenset[str] = ALL_RULES,
        now: Callable[[], float] = time.perf_counter,
        reference: Reference | None = None,
    ) -> Gate:
        """Run the original and its high-precision copy on every bucket and set of values.

        Args:
            workload: the original and its example inputs, which are as before afterwards.
            dtype: whose tolerance floor applies; None: the model's.
            seed: of the values; None draws one, which the summary names.
            rules: names of `rules.RULES` in force.
            now: where time comes from.
            reference: the original in higher precision; None: a copy of it.
        """
        if seed is None:
            seed = secrets.randbits(32) if "seeds" in rules else 0
        gate = cls(workload, dtype or workload.dtype, seed, rules, now=now)
        with gate._timed():
            gate._prepare(reference or Reference(workload))
        return gate

    @classmethod
    def pair(cls, original: Callable[..., Any], *examples: Any, **options: Any) -> Gate:
        """A gate for any function in place of a model: each example is its arguments, as a workload's bucket is.

        Args:
            original: what candidates must agree with; it is called as it is, so without higher precision.
            examples: one or more of what `from_example` takes.
            options: of `prepare`.
        """
        model = original if isinstance(original, nn.Module) else _Function(original)
        workload = from_example(model, examples[0])
        for number, example in enumerate(examples[1:], 2):
            workload.buckets[f"example {number}"] = from_example(model, example).buckets["default"]
        return cls.prepare(workload, **options)

    # ---- the original

    def _prepare(self, reference: Reference) -> None:
        preparation = Preparation(self.workload, reference, self.seed, self.rules, self.now)
        for bucket in self.workload.buckets:
            # as before every call: what the last one has written is not written again by the next
            if self.workload.reset is not None:
                self.workload.reset(bucket)
            row = records.GateBucket(bucket=bucket, values=[])
            self.summary.buckets.append(row)
            site = preparation.site(bucket)
            self.sites.append(site)
            try:
                preparation.add_cases(site, row)
                site.put_back()
                if "shapes" in self.rules:
                    self.other_sites += preparation.other_sites(bucket, row)
            except RuleBroken as error:
                self.problem = self.problem or error
            finally:
                site.put_back()
        self.note = reference.note or reference.how
        if self.sites and self._cheapest.cases:
            self._find_ways(self._cheapest)
            self._note_values()

    @property
    def writes(self) -> dict[str, set[str]]:
        """The paths of inputs, buffers and parameters that the original's calls write, by bucket."""
        return {site.bucket: {path for case in site.cases for path in case.written} for site in self.sites}

    @property
    def _cheapest(self) -> Site:
        """The site whose calls take least: most calls are made there."""
        return min(self.sites, key=lambda site: site.seconds)

    def _find_ways(self, site: Site) -> None:
        """Other ways to call that the original allows: a thread, keywords, gradients, two at a time, and so on."""
        model = self.workload.model
        ways: dict[str, CallWay | str] = {
            "thread": behaviour.in_thread,
            "keyword": behaviour.by_keyword(model, site.inputs) or "its arguments cannot be named",
            "gradients": behaviour.with_gradients,
            "owned": behaviour.after_a_write,
        }
        if written := site.cases[0].written:
            ways["owned"] = "calls write state"
            if any(path in site.snapshot.tensors and site.snapshot.tensors[path][0]._is_view() for path in written):
                ways["gradients"] = "calls write into views, where a gradient history would stay"
        for rule, way in ways.items():
            if rule not in self.rules:
                continue
            if isinstance(way, str):
                self._leave_out(rule, way)
            elif self._answers(site, way):
                self._ways[rule] = way
            else:
                self._leave_out(rule, "the original itself does not allow it")
        if "concurrent" in self.rules and not site.cases[0].written and site.plain_inputs:
            found = behaviour.concurrent_answers(site, model, 2)
            self._concurrent = all(
                isinstance(answer, Answer) and not self._failed(site, site.cases[index], Outcome(answer, {}, {}, {}))
                for index, answer in found
            )
        if not self._concurrent:
            self._leave_out("concurrent", "calls write state, or the original itself does not allow it")
        site.put_back()

    def _note_values(self) -> None:
        """Which rules have nothing to try on this workload."""
        tried = {case.kind for site in self.sites for case in site.cases}
        for kind, rule in RULE_OF_KIND.items():
            if kind not in tried and rule != "variation":
                self._leave_out(
                    rule, "no input is a mask" if kind == "padding" else "no values of this kind; see its notes"
                )
        if not self.other_sites:
            self._leave_out("shapes", "these shapes only: the original takes no others that were tried")
        if any(site.cases and site.cases[0].written for site in self.sites):
            self._leave_out("timing", "calls write state, which base and candidate would find different")

    def _leave_out(self, rule: str, reason: str) -> None:
        if rule in self.rules:
            self.summary.not_run.setdefault(rule, reason)

    def _answers(self, site: Site, way: CallWay) -> bool:
        """Whether the original gives its own answers when it is called this way."""
        try:
            done = site.run(site.model, site.cases[0].values, way=way)
            return not self._failed(site, site.cases[0], done)
        except Exception as error:
            # whatever it raises, candidates are not held to it
            self.summary.notes.append(f"called in another way, the original raised {type(error).__name__}")
            return False

    def _failed(self, site: Site, case: Case, done: Outcome) -> Rows:
        rows = site.judge(case, done, self.dtype, self.workload.dtype, self.rules - {"state", "sharing"})
        return [row for row in rows if not row.passed]

    # ---- candidates

    def put_back(self) -> list[str]:
        """Undo what was changed in this process since the gate was prepared (rule "process"); a phrase a change."""
        return self._process.put_back() if "process" in self.rules else []

    def check(
        self,
        candidate: Callable[..., Any],
        *,
        thorough: bool = False,
        skip: Mapping[str, str] = MappingProxyType({}),
        graphs: bool = False,
        recompiles: bool = False,
    ) -> Rows:
        """The worst error of each output of each bucket over the sets of values, against what is allowed.

        Args:
            candidate: called as the model is.
            thorough: make all CALLS calls, however long they take.
            skip: rules that are left out for this candidate, with the reason, which the summary keeps.
            graphs: it replays recorded graphs, which may raise in other threads, and where an answer is read after
                the next call.
            recompiles: it is compiled again for every other shape, way of calling and global setting: one other
                shape a bucket is enough, the first of them is called by keyword, and no setting is changed.

        Raises:
            RuleBroken: a rule that has no error to show, with its name; a StepRefused.
        """
        if self.problem is not None:
            raise self.problem
        with self._timed():
            self.summary.checks += 1
            for rule, reason in skip.items():
                self._leave_out(rule, reason)
            try:
                rows = self._check(candidate, thorough, self.rules - skip.keys(), graphs, recompiles)
            finally:
                for site in [*self.sites, *self.other_sites]:
                    site.put_back()
                undone = self.put_back()
            if undone:
                raise RuleBroken("process", undone[0])
        return rows

    def _check(
        self, candidate: Callable[..., Any], thorough: bool, rules: frozenset[str], graphs: bool, recompiles: bool
    ) -> Rows:
        if "process" in rules:
            undone = self._process.put_back()
            if undone:
                raise RuleBroken("process", undone[0])
        worst: dict[tuple[str, str], records.BucketError] = {}
        sequences: dict[int, behaviour.Sequence] = {}
        # seconds of a call at each site
        each: dict[int, float] = {}
        with interpreted_launches() as launches:
            for number, site in enumerate(self.sites):
                site.meet(candidate)
                verified, compiling = {}, 0.0
                for index, case in enumerate(site.cases):
                    begin = self.now()
                    verified[index] = self._first_call(site, case, candidate, rules, worst)
                    took = self.now() - begin
                    compiling = took if index == 0 else compiling
                    each[number] = min(each.get(number, took), took)
                    if any(not row.passed for row in worst.values()):
                        return list(worst.values())
                # the first call of a compiled model compiles it, which is not the gate's doing
                self.summary.seconds -= compiling - each[number]
                # buffers of the candidate's own, which the next site compares with those of the start
                site.put_back()
                judge = self._judge_with(rules - {"state", "sharing"})
                sequences[number] = behaviour.Sequence(site, candidate, judge, rules, verified, self._random, graphs)
        if launches:
            self._leave_out("concurrent", "kernels ran in Triton's interpreter, which runs one at a time")
            rules = rules - {"concurrent"}
        main = sequences[self.sites.index(self._cheapest)]
        # a compiled model would compile other code under the setting that fills memory; freed memory is filled for all
        if "poison" in rules and not recompiles:
            with behaviour.filled_memory(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                main.call(0, "poison", call)
        for number, calls in self._calls(each, thorough, rules).items():
            sequences[number].run(calls)
        first = {site.bucket: site for site in reversed(self.other_sites)}
        others = list(first.values()) if recompiles else self.other_sites
        together = recompiles and bool(others) and {"keyword", "shapes"} <= rules and "keyword" in self._ways
        self._other_ways(main, rules - {"keyword"} if together else rules)
        if "shapes" in rules:
            self._other_shapes(candidate, others, rules, worst, by_name=others[0] if together else None)
        for sequence in sequences.values():
            self.summary.calls += sequence.calls
            self.summary.notes += [text for text in sequence.notes if text not in self.summary.notes]
        return list(worst.values())

    def watch(self, bucket: str) -> OutputWatch:
        """The watch for a bucket's timed calls: give the timer its `on_output`, then call its `check`."""
        return OutputWatch(self, bucket)

    def _calls(self, each: dict[int, float], thorough: bool, rules: frozenset[str]) -> dict[int, int]:
        """Calls to make at each site, by the seconds that one takes there."""
        if "repeat" not in rules:
            return dict.fromkeys(each, 3)
        main = self.sites.index(self._cheapest)
        wanted = dict.fromkeys(each, CALLS_A_BUCKET)
        wanted[main] = max(CALLS_A_BUCKET, CALLS - CALLS_A_BUCKET * (len(each) - 1))
        if thorough:
            return wanted
        affordable = {
            number: int(SECONDS_A_TRIAL / seconds) if seconds > 0 else CALLS for number, seconds in each.items()
        }
        return {number: min(calls, max(FEWEST_CALLS, affordable[number])) for number, calls in wanted.items()}

    def _first_call(
        self,
        site: Site,
        case: Case,
        candidate: Callable[..., Any],
        rules: frozenset[str],
        worst: dict[tuple[str, str], records.BucketError],
    ) -> Answer:
        """The candidate's answer to a case, held to all that is known of it; a copy of it if it is right."""
        self.summary.calls += 1
        self._meet_precision(site, case)
        try:
            done = site.run(candidate, case.values)
        except StepRefused:
            raise
        except Exception as error:
            raise StepRefused(
                f"it raised {first_line(error).replace(': ', f' on bucket {site.label}: ', 1)}"
            ) from error
        answer = done.answer.copy()
        done = Outcome(answer, done.sharing, done.written, done.plain)
        rows = self._judge_with(rules)(site, case, done)
        self.summary.leaves += len(rows)
        for row in rows:
            if not row.passed and case.kind != "example" and row.rule == "accuracy":
                row.rule = RULE_OF_KIND[case.kind]
                row.note = "; ".join(text for text in (row.note, f"on values of the kind {case.kind}") if text)
            key = (row.bucket, row.output)
            if key not in worst or badness(row) > badness(worst[key]):
                worst[key] = row
        return answer

    def _judge_with(self, rules: frozenset[str]) -> behaviour.Judge:
        return lambda site, case, done: site.judge(case, done, self.dtype, self.workload.dtype, rules)

    def _meet_precision(self, site: Site, case: Case) -> None:
        """How far off the original is in the lower precision that was asked for, if one was."""
        if self.dtype == self.workload.dtype:
            return
        wanted = [path for path, row in case.expected.items() if self.dtype not in row.lowered and row.original is None]
        if not wanted:
            return
        kind = site.variations.varied[0].tensor.device.type if site.variations.varied else "cpu"

        def lowered(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(kind, dtype=getattr(torch, self.dtype)):
                return site.model(*args, **kwargs)

        try:
            answer = dict(site.run(lowered, case.values, look=False).answer.numeric())
        except Exception as error:
            # nothing to compare with
            self.summary.notes.append(f"the original does not run in {self.dtype}: {type(error).__name__}")
            answer = {}
        for path in wanted:
            out = answer.get(path)
            row = case.expected[path]
            if out is not None and out.shape == row.reference.shape:
                found = numerics.compare(out, row.reference)
                if found.nonfinite_match:
                    row.lowered[self.dtype] = (found, accuracy.far_off(out, row.reference))

    def _other_ways(self, sequence: behaviour.Sequence, rules: frozenset[str]) -> None:
        if "thread" in rules and "thread" in self._ways:
            sequence.thread()
        for rule in ("keyword", "gradients", "owned"):
            # a function in place of a model need not have the model's names
            named = rule != "keyword" or isinstance(sequence.candidate, nn.Module)
            if rule in rules and rule in self._ways and named:
                sequence.call(0, rule, self._ways[rule])
        if "concurrent" in rules and self._concurrent:
            sequence.concurrent()

    def _other_shapes(
        self,
        candidate: Callable[..., Any],
        others: Sequence[Site],
        rules: frozenset[str],
        worst: dict[tuple[str, str], records.BucketError],
        by_name: Site | None = None,
    ) -> None:
        """The candidate at other sites; at `by_name` with arguments by keyword, which is the rule then named."""
        # a compiled model compiles another shape by itself, and its own shape's code stays as it is
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            for site in self.sites:
                site.put_back()
            for site in others:
                site.meet(candidate)
                case = site.cases[0]
                self._meet_precision(site, case)
                self.summary.calls += 1
                try:
                    rows = self._at_other_shape(candidate, site, case, rules, by_keyword=site is by_name)
                except RuleBroken:
                    raise
                except Exception as error:
                    raise RuleBroken("shapes", f"on {site.label}: {first_line(error)}") from error
                finally:
                    site.put_back()
                for row in rows:
                    if not row.passed:
                        row = row.model_copy(update={"rule": "shapes", "note": f"on {site.label}"})
                        worst[(row.bucket, f"{row.output}, {site.label}")] = row

    def _at_other_shape(
        self, candidate: Callable[..., Any], site: Site, case: Case, rules: frozenset[str], *, by_keyword: bool
    ) -> Rows:
        """The rows of one call.

        Raises:
            RuleBroken: "keyword": it is wrong with arguments by name, and right without; "shapes".
        """

        def judged(way: CallWay) -> Rows:
            try:
                return self._judge_with(rules)(site, case, site.run(candidate, case.values, way=way))
            except RuleBroken as error:
                raise RuleBroken("shapes", f"on {site.label}: {error}") from error

        if not by_keyword:
            return judged(call)
        problem = ""
        try:
            rows = judged(self._ways["keyword"])
            if all(row.passed for row in rows):
                return rows
            problem = failures(rows)
        except Exception as error:
            problem = first_line(error)
        # wrong by keyword: of the shape or of the keywords, which one more compilation tells
        rows = judged(call)
        if all(row.passed for row in rows):
            raise RuleBroken("keyword", f"on {site.label}: {problem}")
        return rows

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = self.now()
        try:
            yield
        finally:
            self.summary.seconds += self.now() - begin


class _Function(nn.Module):
    """A function in place of a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self._function(*args, **kwargs)


def failures(rows: Rows) -> str:
    """The failed rows in one sentence, or an empty string."""
    failed = [row for row in rows if not row.passed]
    if not failed:
        return ""
    worst = max(failed, key=badness)
    text = f"{worst.output} of bucket {worst.bucket}: error {worst.error:.2e}, allowed {worst.limit:.2e}"
    if worst.note:
        text += f" ({worst.note})"
    return text + (f"; {len(failed)} outputs fail" if len(failed) > 1 else "")


def badness(row: records.BucketError) -> float:
    """Order of rows: the failed ones above all others, NaN as the worst."""
    if not row.passed:
        return 1e9 + (row.error if row.error == row.error else float("inf"))
    return row.error / row.limit if row.limit else row.error
