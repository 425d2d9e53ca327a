"""Recorded untuned calls as cases of a tuning run: a call is made from each key, and must have that key again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from wavecrest import ops
from wavecrest.bench import suites
from wavecrest.dispatch import lookup
from wavecrest.dispatch.call import AnyCall
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.op import AnyOp
from wavecrest.dispatch.tuned import Cell
from wavecrest.dispatch.tuned.untuned_calls import UntunedCall
from wavecrest.errors import InvalidArgument, Unsupported

# the parts of a key that `inputs` of row ops has sizes and a dtype for
ROW_PARTS = ("rows", "columns", "dtype")


def cases(
    op: AnyOp, untuned: Sequence[UntunedCall], arch: str, device: str
) -> tuple[list[suites.Case], dict[str, str]]:
    """The cases of an op's untuned calls, and those that cannot be tuned here, with the reasons.

    Args:
        op: the op of all of them.
        untuned: from `wavecrest.dispatch.tuned.untuned_calls.read`.
        arch: of the device; calls recorded on another architecture are not tuned.
        device: where the cases' tensors are to be.
    """
    found: list[suites.Case] = []
    left: dict[str, str] = {}
    for one in untuned:
        name = " ".join(f"{part}={_text(value)}" for part, value in one.key.items())
        reason = _reason(op, one, arch)
        if reason:
            left[name] = reason
        else:
            found.append(suites.Case(name, partial(call, op, one.key, device)))
    return found, left


def _reason(op: AnyOp, untuned: UntunedCall, arch: str) -> str:
    """The reason why an untuned call cannot be a case; "" if it can."""
    if untuned.arch != arch:
        return f"was missed on {untuned.arch}, and this is {arch}"
    fields = lookup.fields_of(op)
    if tuple(untuned.key) != fields:
        return f"its key has the parts {', '.join(untuned.key)}, not {', '.join(fields)}: record it anew"
    try:
        # made without memory: the key says whether the op can make it
        call(op, untuned.key, "meta")
    except (InvalidArgument, Unsupported) as error:
        return str(error)
    return ""


def parts_of(op: AnyOp, key: Key) -> dict[str, Cell]:
    """The parts of a key, by name, as `call` takes them."""
    fields = lookup.fields_of(op)
    return {name: part for name, part in zip(op.key_fields, key, strict=True) if name in fields}


def call(op: AnyOp, parts: Mapping[str, Cell], device: str) -> AnyCall:
    """A call with a key, given as its named parts.

    Raises:
        InvalidArgument: the op cannot make one.
    """
    try:
        found = _made(op, parts, device)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{op.name} has no such key: {type(error).__name__}: {error}") from error
    if found is not None:
        op.check(found)
        made = dict(zip(op.key_fields, op.key(found), strict=True))
        other = [name for name in parts if made.get(name) != parts[name]]
        if not other:
            return found
        raise InvalidArgument(f"{op.name} makes no call from this key: {', '.join(other)} would be other")
    unknown = " (of a call inside torch.compile, whose rows are not known)" if parts.get("rows") == 0 else ""
    raise InvalidArgument(f"{op.name} makes no call from this key{unknown}: tune its suite, or pin a backend")


def _made(op: AnyOp, parts: Mapping[str, Cell], device: str) -> AnyCall | None:
    study = op.study
    if study.call_of_key is not None:
        return study.call_of_key(parts, device)
    if study.sizes != ("M", "N") or not all(name in parts for name in ROW_PARTS):
        return None
    rows, columns, dtype = (parts[name] for name in ROW_PARTS)
    if not isinstance(rows, int) or not isinstance(columns, int) or min(rows, columns) < 1:
        return None
    return study.inputs(rows, columns, suites.dtype_of(str(dtype)), device)


def _text(value: Cell) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def by_op(untuned: Sequence[UntunedCall]) -> dict[str, list[UntunedCall]]:
    """Untuned calls by op, in the order of each op's first one.

    Raises:
        InvalidArgument: an op's name is unknown.
    """
    found: dict[str, list[UntunedCall]] = {}
    for one in untuned:
        ops.get(one.op)
        found.setdefault(one.op, []).append(one)
    return found
