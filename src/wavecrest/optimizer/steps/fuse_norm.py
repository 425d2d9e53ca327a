"""RMS norms into the GEMMs behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from wavecrest.errors import StepRefused
from wavecrest.measure.tree import iter_tensors
from wavecrest.nn.deferred_norm import DeferredNorm, InOne
from wavecrest.nn.fused_weights import FusedSlice, FusedWeights
from wavecrest.nn.gated_mlp import GatedMLP
from wavecrest.nn.hooks import plain, recast
from wavecrest.nn.norm import RMSNorm
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext, set_submodule
from wavecrest.optimizer.steps.params import Readers

if TYPE_CHECKING:
    from wavecrest.measure.workload import Workload

# the part of a norm's time that is left in the GEMM
LEFT = 0.3


class _Reader(NamedTuple):
    """A layer that may normalise its input: the modules that are called with it, and its weight."""

    calls: tuple[nn.Module, ...]
    fused: FusedWeights
    activation: str | None


class FuseNorm(Step):
    """RMS norms that one wide layer reads run in its GEMM, where a kernel of wavecrest makes both for few rows."""

    id = "fuse_norm"
    title = "norms → GEMM"
    level = 4
    params_type = Readers
    # these make the norms and the wide layers, or compute norms themselves
    tried_after = (
        "replace_norm", "fuse_qkv", "fuse_gate_up", "fuse_parallel", "route_linear", "choose_linear", "quantize",
        "replace_activation", "fuse_residual", "fuse_add_norm",
    )  # fmt: skip
    needs = ("replace_norm",)

    def find(self, context: StepContext) -> Found:
        """Norms whose result one wide layer reads, and nothing else, in a forward of each bucket."""
        model = context.model
        assert model is not None
        if context.device.kind == "cpu":
            return Found((), note="on the CPU the op is PyTorch's norm and GEMM, so nothing would change")
        if context.compiled:
            return Found((), note="in a compiled model norms are part of what the compiler makes")
        norms = {path: one for path, one in model.named_modules() if plain(one, RMSNorm) and one.weight is not None}
        readers = readers_of(model)
        if not norms or not readers:
            missing = "norms of wavecrest (step replace_norm)" if not norms else "wide layers on wavecrest's GEMM"
            return Found((), note=f"the model has no {missing}")
        pairs, one_kernel = _watched(context.workload, model, norms, readers)
        if not pairs:
            return Found((), note="no norm is read by one wide layer alone")
        if not one_kernel:
            return Found((), note="no kernel that computes the norm is the choice for the GEMMs behind it")
        if not _alone(context.workload, model, norms, readers, one_kernel):
            return Found((), note="answers differ where all but the wide layers get NaN for the norms' results")
        left_out = len(norms) - len(one_kernel)
        note = f"{left_out} norms are left as they are" if left_out else ""
        return Found(tuple(path for path, _ in one_kernel), {"pairs": [list(pair) for pair in one_kernel]}, note)

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """The norms' time and launches go, but for what is left in the GEMMs."""
        assert context.model is not None
        norms = sum(isinstance(one, RMSNorm) for one in context.model.modules())
        part = context.share("normalisation") * len(found.sites) / max(norms, 1)
        return Prediction.of_saved((1 - LEFT) * part, f"norms before these GEMMs are {part:.1%} of the time")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Leave the work of each norm to its reader."""
        readers = readers_of(model)
        for norm_path, path in params["pairs"]:
            norm, reader = model.get_submodule(norm_path), readers.get(path)
            if not plain(norm, RMSNorm) or norm.weight is None or reader is None:
                raise StepRefused(f"{norm_path} and {path} are no RMSNorm of wavecrest and a wide layer")
            deferred = recast(norm, DeferredNorm)
            set_submodule(model, norm_path, deferred)
            reader.fused.defer(deferred)
        return model


def readers_of(model: nn.Module) -> dict[str, _Reader]:
    """Wide layers on wavecrest's dispatch that compute no norm yet, by the path of a module of each."""
    found: dict[str, _Reader] = {}
    # those of gated MLPs, which may call the wide layer without its slices
    taken: set[int] = set()
    for path, module in model.named_modules():
        if plain(module, GatedMLP) and (fused := module.halves()) is not None:
            taken.add(id(fused))
            if fused.dispatches and fused.norm is None:
                found[path] = _Reader((module,), fused, f"{module.activation}_and_mul")
    slices: dict[int, list[tuple[str, FusedSlice]]] = {}
    for path, module in model.named_modules():
        if isinstance(module, FusedSlice) and id(module.fused) not in taken:
            slices.setdefault(id(module.fused), []).append((path, module))
    for group in slices.values():
        path, first = group[0]
        whole = all(plain(one, FusedSlice) for _, one in group) and first.is_linear
        if whole and first.fused.dispatches and first.fused.norm is None:
            found[path] = _Reader(tuple(one for _, one in group), first.fused, None)
    return found


def _watched(
    work: Workload, model: nn.Module, norms: dict[str, RMSNorm], readers: dict[str, _Reader]
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(norm, reader) where one reads the other's result in each bucket; and those that one kernel makes in one."""
    pairs: dict[tuple[str, str], int] = {}
    in_one: set[tuple[str, str]] = set()
    for bucket in work.buckets:
        made: dict[int, str] = {}
        calls: dict[str, int] = {}
        read: dict[str, list[Tensor]] = {}
        # tensors stay alive, or another could get the same id
        alive: list[Tensor] = []

        def after_norm(path: str, made: Any = made, calls: Any = calls, alive: Any = alive) -> Any:
            def hook(_module: nn.Module, _args: Any, result: Tensor) -> None:
                made[id(result)] = path
                calls[path] = calls.get(path, 0) + 1
                alive.append(result)

            return hook

        def before_reader(path: str, read: Any = read) -> Any:
            def hook(_module: nn.Module, args: Any) -> None:
                read.setdefault(path, []).extend(args[:1])

            return hook

        handles = [one.register_forward_hook(after_norm(path)) for path, one in norms.items()]
        handles += [
            one.register_forward_pre_hook(before_reader(path))
            for path, reader in readers.items()
            for one in reader.calls
        ]
        try:
            work.run(bucket, model)
        finally:
            for handle in handles:
                handle.remove()
        for path, given in read.items():
            reader = readers[path]
            # called by keyword it has no input here
            norm = made.get(id(given[0]), "") if given else ""
            same = len({id(one) for one in given}) == 1 and len(given) == len(reader.calls)
            if same and calls.get(norm) == 1:
                pairs[norm, path] = pairs.get((norm, path), 0) + 1
                if _runs_in_one(given[0], reader, norms[norm]):
                    in_one.add((norm, path))
    found = [pair for pair, times in pairs.items() if times == len(work.buckets)]
    # a norm of two readers would be computed twice
    once = [pair for pair in found if sum(pair[0] == other for other, _ in pairs) == 1]
    return once, [pair for pair in once if pair in in_one]


@torch.no_grad()
def _runs_in_one(x: Tensor, reader: _Reader, norm: RMSNorm) -> bool:
    """True if one kernel makes the norm and the product of x [..., K], with the activation or without it."""
    deferred = recast(norm, DeferredNorm)
    weight, bias = reader.fused.weight, reader.fused.bias
    return any(InOne().of(x, weight, bias, one, deferred) for one in dict.fromkeys((reader.activation, None)))


def _alone(
    work: Workload,
    model: nn.Module,
    norms: dict[str, RMSNorm],
    readers: dict[str, _Reader],
    pairs: list[tuple[str, str]],
) -> bool:
    """Whether answers are the same if all but the readers get NaN in place of the norms' results."""
    real: dict[int, Tensor] = {}
    # tensors stay alive, or another could get the same id
    alive: list[Tensor] = []

    def spoil(_module: nn.Module, _args: Any, result: Tensor) -> Tensor:
        spoiled = torch.full_like(result, float("nan"))
        real[id(spoiled)] = result
        alive.append(spoiled)
        return spoiled

    def mend(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return real.get(id(args[0]), args[0]), *args[1:]

    for bucket in work.buckets:
        wanted = {path: one.clone() for path, one in iter_tensors("", work.run(bucket, model), set())}
        handles = [norms[norm].register_forward_hook(spoil) for norm, _ in pairs]
        handles += [one.register_forward_pre_hook(mend) for _, path in pairs for one in readers[path].calls]
        try:
            found = dict(iter_tensors("", work.run(bucket, model), set()))
        finally:
            for handle in handles:
                handle.remove()
        if any(not torch.equal(found[path], one) for path, one in wanted.items()):
            return False
    return True
