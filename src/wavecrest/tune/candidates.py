"""The candidates for a key: PyTorch, the default configuration, and the configurations of each backend's space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from wavecrest.dispatch import lookup
from wavecrest.dispatch.call import AnyCall
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.op import AnyOp
from wavecrest.dispatch.tuned import Config, cost_model
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.records.renamed import current_backend

# PyTorch as a backend: a candidate for every key, and the one that a winner is compared with
NATIVE = "torch"
# the definition is slow on purpose and is not a candidate
REFERENCE = "reference"

Role = Literal["native", "default", "tried"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a call: a backend, with a configuration if it takes one."""

    backend: str
    config: Config | None = None
    role: Role = "tried"


@dataclass(frozen=True, slots=True)
class Field:
    """The candidates of a key in the order of trial, and the backends that refuse its calls, with the reasons."""

    candidates: tuple[Candidate, ...]
    refused: tuple[tuple[str, str], ...]


def named(candidate: Candidate) -> str:
    """A candidate in words: its backend and configuration."""
    return " ".join([candidate.backend, _words(candidate.config or Config())]).rstrip()


def _words(config: Config) -> str:
    return " ".join(f"{name}={value}" for name, value in config.kwargs.items())


def backends(op: AnyOp, wanted: Iterable[str] | None) -> tuple[str, ...]:
    """The backends of an op that take part beside `NATIVE`, by falling priority; `wanted`: only these.

    Raises:
        InvalidArgument: the op has no backend of a wanted name.
    """
    known = [name for name in op.backends if name != REFERENCE]
    wanted = None if wanted is None else [current_backend(name) for name in wanted]
    for name in wanted or ():
        if name not in known:
            raise InvalidArgument(f"{op.name} has no backend {name!r} to tune; it has {', '.join(known)}")
    chosen = [name for name in known if name != NATIVE and (wanted is None or name in set(wanted))]
    # sorting keeps the order of attaching where priorities are equal
    return tuple(sorted(chosen, key=lambda name: -op.backends[name].priority))


def configurations(op: AnyOp, backend: str, key: Key, arch: Arch | None) -> tuple[Config, ...]:
    """The configurations of a backend to try for a key, each once, its default first.

    `arch`: None if the hardware is unknown; then only the default is tried, or what the backend was registered with.
    """
    default = op.config_of(backend, key)
    space = op.study.kernel(backend).space
    more = op.backends[backend].configs if space is None or arch is None else space(key, arch)
    return tuple(dict.fromkeys((default, *more)))


def field(
    op: AnyOp,
    call: AnyCall,
    key: Key,
    arch: Arch | None,
    names: tuple[str, ...],
    limit: int | None = None,
    configs: Sequence[Config] | None = None,
) -> Field:
    """The candidates for a checked call.

    Args:
        op, call, key: the op, the call and its key.
        arch: as for `configurations`.
        names: from `backends`.
        limit: number of configurations, beside the default, that the cost model ranks first; None: all.
        configs: configurations to try in place of the default and the backends' spaces, each by the backends that it
        fits.
    """
    found: list[Candidate] = []
    refused: list[tuple[str, str]] = []
    has_default = False
    for name in (NATIVE, *names):
        backend = op.backends.get(name)
        reason = "the op has no such backend" if backend is None else backend.refuse(call)
        if backend is None or reason is not None:
            refused.append((name, reason or ""))
        elif name == NATIVE:
            found.append(Candidate(NATIVE, role="native"))
        elif not backend.takes_config:
            found.append(Candidate(name))
        else:
            own = op.config_of(name, key)
            for config in configurations(op, name, key, arch) if configs is None else configs:
                problem = "" if configs is None else lookup.misfit(op, key, name, config)
                if problem:
                    refused.append((name, f"with {_words(config)}, {problem}"))
                    continue
                # a tie goes to the default of the first backend, and to no other default; never to a user's kernel,
                # which runs nowhere by default
                is_default = config == own and not has_default and not backend.user
                found.append(Candidate(name, config, "default" if is_default else "tried"))
            has_default = has_default or not backend.user
    if limit is not None and arch is not None:
        found, left = _likeliest(op, found, key, arch, limit)
        refused += left
    return Field(tuple(found), tuple(refused))


def _likeliest(
    op: AnyOp, found: list[Candidate], key: Key, arch: Arch, limit: int
) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """The candidates with the first `limit` configurations by the cost model, in its order; and a note on the rest.

    Seeded candidates stay, and so do those of backends that the model does not describe.
    """
    ranked = cost_model.rank(op.study.kernels, key, arch)
    places = {(choice.backend, choice.config): place for place, choice in enumerate(ranked)}
    described = {choice.backend for choice in ranked}
    tried = [one for one in found if one.role == "tried" and one.config is not None and one.backend in described]
    # configurations that do not fit the hardware by the model come last
    order = sorted(tried, key=lambda one: places.get((one.backend, one.config or Config()), len(places)))
    stay = [one for one in found if one not in tried]
    counts = Counter(one.backend for one in order[limit:])
    left = [(name, f"{count} configurations are not among the {limit} that the cost model ranks first")
            for name, count in counts.items()]  # fmt: skip
    return [*stay, *order[:limit]], left
