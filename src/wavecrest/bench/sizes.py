"""The words that give a call its sizes and dtype: "M=16 N=4096 dtype=bf16", of one call or of several."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from wavecrest.dispatch.call import AnyCall
from wavecrest.dispatch.lookup import fields_of
from wavecrest.dispatch.op import AnyOp
from wavecrest.dispatch.tuned import Cell
from wavecrest.errors import InvalidArgument, Unsupported

# default sizes by name; other sizes get one that keeps a tensor of four dimensions small
DEFAULTS = {"M": 16, "N": 4096, "K": 4096}
OTHER_SIZE = 64
# of a size: more is no tensor
MOST_DIGITS = 12
# calls that the words of one command may ask for
MOST_CALLS = 1000
# words for a size of the example call, most of them parts of keys; the first of its letters that the op has
WORDS = {
    "batch": "B", "heads": "H", "dk": "D", "d": "D", "head_dim": "D", "rows": "M", "columns": "N", "k": "K",
    "channels": "C", "outputs": "O", "queries": "S", "seqlen_q": "S", "keys": "S", "seqlen_k": "S", "capacity": "S",
    "tokens": "TSM", "num_tokens": "TSM",
}  # fmt: skip
# those of one op
OWN_WORDS = {"moe": {"hidden": "K", "intermediate": "N"}, "topk_routing": {"experts": "N"}}
# the tokens of a call beside a cache are its queries, and its size S is the cache's
CACHED = {"tokens", "num_tokens", "queries", "seqlen_q"}
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}

# sizes in the order of `Study.sizes`, and the dtype's name
Shape = tuple[tuple[int, ...], str]


def call(
    op: AnyOp, sizes: Sequence[int], dtype: str, device: str, options: Mapping[str, Cell] | None = None
) -> AnyCall:
    """A call with sizes and a torch dtype by name, as `Study.inputs` makes it.

    Args:
        op, sizes, dtype, device: whose example call, its sizes in the order of `Study.sizes`, and where it is to be.
        options: other parts of its key, as `Study.call_of_key` makes them; sizes are those of results then.

    Raises:
        InvalidArgument: the op makes no call with the options.
    """
    if not options:
        return op.study.inputs(*sizes, getattr(torch, dtype), device)
    assert op.study.call_of_key is not None
    key = op.key(op.study.inputs(*sizes, getattr(torch, dtype), "meta"))
    wanted: dict[str, Cell] = dict(zip(op.key_fields, key, strict=True)) | dict(options)
    # the sizes themselves, of which the key may have buckets
    named, numbers = words(op), dict(zip(op.study.sizes, sizes, strict=True))
    exact = {part: numbers[named[part]] for part in op.key_fields if named.get(part) in numbers}
    text = " ".join(shown(name, value) for name, value in options.items())
    try:
        made = op.study.call_of_key(wanted | exact, device)
        if made is not None:
            op.check(made)
            found = dict(zip(op.key_fields, op.key(made), strict=True))
    except (InvalidArgument, Unsupported) as error:
        raise InvalidArgument(f"{text}: {error}") from error
    # what has no meaning in a key of this op, and more elements than a tensor may have
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(f"{text}: {op.name} has no such key ({type(error).__name__}: {error})") from error
    if made is None:
        raise InvalidArgument(f"{text}: {op.name} makes no such call")
    other = [shown(name, found[name]) for name in fields_of(op) if found[name] != wanted[name]]
    if other:
        raise InvalidArgument(f"{text}: {op.name} makes a call with {', '.join(other)}")
    return made


def options(op: AnyOp) -> tuple[str, ...]:
    """The parts of an op's key that its example call may have besides sizes and dtype, such as gemm's activation."""
    if op.study.call_of_key is None:
        return ()
    return tuple(name for name in fields_of(op) if name != "dtype" and name not in words(op))


def apart(op: AnyOp, items: Sequence[str]) -> tuple[list[str], dict[str, Cell]]:
    """The words that give sizes and dtype, and the other parts of the key that words name: "activation=gelu".

    Raises:
        InvalidArgument: a part is named twice.
    """
    known = options(op)
    rest: list[str] = []
    found: dict[str, Cell] = {}
    for item in items:
        name, separator, text = item.partition("=")
        if not separator or name in op.study.sizes or name.lower() not in known:
            rest.append(item)
        elif name.lower() in found:
            raise InvalidArgument(f"{item!r}: {name.lower()} is already {found[name.lower()]}")
        else:
            found[name.lower()] = option(text)
    return rest, found


def option(text: str) -> Cell:
    """A part of a key from text: a number, true or false, or a word."""
    if text.isdecimal() and len(text) <= MOST_DIGITS:
        return int(text)
    return {"true": True, "false": False}.get(text, text)


def shown(name: str, value: Cell) -> str:
    """A part of a key as it is written: "residual=true"."""
    return f"{name}={str(value).lower() if isinstance(value, bool) or value is None else value}"


def one(op: AnyOp, items: Sequence[str], fp8: str | None = None) -> Shape:
    """The call that words describe; what they leave out has a default.

    Args:
        op: whose sizes and dtypes these are.
        items: "M=16", "N=4096", "dtype=bf16" in any order, or bare: numbers give the sizes not named yet in their
            order, a word the dtype. A part of the key is a name too, as "batch=4".
        fp8: the 8-bit float of the device, which "fp8" means.

    Raises:
        InvalidArgument: a word names no size or dtype of the op, or one twice, or has a wrong value.
    """
    return _checked(op, _given(op, items), fp8)


def several(op: AnyOp, items: Sequence[str], fp8: str | None = None) -> list[Shape]:
    """The calls that words describe, each once: as `one`, where a word may have several values.

    "M=1,16,64" has these values, "M=1024:8192" all from the first to the last, "M=1024:8192:1024" those in steps of
    the third, "M=1024:8192:*2" each twice the one before. Several words with several values give all combinations, the
    last word's values changing fastest.

    Raises:
        InvalidArgument: as `one`; or a range has no value, or there are more than MOST_CALLS.
    """
    given = _given(op, items)
    values = {name: list(dict.fromkeys(_expanded(name, text))) for name, text in given.items()}
    if (count := math.prod(map(len, values.values()))) > MOST_CALLS:
        raise InvalidArgument(f"{' '.join(items)}: {count:,} calls; at most {MOST_CALLS:,} at once")
    combined = itertools.product(*values.values())
    found = (_checked(op, dict(zip(values, texts, strict=True)), fp8) for texts in combined)
    return list(dict.fromkeys(found))


def named(op: AnyOp, word: str) -> str:
    """The size that a part of the key is, such as D for dk; the word itself where there is no such size."""
    return words(op).get(word.lower(), word)


def words(op: AnyOp) -> dict[str, str]:
    """The sizes of an op by the words that name them."""
    sizes, cached = op.study.sizes, "capacity" in op.key_fields
    found = {}
    for word, letters in {**WORDS, **OWN_WORDS.get(op.name, {})}.items():
        letter = next((one for one in letters if one in sizes), None)
        if letter is not None and not (cached and letter == "S" and word in CACHED):
            found[word] = letter
    return found


def dtypes(op: AnyOp, fp8: str | None = None) -> dict[str, str]:
    """The dtypes of an op's example calls by every accepted name."""
    found = {name: name for name in op.study.example_dtypes}
    found |= {short: name for short, name in SHORT.items() if name in found}
    eight = [name for name in op.study.example_dtypes if name.startswith("float8")]
    if eight:
        found["fp8"] = next((name for name in eight if name == f"float8_{fp8}"), eight[0])
    return found


def _given(op: AnyOp, items: Sequence[str]) -> dict[str, str]:
    """The text of each size and of the dtype that the words name."""
    defaults = _defaults(op)
    given: dict[str, str] = {}
    for item in items:
        name, separator, value = item.partition("=")
        if not separator:
            name, value = _place(op, item, given), item
        if name not in defaults:
            name = named(op, name)
        if name not in defaults:
            raise InvalidArgument(_unknown(op, item, name, defaults))
        if name in given:
            raise InvalidArgument(f"{item!r}: {name} is already {given[name]}; give {_example(defaults)}")
        given[name] = value
    return given


def _checked(op: AnyOp, given: dict[str, str], fp8: str | None) -> Shape:
    for name in op.study.sizes:
        _check_size(name, given.get(name, "1"))
    values = _defaults(op) | given
    known = dtypes(op, fp8)
    if values["dtype"] not in known:
        raise InvalidArgument(f"dtype={values['dtype'][:40]}: {op.name} takes {', '.join(op.study.example_dtypes)}")
    return tuple(int(values[name]) for name in op.study.sizes), known[values["dtype"]]


def _check_size(name: str, text: str) -> None:
    # Python converts no number of some thousand digits
    if not text.isdecimal() or len(text) > MOST_DIGITS or int(text) < 1:
        raise InvalidArgument(f"{name}={text[:40]}: must be a whole number from 1 to {10**MOST_DIGITS - 1:,}")


def _expanded(name: str, text: str) -> Iterator[str]:
    """The values of "1,16", "1:8", "8:64:8" and "8:64:*2"; of dtypes there are lists alone."""
    for part in text.split(","):
        first, *rest = part.split(":")
        if not rest or name == "dtype":
            yield part
            continue
        last, step, factor = rest[0], "1", False
        if len(rest) == 2:
            factor = rest[1].startswith("*")
            step = rest[1].removeprefix("*")
        if len(rest) > 2 or not all(word.isdecimal() for word in (first, last, step)):
            raise InvalidArgument(f"{name}={part[:40]}: a range is first:last, first:last:step or first:last:*factor")
        for number in (first, last, step):
            _check_size(name, number)
        yield from map(str, _range(name, part, int(first), int(last), int(step), factor=factor))


def _range(name: str, part: str, first: int, last: int, step: int, *, factor: bool) -> Iterator[int]:
    if first > last or (factor and step < 2):
        raise InvalidArgument(f"{name}={part}: a range goes up, by a step of at least 1 or a factor of at least 2")
    size = first
    # one more than is allowed, so that the product of all words is refused and not this one's memory
    for _ in range(MOST_CALLS + 1):
        if size > last:
            return
        yield size
        size = size * step if factor else size + step


def _defaults(op: AnyOp) -> dict[str, str]:
    known = op.study.example_dtypes
    sizes = {name: str(DEFAULTS.get(name, OTHER_SIZE)) for name in op.study.sizes}
    return {**sizes, "dtype": "bfloat16" if "bfloat16" in known else known[0]}


def _example(values: dict[str, str]) -> str:
    return f"'{' '.join(values.values())}' or '{' '.join(f'{name}={value}' for name, value in values.items())}'"


def _unknown(op: AnyOp, item: str, name: str, defaults: dict[str, str]) -> str:
    if name.lower() in op.key_fields:
        problem = f"{item!r}: the example call of {op.name} has {name.lower()} from its sizes"
    else:
        problem = f"{item!r} is no size or dtype that {op.name} takes"
    # the parts of its key alone, as others are for those who know them from elsewhere
    others = [f"{word} ({letter})" for word, letter in words(op).items() if word in op.key_fields]
    return f"{problem}: give {_example(defaults)}" + (f"; or by {', '.join(others)}" if others else "")


def _place(op: AnyOp, word: str, given: dict[str, str]) -> str:
    """The setting that a bare word gives: the first size not given yet, the dtype, or "" if it fits neither."""
    if word[:1].isdecimal():
        return next((name for name in op.study.sizes if name not in given), "")
    return "dtype" if word.isidentifier() and word not in op.study.sizes else ""
