"""A site of comparison: example inputs of one shape, the state that calls may write, and the right answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from wavecrest import records
from wavecrest.measure import numerics
from wavecrest.measure.workload import Inputs
from wavecrest.optimizer.gate import accuracy
from wavecrest.optimizer.gate.accuracy import Expected
from wavecrest.optimizer.gate.inputs import Variations
from wavecrest.optimizer.gate.leaves import (
    Answer,
    Leaf,
    check_sharing,
    check_structure,
    collect,
    shared_memory,
    storages,
)
from wavecrest.optimizer.gate.reference import Reference, call
from wavecrest.optimizer.gate.rules import RuleBroken
from wavecrest.optimizer.gate.snapshot import Snapshot, in_parts, same_bits, write

if TYPE_CHECKING:
    from torch import nn

# bytes of an answer above which its reference is held in float32, and fewer kinds of values are tried
LARGE = 1 << 25
# buffers and small parameters up to this many bytes in all are compared after every call; the rest after every step
TRACKED = 1 << 30
SMALL_PARAMETER = 1 << 16
# a number that a model hardly writes by itself. A smaller one it does: bfloat16 has 128 numbers from 0.25 to 0.5
UNLIKELY = 30_000.0

# how a call is made: the function and its inputs -> the result
CallWay = Callable[[Callable[..., Any], Inputs], Any]


@dataclass(frozen=True, slots=True)
class Written:
    """The change that a call made to a tensor of its inputs or of the model.

    Attributes:
        places: where the bits changed, in the flat tensor; None where its shape or dtype changed.
        values: what stands there (all of it without `places`).
    """

    places: Tensor | None
    values: Tensor


@dataclass(slots=True)
class Case:
    """One set of values and the right answer.

    Attributes:
        kind: "example", or one of `inputs.KINDS`.
        values: of the inputs' tensors, in the order of `Variations.varied`.
        answer: the original's leaves; of floating tensors only type and dtype are held.
        expected: right values of tensors and numbers, by path.
        sharing: whose memory the original's outputs share.
        written: what the original's call left in tensors, by path, at all places that it wrote, changed or not.
        right: the right values there, for floats.
        plain: numbers and strings that the inputs hold after the call, by path.
    """

    kind: str
    values: list[Tensor]
    answer: Answer
    expected: dict[str, Expected]
    sharing: dict[str, set[str]]
    written: dict[str, Written]
    right: dict[str, Expected]
    plain: dict[str, Any]


@dataclass(slots=True)
class Outcome:
    """The effects of one call: the answer (not copied), shared memory, tensors written, plain values after it."""

    answer: Answer
    sharing: dict[str, set[str]]
    written: dict[str, Written]
    plain: dict[str, Any]


def tracked_state(model: nn.Module) -> dict[str, Tensor]:
    """Buffers and small parameters of a model, by the names that refusals give them."""
    found = {f"buffer {name}": tensor for name, tensor in model.named_buffers()}
    found |= {
        f"parameter {name}": tensor for name, tensor in model.named_parameters() if tensor.nbytes <= SMALL_PARAMETER
    }
    kept, size = {}, 0
    for name, tensor in in_parts(found).items():
        size += tensor.nbytes
        if size <= TRACKED and tensor.layout == torch.strided:
            kept[name] = tensor
    return kept


class Site:
    """Inputs of one shape with their cases.

    Attributes:
        label: bucket, with the shape where it is not the bucket's own.
        bucket: name of the bucket.
        cases: sets of values with the right answers; the example is first.
        seconds: that a call of the original takes; infinite while not known.
        notes: what could not be tried.
    """

    def __init__(self, model: nn.Module, bucket: str, label: str, inputs: Inputs, variations: Variations) -> None:
        self.model, self.bucket, self.label = model, bucket, label
        self.inputs, self.variations = inputs, variations
        self.cases: list[Case] = []
        self.seconds = float("inf")
        self.notes: list[str] = []
        self._roots = [*((f"args[{i}]", value) for i, value in enumerate(inputs.args)), *inputs.kwargs.items()]
        self.snapshot = Snapshot([*self._roots, *tracked_state(model).items()])
        # the candidate's own tensors that stand for tracked ones, by path
        self._stand_ins: dict[str, Tensor] = {}
        self._owners = self._owned_by(model)
        # floating tensors that the original's calls write
        self._paths: set[str] = set()

    @property
    def plain_inputs(self) -> bool:
        """Whether the arguments are tensors and plain values, so that a copy of them shares no state."""
        leaves, _ = pytree.tree_flatten((self.inputs.args, dict(self.inputs.kwargs)))
        return all(leaf is None or isinstance(leaf, Tensor | bool | int | float | str) for leaf in leaves)

    def _owned_by(self, *models: Any) -> dict[int, str]:
        owners: dict[int, str] = {}
        for model in models:
            if isinstance(model, torch.nn.Module):
                tensors = [*model.parameters(), *model.buffers()]
                owners |= storages(("the model's weights", tensor) for tensor in tensors)
        return owners | storages((f"the caller's {path}", tensor) for path, tensor in self.inputs.tensors())

    def meet(self, candidate: Any) -> None:
        """Look at a candidate's own buffers: those that stand for tracked ones are compared by name."""
        self._owners = self._owned_by(self.model, candidate)
        self._stand_ins = {}
        if not isinstance(candidate, torch.nn.Module):
            return
        own = {f"buffer {name}": tensor for name, tensor in candidate.named_buffers()}
        for path, (tensor, copy) in self.snapshot.tensors.items():
            plain = path.removeprefix("buffer ")
            for name, other in own.items():
                same = path.startswith("buffer ") and (name == path or name.endswith(f".{plain}"))
                # one with other values is a constant of the candidate's own
                if same and other is not tensor and same_bits(other, copy):
                    self._stand_ins[path] = other

    def run(
        self,
        function: Callable[..., Any],
        values: list[Tensor],
        *,
        way: CallWay = call,
        counted: bool = True,
        look: bool = True,
    ) -> Outcome:
        """Put the state back, write values into the bucket's own tensors, call.

        Args:
            function: original or candidate.
            values: see `Case`.
            way: how it is called.
            counted: whether PyTorch's version counter sees the new values.
            look: find out what the call wrote; without it only what the original writes is put back before.
        """
        self.put_back(all_of_it=look)
        self.variations.write(values, counted=counted)
        try:
            result = way(function, self.inputs)
        finally:
            self.snapshot.cut_history()
        answer = collect(result, self.snapshot.names)
        sharing = shared_memory(answer, self._owners)
        written = dict(self._written(values)) if look else {}
        plain = self._plain() if look else {}
        return Outcome(answer, sharing, written, plain)

    def put_back(self, *, all_of_it: bool = True) -> None:
        """State as it was at the start: all of it, or what the original's calls write."""
        self.snapshot.restore_containers()
        written = {path for case in self.cases for path in case.written}
        for path, (tensor, copy) in self.snapshot.tensors.items():
            if not all_of_it and path not in written:
                continue
            for target in (tensor, self._stand_ins.get(path)):
                if target is not None and not same_bits(target, copy):
                    write(target, copy)

    def before(self, values: list[Tensor]) -> dict[str, Tensor]:
        """The tracked tensors' values before a call with `values`, by path."""
        found = {path: copy for path, (_, copy) in self.snapshot.tensors.items()}
        return found | {item.path: value for item, value in zip(self.variations.varied, values, strict=True)}

    def _written(self, values: list[Tensor]) -> Iterator[tuple[str, Written]]:
        before, now = self.before(values), self.snapshot.current()
        for path in before.keys() | now.keys():
            after = self._stand_ins.get(path, now.get(path))
            was = before.get(path)
            if after is None:
                yield path, Written(None, torch.empty(0))
            elif was is None or was.shape != after.shape or was.dtype != after.dtype:
                yield path, Written(None, after.detach().clone())
            elif not same_bits(after, was):
                flat, old = after.detach().reshape(-1), was.reshape(-1)
                places = ((flat != old) & ~(flat.isnan() & old.isnan())).nonzero().reshape(-1)
                # zero and minus zero are equal
                if places.numel():
                    yield path, Written(places, flat[places].clone())

    def _plain(self) -> dict[str, Any]:
        answer = Answer()
        for name, root in self._roots:
            part = collect(root, strict=False)
            answer.leaves |= {f"{name}.{path}": leaf for path, leaf in part.leaves.items() if leaf.kind == "exact"}
        return {path: leaf.value for path, leaf in answer.leaves.items()}

    def add_case(self, kind: str, values: list[Tensor], reference: Reference, *, hold: int = LARGE) -> Outcome:
        """Run the original and the reference on values, and hold the right answers.

        Returns:
            What came of the original's call.
        """
        places = self._probe(values)
        done = self.run(self.model, values)
        if self._note_paths(done.written):
            places = self._probe(values)
            done = self.run(self.model, values)
        done.written = self._all_written(done.written, places)
        original = done.answer.copy()
        self.put_back()
        self.variations.write(values)
        high = reference.answer(self.inputs)
        answers = dict(high[0].numeric()) if high is not None else {}
        after = high[1] if high is not None else {}
        expected, edge = {}, kind == "edges"
        for path, tensor in original.numeric():
            better = answers.get(path)
            better = tensor if better is None or better.shape != tensor.shape else better
            expected[path] = Expected.of(path, tensor, better, edge=edge, hold=hold)
        right = {}
        for path, row in done.written.items():
            better, tracked = after.get(path), self.snapshot.tensors.get(path)
            same = better is not None and tracked is not None and better.shape == tracked[1].shape
            values_of = row.values
            if better is not None and same and row.places is not None:
                values_of = better.reshape(-1)[row.places]
            elif better is not None and row.places is None and better.shape == row.values.shape:
                values_of = better
            right[path] = Expected.of(path, row.values, values_of, edge=edge, hold=hold)
        slim = Answer({path: _slim(leaf) for path, leaf in original.leaves.items()}, original.containers)
        self.cases.append(Case(kind, values, slim, expected, done.sharing, done.written, right, done.plain))
        return Outcome(original, done.sharing, done.written, done.plain)

    def _probe(self, values: list[Tensor]) -> dict[str, Tensor]:
        """The places that a call of the original with these values writes, in flat tensors by path.

        The state may hold what the call leaves: the keys of the same token in a cache, or by chance, as two bfloat16
        values are the same in one of some hundred places. Such a place shows no change, and a step that rounds
        otherwise changes it. So the original is called where the tensors that it writes hold one number.
        """
        if not self.cases:
            # which tensors; what an object among the arguments holds stays, such as the position in a cache
            pairs = zip(self.variations.varied, self.variations.draw("noise"), strict=True)
            other = [item.example if "." in item.path else value for item, value in pairs]
            try:
                self._note_paths(self.run(self.model, other).written)
            except Exception as error:
                # the example alone shows then which tensors are written
                self.notes.append(f"not called with other values first: the original raised {first_line(error)}")
        floats = {path: self.snapshot.tensors[path][0] for path in sorted(self._paths)}
        # floats of 8 bits have no such number
        floats = {path: tensor for path, tensor in floats.items() if tensor.element_size() > 1}
        if not floats:
            return {}
        self.put_back()
        self.variations.write(values)
        for tensor in floats.values():
            write(tensor, torch.full_like(tensor, UNLIKELY))
        try:
            call(self.model, self.inputs)
        except Exception as error:
            self.notes.append(f"places that calls write are known by their changes alone: {first_line(error)}")
            return {}
        found = {}
        for path, tensor in floats.items():
            flat = tensor.detach().reshape(-1)
            found[path] = (flat != torch.full_like(flat[:1], UNLIKELY)).nonzero().reshape(-1)
        return found

    def _note_paths(self, written: dict[str, Written]) -> bool:
        """Whether a call wrote floating tensors that were not known to be written."""
        known = len(self._paths)
        for path, row in written.items():
            if row.places is not None and path in self.snapshot.tensors and accuracy.is_float(row.values):
                self._paths.add(path)
        return len(self._paths) > known

    def _all_written(self, seen: dict[str, Written], places: dict[str, Tensor]) -> dict[str, Written]:
        """The values that the last call left, at all places that it wrote, changed by it or not."""
        now, found = self.snapshot.current(), dict(seen)
        for path, more in places.items():
            tensor, row = now.get(path), seen.get(path)
            if tensor is None or (row is not None and row.places is None) or not more.numel():
                continue
            both: Any = more if row is None or row.places is None else torch.cat((row.places, more))
            every = both.unique()
            if int(every.max()) < tensor.numel():
                found[path] = Written(every, tensor.detach().reshape(-1)[every].clone())
        return found

    def own_rounding(self, calls: Sequence[Outcome], reference: Reference, paths: Iterable[str]) -> dict[str, float]:
        """The least error of the original's answers to the first case against the model in higher precision.

        Some libraries' kernels add in any order. A deep model makes of that a difference as large as its rounding
        error, and one in higher precision does not; random numbers in the model change both.

        Returns:
            By path the relative error. A path is missing where the model in higher precision differs from itself too,
            and all are where it cannot be made.
        """
        twice = []
        for _ in range(2):
            self.put_back()
            self.variations.write(self.cases[0].values)
            answered = reference.answer(self.inputs)
            if answered is None:
                return {}
            twice.append(dict(answered[0].numeric()))
        one, other = twice
        found = {}
        for path in paths:
            ours = [call.answer.leaves[path].value for call in calls]
            if path not in one or path not in other or not ours[0].is_floating_point():
                continue
            limits = numerics.tolerance("model", str(one[path].dtype).removeprefix("torch."))
            if one[path].shape == ours[0].shape and numerics.compare(other[path], one[path]).within(limits):
                found[path] = min(numerics.compare(answer, one[path]).relative for answer in ours)
        return found

    def judge(
        self, case: Case, outcome: Outcome, dtype: str, model_dtype: str, rules: frozenset[str]
    ) -> list[records.BucketError]:
        """Hold an outcome to a case.

        Raises:
            RuleBroken: its structure, types, exact leaves, shared memory or state are wrong.
        """
        check_structure(outcome.answer, case.answer, rules)
        if "sharing" in rules:
            check_sharing(outcome.sharing, case.sharing)
        rows: list[records.BucketError] = []
        for path, tensor in outcome.answer.numeric():
            if path in case.expected:
                rows += accuracy.judge(self.bucket, path, tensor, case.expected[path], dtype, model_dtype, rules)
        if "state" in rules:
            rows += self._judge_state(case, outcome, dtype)
        return rows

    def _judge_state(self, case: Case, outcome: Outcome, dtype: str) -> Iterator[records.BucketError]:
        if outcome.plain != case.plain:
            paths = outcome.plain.keys() | case.plain.keys()
            path = min(p for p in paths if outcome.plain.get(p) != case.plain.get(p))
            raise RuleBroken(
                "state",
                f"after the call {path} is {outcome.plain.get(path)!r:.60} where the original leaves "
                f"{case.plain.get(path)!r:.60}",
            )
        more = outcome.written.keys() - case.written.keys()
        if more:
            raise RuleBroken("state", f"it writes into {min(more)}, which the original leaves alone")
        before = self.before(case.values)
        floor = numerics.tolerance("model", dtype)
        for path, right in case.written.items():
            got, whole = outcome.written.get(path), before.get(path)
            if right.places is None or whole is None or (got is not None and got.places is None):
                values = got.values if got is not None else torch.empty(0)
                expected = case.right[path]
            else:
                after = whole.reshape(-1).clone()
                if got is not None and got.places is not None:
                    after[got.places] = got.values
                values, expected = after[right.places], case.right[path]
                after[right.places] = whole.reshape(-1)[right.places]
                # beside the places that the original writes only what rounding explains may differ
                scale = float(_wide(right.values).abs().max()) if accuracy.is_float(right.values) else 0.0
                if not _near(after, whole.reshape(-1), floor.relative * scale):
                    count = int((after != whole.reshape(-1)).sum())
                    raise RuleBroken(
                        "state",
                        f"it writes into places of {path} that the original leaves alone: {count} beside the "
                        f"{len(right.places)} that the original writes, on values of the kind {case.kind}",
                    )
            for row in accuracy.judge(self.bucket, path, values, expected, dtype, dtype, frozenset({"accuracy"})):
                yield row.model_copy(update={"output": f"{path} after the call", "rule": "state"})


def _near(a: Tensor, b: Tensor, limit: float) -> bool:
    if limit == 0 or not accuracy.is_float(a):
        return same_bits(a, b)
    a, b = _wide(a), _wide(b)
    return numerics.compare(a, b).nonfinite_match and float((a - b).abs().nan_to_num().max()) <= limit


def _wide(a: Tensor) -> Tensor:
    """An 8-bit float in float32: PyTorch has hardly an operation of these."""
    return a.float() if a.is_floating_point() and a.element_size() == 1 else a


def _slim(leaf: Leaf) -> Leaf:
    return leaf if leaf.kind == "exact" else Leaf(leaf.kind, leaf.value.new_empty(0), leaf.type)


def same_answer(a: Answer, b: Answer) -> bool:
    """Whether two answers have the same leaves, bit for bit."""
    if a.leaves.keys() != b.leaves.keys():
        return False
    for path, leaf in a.leaves.items():
        other = b.leaves[path]
        if leaf.kind != other.kind:
            return False
        same = leaf.value == other.value if leaf.kind == "exact" else same_bits(leaf.value, other.value)
        if not same:
            return False
    return True


def first_line(error: BaseException) -> str:
    """An error's class and the first line of its message."""
    lines = str(error).strip().splitlines() or ["(no message)"]
    return f"{type(error).__name__}: {lines[0]}"
