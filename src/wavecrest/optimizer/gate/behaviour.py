"""Calls over time: many of them, at other addresses, from other threads, with earlier answers held."""

from __future__ import annotations

import functools
import inspect
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from wavecrest.measure.workload import Inputs, begin_step
from wavecrest.optimizer.gate.accuracy import is_float
from wavecrest.optimizer.gate.leaves import Answer, collect, shared_memory
from wavecrest.optimizer.gate.reference import call
from wavecrest.optimizer.gate.rules import RuleBroken
from wavecrest.optimizer.gate.site import CallWay, Case, Outcome, Site, first_line, same_answer

if TYPE_CHECKING:
    from wavecrest import records

# answers of earlier calls that are held while later ones run
HELD = 3
# bytes of an answer above which only one is held
LARGE_ANSWER = 1 << 28
# blocks of freed memory that are filled before a call, and their largest size
POISONED_BLOCKS = 4
MOST_POISON = 1 << 26

# what judges an outcome of a case: rows, or RuleBroken
Judge = Callable[[Site, Case, Outcome], "list[records.BucketError]"]


def in_thread(function: Callable[..., Any], inputs: Inputs) -> Any:
    """Call in a new thread, whose stack holds none of the gate's functions."""
    begin_step()
    quiet = torch.no_grad()(function)
    device = next((tensor.device for _, tensor in inputs.tensors() if tensor.is_cuda), None)
    start = functools.partial(torch.cuda.set_device, device) if device is not None else None
    with ThreadPoolExecutor(1, initializer=start) as pool:
        return pool.submit(quiet, *inputs.args, **inputs.kwargs).result()


def after_a_write(function: Callable[..., Any], inputs: Inputs) -> Any:
    """Call, write into the answer as a caller may, and call again."""
    first = collect(call(function, inputs), strict=False)
    callers = {tensor.untyped_storage().data_ptr() for _, tensor in inputs.tensors()}
    for path, leaf in first.leaves.items():
        if leaf.kind != "tensor" or leaf.value.layout != torch.strided or not leaf.value.numel():
            continue
        if leaf.value.untyped_storage().data_ptr() in callers or "itself" in shared_memory(first, {}).get(path, ()):
            continue
        with torch.inference_mode(leaf.value.is_inference()):
            leaf.value.fill_(float("nan") if is_float(leaf.value) else 1)
    return call(function, inputs)


def with_gradients(function: Callable[..., Any], inputs: Inputs) -> Any:
    """Call with gradients enabled."""
    begin_step()
    with torch.enable_grad():
        return inputs.call(function)


def by_keyword(model: nn.Module, inputs: Inputs) -> CallWay | None:
    """Call with all arguments by name; None where the model's signature has no names for them."""
    try:
        bound = inspect.signature(model.forward).bind(*inputs.args, **inputs.kwargs)
    except (TypeError, ValueError):
        return None
    parameters = inspect.signature(model.forward).parameters
    kinds = {parameters[name].kind for name in bound.arguments}
    if not inputs.args or kinds - {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}:
        return None
    names = list(bound.arguments)

    def way(function: Callable[..., Any], inputs: Inputs) -> Any:
        named = dict(zip(names, inputs.args, strict=False))
        return call(function, Inputs((), named | dict(inputs.kwargs)))

    return way


@contextmanager
def filled_memory() -> Iterator[None]:
    """Memory that PyTorch gives without values holds NaN (the largest number, for integers) in this block."""
    settings: Any = torch.utils.deterministic
    before = settings.fill_uninitialized_memory
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def poison(answer: Answer) -> None:
    """Fill freed blocks of the sizes of an answer's tensors with NaN: memory used again holds no earlier answer."""
    blocks = []
    for _, tensor in answer.numeric():
        if 0 < tensor.nbytes <= MOST_POISON and tensor.layout == torch.strided:
            for _ in range(POISONED_BLOCKS):
                blocks.append(torch.full((tensor.nbytes,), 0xFF, dtype=torch.uint8, device=tensor.device))
    del blocks


@dataclass(slots=True)
class Sequence:
    """Many calls of one candidate at one site.

    Attributes:
        site: where.
        candidate: what is called.
        judge: holds an outcome to its case.
        rules: the rules in force.
        verified: the candidate's own answers that the gate found right, by number of the case.
        random: draws the order of cases.
        graphs: the candidate replays recorded graphs, which may refuse other threads and later reads with an error.
        notes: what could not be tried, and answers that differ in their bits from call to call.
        calls: how many were made.
    """

    site: Site
    candidate: Callable[..., Any]
    judge: Judge
    rules: frozenset[str]
    verified: dict[int, Answer]
    random: random.Random
    graphs: bool = False
    notes: list[str] = field(default_factory=list)
    calls: int = 0
    _held: deque[tuple[Answer, Answer]] = field(default_factory=deque)

    def _elsewhere(self, index: int) -> CallWay:
        """Call with copies of the tensors, while the bucket's own hold other values; a cache stays the same."""
        other = self.site.cases[(index + 1) % len(self.site.cases)].values

        def way(function: Callable[..., Any], inputs: Inputs) -> Any:
            args, kwargs = pytree.tree_map(
                lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (inputs.args, dict(inputs.kwargs))
            )
            self.site.variations.write_plain(other)
            return call(function, Inputs(args, kwargs))

        return way

    def run(self, calls: int) -> None:
        """Call in turn on all cases, in random order, at old and new addresses; answers are held over later calls.

        Raises:
            RuleBroken: "repeat", "pointers", "addresses" or "held".
        """
        rules = ["repeat", *(rule for rule in ("pointers", "addresses") if rule in self.rules)]
        for number in range(calls):
            rule = rules[number % len(rules)]
            index = self.random.randrange(len(self.site.cases))
            way = self._elsewhere(index) if rule == "addresses" else call
            if "poison" in self.rules:
                poison(self.verified[index])
            where = f"call {number + 1} of {calls}"
            try:
                answer = self.call(index, rule, way, counted=rule != "pointers", where=where)
            except RuleBroken:
                # wrong at a plain call too: it is not the way of calling
                self.call(index, "repeat", call, where=where)
                raise
            if "held" in self.rules:
                self._hold(self.site.cases[index], answer)
        while self._held:
            self._release()

    def call(self, index: int, rule: str, way: CallWay, *, counted: bool = True, where: str = "") -> Answer:
        """One call on a case, held to the candidate's own verified answer, or else to the right one.

        Raises:
            RuleBroken: `rule`, if the answer is wrong or the call raises.
        """
        case = self.site.cases[index]
        self.calls += 1
        try:
            done = self.site.run(self.candidate, case.values, way=way, counted=counted, look=False)
        except RuleBroken:
            raise
        except Exception as error:
            raise RuleBroken(rule, f"{where or rule}: it raised {first_line(error)}") from error
        if not same_answer(done.answer, self.verified[index]):
            self._compare(case, done, rule, where)
        return done.answer

    def _compare(self, case: Case, done: Outcome, rule: str, where: str) -> None:
        try:
            failed = [row for row in self.judge(self.site, case, done) if not row.passed]
        except RuleBroken as error:
            raise RuleBroken(rule, f"{where or rule}: {error}") from error
        if failed:
            row = failed[0]
            raise RuleBroken(rule, f"{where or rule}: {row.output} has error {row.error:.2e}, allowed {row.limit:.2e}")
        note = "not deterministic: the same call gives answers that differ in their last bits"
        if note not in self.notes and rule == "repeat":
            self.notes.append(note)

    def _hold(self, case: Case, answer: Answer) -> None:
        # an answer that is a view of the input changes with it, as the original's does
        own = {path: leaf for path, leaf in answer.leaves.items() if not case.sharing.get(path, set()) - {"itself"}}
        answer = Answer(own)
        self._held.append((answer, answer.copy()))
        while len(self._held) > (1 if answer.nbytes > LARGE_ANSWER else HELD):
            self._release()

    def _release(self) -> None:
        answer, copy = self._held.popleft()
        try:
            same = same_answer(answer, copy)
        except RuntimeError as error:
            # inductor's graph trees raise where an overwritten answer is read, so that nothing wrong is ever seen
            if not self.graphs:
                raise RuleBroken("held", f"reading an earlier answer raises {first_line(error)}") from error
            note = "an answer that is read after the next call raises an error; copy it before"
            if note not in self.notes:
                self.notes.append(note)
            return
        if not same:
            raise RuleBroken("held", "an answer that the caller held was changed by later calls")

    def thread(self) -> None:
        """Call once in another thread.

        Raises:
            RuleBroken: "thread".
        """
        try:
            self.call(0, "thread", in_thread)
        except RuleBroken as error:
            if not (self.graphs and "raised" in str(error)):
                raise
            self.notes.append(
                "calls from another thread raise an error: graphs belong to the thread that recorded them"
            )

    def concurrent(self, calls: int = 8) -> None:
        """Call from two threads at the same time, each with tensors of its own.

        Raises:
            RuleBroken: "concurrent".
        """
        cases = self.site.cases
        answers = concurrent_answers(self.site, self.candidate, calls)
        self.calls += 2 * calls
        for index, answer in answers:
            if isinstance(answer, BaseException):
                raise RuleBroken("concurrent", f"with two threads at the same time it raised {first_line(answer)}")
            if not same_answer(answer, self.verified[index]):
                done = Outcome(answer, {}, cases[index].written, cases[index].plain)
                self._compare(cases[index], done, "concurrent", "with two threads at the same time")


def concurrent_answers(
    site: Site, function: Callable[..., Any], calls: int
) -> list[tuple[int, Answer | BaseException]]:
    """Answers of two threads that call at the same time, with the number of the case of each."""
    inputs, numbers = [], []
    for thread in range(2):
        number = min(thread, len(site.cases) - 1)
        site.put_back()
        site.variations.write(site.cases[number].values)
        inputs.append(site.inputs.clone())
        numbers.append(number)
    found: list[tuple[int, Answer | BaseException]] = []
    barrier = threading.Barrier(2)

    def work(thread: int) -> None:
        for _ in range(calls):
            try:
                barrier.wait(60)
                answer: Answer | BaseException = collect(call(function, inputs[thread])).copy()
            except Exception as error:
                answer = error
                barrier.abort()
            found.append((numbers[thread], answer))
            if isinstance(answer, BaseException):
                return

    before = sys.getswitchinterval()
    # threads take turns often, so that a race has its chance
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(2)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    finally:
        sys.setswitchinterval(before)
    broken = [row for row in found if isinstance(row[1], BaseException)]
    # the thread that only waited for the other one is not the cause
    return [row for row in broken if not isinstance(row[1], threading.BrokenBarrierError)] or found
