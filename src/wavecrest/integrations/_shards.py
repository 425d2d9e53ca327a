"""Tensor parallelism of a transformers model: layers of which a rank holds a part, and their results put together."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from wavecrest.errors import InvalidArgument

# styles of transformers' tensor-parallel plans whose layers stay whole: embeddings are divided by some versions' plans
WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise")
GATHERED = ("colwise_gather_output", "colwise_rep")

# torch 2.13 deprecates the older name
_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
# by name, which modules hold: a process group cannot be copied
_groups: dict[str, dist.ProcessGroup] = {}


class Sharded(nn.Module):
    """A layer whose weight is divided; `group` names the ranks that results are put together over, "" for none."""

    def __init__(self, linear: nn.Linear, group: Any) -> None:
        super().__init__()
        self.linear = linear
        self.group = group


class RowParallel(Sharded):
    """y = Σ over ranks of x_r · W_rᵀ, plus the bias: x_r [..., K / ranks] is the rank's part of the columns."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K / ranks] to [..., N], the same on every rank."""
        y: Tensor = self.linear(x)
        if not self.group:
            return y
        group = _groups.get(self.group)
        if group is None or torch.compiler.is_compiling() or y.requires_grad or not y.is_contiguous():
            return _waited(collectives.all_reduce(y, "sum", self.group))
        # the functional one takes the host 74 µs and this one 4 (a process group that sends nothing, CPU, 2026-11-26)
        dist.all_reduce(y, group=group)
        return y


class GatheredLinear(Sharded):
    """y = x · Wᵀ with the rows of W divided, and the parts of y put side by side."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., N], the same on every rank; [..., N / ranks] without a group."""
        y: Tensor = self.linear(x)
        return _waited(_gather(y, y.ndim - 1, self.group)) if self.group else y


def _waited(y: Tensor) -> Tensor:
    """A plain tensor, which the current stream has waited for.

    Outside of compiled code a collective waits when its result is first used. The caller of a model may not use it in
    time: an event behind the call would not count the last one, and a graph cannot end while it is under way.
    """
    return y.wait() if isinstance(y, collectives.AsyncCollectiveTensor) else y


def parallelize(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    """Divide a transformers model (Llama, Qwen2, Qwen3, Mistral and others of their plan) over the ranks, in place.

    Every rank calls it with the same model. The weights are rank 0's. Q, K, V, gate and up projections keep the rows of
    the rank's heads and columns, o_proj and down_proj the columns that belong to them, with a sum over the ranks behind
    them; lm_head its rows of the vocabulary, gathered, where it shares no weight with the embedding. Embeddings and
    norms are whole on every rank.

    Args:
        model: in eval mode, on the rank's device. Its config has a tensor-parallel plan.
        mesh: of one dimension; None: all ranks of the job. The process group is initialized (torchrun, and
            `torch.distributed.init_process_group`).

    Returns:
        The model.

    Raises:
        InvalidArgument: the process group is not initialized, the model has no plan or one with other styles, or
            heads, columns or rows do not divide by the ranks; nothing is changed then.
    """
    mesh = _mesh(model) if mesh is None else mesh
    if mesh.ndim != 1:
        raise InvalidArgument(f"parallelize takes a mesh of one dimension, not {mesh.ndim}")
    styles = _styles(model, mesh.size())
    group = mesh.get_group().group_name
    _groups[group] = mesh.get_group()
    sharded = {id(p) for path, style in styles.items() if style for p in model.get_submodule(path).parameters()}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in sharded and not tensor.is_meta:
            tensor.data.copy_(distribute_tensor(tensor.data, mesh, [Replicate()]).to_local())
    for path, style in styles.items():
        layer = model.get_submodule(path)
        if not style:
            continue
        local = _local(layer, mesh, rows=style != "rowwise")
        if style == "colwise":
            model.set_submodule(path, local)
        else:
            model.set_submodule(path, (RowParallel if style == "rowwise" else GatheredLinear)(local, group))
    return model


def is_divided(model: nn.Module) -> bool:
    """Whether `parallelize` divided a model."""
    return bool(shards(model))


def shards(model: nn.Module) -> list[Sharded]:
    """The layers of a model that `parallelize` made."""
    return [module for module in model.modules() if isinstance(module, Sharded)]


def _mesh(model: nn.Module) -> DeviceMesh:
    if not dist.is_initialized():
        raise InvalidArgument(
            "parallelize needs the job's process group: start with torchrun and call "
            "torch.distributed.init_process_group first"
        )
    return init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))


def _styles(model: nn.Module, ranks: int) -> dict[str, str]:
    """The style of each divided layer, checked: "colwise", "rowwise", "gathered", or "" for one that stays whole."""
    config: Any = getattr(model, "config", None)
    base = getattr(model, "base_model_prefix", "")
    prefix = f"{base}." if base and hasattr(model, base) else ""
    plan = {prefix + name: style for name, style in (getattr(config, "base_model_tp_plan", None) or {}).items()}
    if not plan:
        raise InvalidArgument(f"{type(model).__name__} has no tensor-parallel plan in its config (base_model_tp_plan)")
    if isinstance(getattr(model, "lm_head", None), nn.Linear):
        plan["lm_head"] = "colwise_gather_output"
    known = {"colwise", "rowwise", *GATHERED, *WHOLE}
    if unknown := sorted(set(plan.values()) - known):
        raise InvalidArgument(f"{type(model).__name__}: no style {', '.join(unknown)}; there are {', '.join(known)}")
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (count := getattr(config, name, ranks)) % ranks:
            raise InvalidArgument(f"{name} of {count} does not divide by {ranks} ranks")
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    styles = {}
    for path, module in model.named_modules():
        style = next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(path, pattern)), "")
        if not style or style in WHOLE:
            continue
        if type(module) is not nn.Linear:
            raise InvalidArgument(
                f"{path} is a {type(module).__name__}; parallelize takes a model before other changes"
            )
        if style in GATHERED:
            # a tied or uneven head stays whole
            tied = module.weight is embedding or module.weight.shape[0] % ranks
            styles[path] = "" if tied else "gathered"
            continue
        size = module.weight.shape[1 if style == "rowwise" else 0]
        if size % ranks:
            raise InvalidArgument(f"{path}: its size of {size} does not divide by {ranks} ranks")
        styles[path] = style
    return styles


@torch.no_grad()
def _local(layer: nn.Module, mesh: DeviceMesh, *, rows: bool) -> nn.Linear:
    """This rank's part of a layer; the bias of a layer divided by columns is rank 0's, as the sum adds it once."""
    assert isinstance(layer, nn.Linear)
    weight = distribute_tensor(layer.weight.data, mesh, [Shard(0 if rows else 1)]).to_local().contiguous()
    bias: Tensor | None = layer.bias
    if bias is not None:
        whole = distribute_tensor(bias.data, mesh, [Shard(0) if rows else Replicate()]).to_local()
        bias = whole if rows or mesh.get_local_rank() == 0 else torch.zeros_like(whole)
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
    if bias is not None:
        made.bias = nn.Parameter(bias.clone(), requires_grad=layer.weight.requires_grad)
    return made.train(layer.training)


@contextmanager
def gather_local(model: nn.Module) -> Iterator[nn.Module]:
    """The shard as a model of its own inside the context: nothing is put together over ranks, and answers are partial.

    Its layers have the shapes and take the time that they have on this rank, without communication.
    """
    layers = shards(model)
    groups = [layer.group for layer in layers]
    try:
        for layer in layers:
            layer.group = ""
        yield model
    finally:
        for layer, group in zip(layers, groups, strict=True):
            layer.group = group
