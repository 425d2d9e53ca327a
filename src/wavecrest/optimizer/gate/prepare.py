"""Right answers of the original in one bucket: sets of values and other shapes that it can answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from wavecrest import records
from wavecrest.measure import numerics
from wavecrest.measure.workload import Inputs, Workload
from wavecrest.optimizer.gate import accuracy
from wavecrest.optimizer.gate.inputs import KINDS, Variations, embedding_rows, other_shapes
from wavecrest.optimizer.gate.leaves import Answer, check_structure
from wavecrest.optimizer.gate.reference import Reference, call
from wavecrest.optimizer.gate.rules import RULE_OF_KIND, RuleBroken
from wavecrest.optimizer.gate.site import LARGE, Case, Outcome, Site, first_line, same_answer, tracked_state
from wavecrest.optimizer.gate.snapshot import Snapshot

# values beside the example and the noise are left out where reference outputs take longer than this, in seconds
SECONDS_A_BUCKET = 8.0
# and so are shapes after the first one
SECONDS_OF_SHAPES = 3.0
# a value at the edge is no test where the original itself is this far from its reference
MOST_OWN_ERROR = 0.1
# further draws of values until the original's answers differ
DRAWS = 4
# shapes tried beside a bucket's own
OTHER_SHAPES = 3


@dataclass(frozen=True, slots=True)
class Preparation:
    """Makes the sites of a workload's buckets.

    Attributes:
        workload: the original, whose example inputs are as before afterwards.
        reference: the original in higher precision.
        seed: of the values.
        rules: names of `rules.RULES` in force.
        now: where time comes from.
    """

    workload: Workload
    reference: Reference
    seed: int
    rules: frozenset[str]
    now: Callable[[], float]

    def site(self, bucket: str) -> Site:
        """The site of a bucket, without a case yet."""
        inputs = self.workload.buckets[bucket]
        variations = Variations.of(inputs, self.seed, self._embedded(inputs))
        return Site(self.workload.model, bucket, bucket, inputs, variations)

    def add_cases(self, site: Site, row: records.GateBucket) -> None:
        """The original's answers at a bucket's site, on the example and on other values.

        Args:
            site: of `site`.
            row: gets what was tried, and what was not with the reason.

        Raises:
            RuleBroken: candidates cannot be held to this original.
        """
        begin = self.now()
        first = site.add_case("example", site.variations.draw("example"), self.reference)
        row.notes += site.notes
        self._check_determinism(site, first, row)
        differs = self._add_values(site, first, row, begin)
        if {"dependence", "variation"} <= self.rules and not differs:
            nothing = all(leaf.value is None for leaf in first.answer.leaves.values()) and not first.written
            what = "returns nothing and writes nothing" if nothing else "answers the same on all inputs tried"
            raise RuleBroken("dependence", f"not verified: the original {what}{_zeros(site.model)}")
        row.values = [case.kind for case in site.cases]

    def other_sites(self, bucket: str, row: records.GateBucket) -> list[Site]:
        """Sites of shapes that no bucket has, of those that the original takes."""
        begin, found = self.now(), []
        for label, resized in other_shapes(self.workload.buckets[bucket]):
            if len(row.shapes) >= (OTHER_SHAPES if self.now() - begin < SECONDS_OF_SHAPES else 1):
                break
            variations = Variations.of(resized, self.seed, None)
            site = Site(self.workload.model, bucket, f"{bucket}, {label}", resized, variations)
            try:
                site.add_case("example", variations.draw("example"), self.reference)
            except Exception as error:
                # most models fix some of their sizes
                row.notes.append(f"not {label}: the original raised {first_line(error)[:80]}")
                continue
            finally:
                site.put_back()
            found.append(site)
            row.shapes.append(label)
        if not row.shapes:
            row.notes.append("these shapes only")
        return found

    def _embedded(self, inputs: Inputs) -> dict[int, int]:
        roots = [*((f"args[{i}]", value) for i, value in enumerate(inputs.args)), *inputs.kwargs.items()]
        before = Snapshot([*roots, *tracked_state(self.workload.model).items()])
        try:
            with embedding_rows(self.workload.model) as found:
                call(self.workload.model, inputs)
            return dict(found)
        finally:
            before.restore()

    def _check_determinism(self, site: Site, first: Outcome, row: records.GateBucket) -> None:
        """The original twice on the same values: what differs beyond rounding cannot be verified."""
        if "determinism" not in self.rules:
            return
        begin = self.now()
        again = site.run(site.model, site.cases[0].values)
        site.seconds = self.now() - begin
        check_structure(again.answer, first.answer, self.rules)
        floor = numerics.tolerance("model", self.workload.dtype)
        beyond = {}
        for path, tensor in again.answer.numeric():
            found = numerics.compare(tensor, first.answer.leaves[path].value)
            limits = floor if accuracy.is_float(tensor) else numerics.Tolerance(0.0, 0.0)
            if not found.within(limits):
                beyond[path] = found
        own = site.own_rounding((first, again), self.reference, beyond) if beyond else {}
        for path, found in beyond.items():
            if path not in own or not found.nonfinite_match or found.relative > own[path]:
                raise RuleBroken(
                    "determinism",
                    f"not verifiable: called twice with the same inputs, the original's own {path} differs by "
                    f"{found.relative:.2g} (random numbers in the model?)",
                )
            row.notes.append(
                f"not deterministic: called twice, the original's own {path} differs by {found.relative:.2g}, as "
                f"rounding does: in higher precision it does not, and from that it is {own[path]:.2g} away"
            )

    def _add_values(self, site: Site, first: Outcome, row: records.GateBucket, begin: float) -> bool:
        """Cases of other values; returns whether the original's answers differ between any two."""
        differs = False
        roles = site.variations.has
        for kind in KINDS:
            if RULE_OF_KIND[kind] not in self.rules or (kind != "noise" and "variation" not in self.rules):
                continue
            if not roles & ({"mask"} if kind == "padding" else {"data", "ids"}):
                continue
            if kind != "noise" and (first.answer.nbytes > 8 * LARGE or self.now() - begin > SECONDS_A_BUCKET):
                row.notes.append(f"no {kind}: the reference outputs are large or slow")
                continue
            differs |= self._add_kind(site, kind, first, row)
        for number in range(1, DRAWS):
            if differs or "variation" not in self.rules or not roles & {"data", "ids"}:
                break
            differs |= self._add_kind(site, "noise", first, row, number)
        return differs

    def _add_kind(
        self,
        site: Site,
        kind: str,
        first: Outcome,
        row: records.GateBucket,
        number: int = 0,
    ) -> bool:
        """One case more, if the original can answer it; returns whether its answer differs from the first one."""
        for attempt in range(number, number + (3 if kind == "edges" else 1)):
            try:
                found = site.add_case(kind, site.variations.draw(kind, attempt), self.reference)
            except RuleBroken:
                raise
            except Exception as error:
                row.notes.append(f"no {kind}: the original raised {first_line(error)}")
                return False
            if kind == "edges" and not _is_usable(site.cases[-1], found.answer):
                site.cases.pop()
                continue
            return not same_answer(found.answer, first.answer) or _differs(found, first)
        row.notes.append(f"no {kind}: the original's own answers are not accurate there")
        return False


def _zeros(model: nn.Module) -> str:
    """The likely cause of an answer that never changes: a new head of zeros, as torchvision's ViT has it."""
    last = next(
        ((name, row) for name, row in reversed(list(model.named_modules())) if isinstance(row, nn.Linear)), None
    )
    if last is None or bool(last[1].weight.any()):
        return ""
    return f"; the weights of its last linear layer, {last[0] or 'the model'}, are all zero: load trained ones"


def _is_usable(case: Case, answer: Answer) -> bool:
    """Whether the original is finite and accurate enough on these values to tell a wrong answer from a right one."""
    for path, tensor in answer.numeric():
        if not accuracy.is_float(tensor):
            continue
        own = case.expected[path].own
        finite = bool(torch.isfinite(torch.view_as_real(tensor) if tensor.is_complex() else tensor).all())
        if not finite or own.relative > MOST_OWN_ERROR:
            return False
    return True


def _differs(a: Outcome, b: Outcome) -> bool:
    if a.written.keys() != b.written.keys():
        return True
    return any(not torch.equal(row.values, b.written[path].values) for path, row in a.written.items())
