"""The steps there are. The planner decides in which order they are tried; where it sees no difference, this one."""

from __future__ import annotations

from functools import cache
from importlib import metadata

from wavecrest.errors import PlanError
from wavecrest.optimizer.steps.base import Step

# levels of --level, for help and reports
LEVELS = {
    1: "environment variables",
    2: "torch.compile",
    3: "model surgery",
    4: "kernels",
    5: "graph capture",
}
ENTRY_POINTS = "wavecrest.steps"


@cache
def _steps() -> dict[str, Step]:
    from wavecrest.optimizer.steps.attention import attention_steps
    from wavecrest.optimizer.steps.capture import CaptureGraph
    from wavecrest.optimizer.steps.channels_last import ChannelsLast
    from wavecrest.optimizer.steps.choose_linear import ChooseLinear
    from wavecrest.optimizer.steps.compile import compile_steps
    from wavecrest.optimizer.steps.compile_epilogues import CompileEpilogues
    from wavecrest.optimizer.steps.compile_fusions import fusion_steps
    from wavecrest.optimizer.steps.environment import EnvironmentStep
    from wavecrest.optimizer.steps.fold_batch_norm import FoldBatchNorm
    from wavecrest.optimizer.steps.fuse_add_norm import FuseAddNorm
    from wavecrest.optimizer.steps.fuse_append import FuseAppend
    from wavecrest.optimizer.steps.fuse_linears import FuseGateUp, FuseParallel, FuseQKV
    from wavecrest.optimizer.steps.fuse_norm import FuseNorm
    from wavecrest.optimizer.steps.fuse_residual import FuseResidual
    from wavecrest.optimizer.steps.join_ties import JoinTies
    from wavecrest.optimizer.steps.pack_heads import PackHeads
    from wavecrest.optimizer.steps.patch_conv import PatchConvolution
    from wavecrest.optimizer.steps.precision import precision_steps
    from wavecrest.optimizer.steps.quantize import Quantize
    from wavecrest.optimizer.steps.replace_activation import ReplaceActivation
    from wavecrest.optimizer.steps.replace_attention import ReplaceAttention, ReplaceSDPA
    from wavecrest.optimizer.steps.replace_encoder import ReplaceEncoder
    from wavecrest.optimizer.steps.replace_moe import ReplaceMoe
    from wavecrest.optimizer.steps.replace_norm import ReplaceNorm
    from wavecrest.optimizer.steps.replace_rotary import ReplaceRotary
    from wavecrest.optimizer.steps.replace_xlstm import ReplaceXlstm
    from wavecrest.optimizer.steps.route_linear import RouteLinear
    from wavecrest.optimizer.steps.tunable_op import TunableOp
    from wavecrest.optimizer.steps.tune_launches import TuneLaunches
    from wavecrest.optimizer.steps.unpad import Unpad
    from wavecrest.optimizer.steps.window_conv import WindowConvolution

    steps: list[Step] = [
        EnvironmentStep(),
        Quantize(),
        *compile_steps(thorough=False),
        CaptureGraph(),
        ChannelsLast(),
        FoldBatchNorm(),
        CompileEpilogues(),
        PatchConvolution(),
        WindowConvolution(),
        PackHeads(),
        *precision_steps(),
        *attention_steps(),
        FuseQKV(),
        FuseGateUp(),
        FuseParallel(),
        RouteLinear(),
        ChooseLinear(),
        TunableOp(),
        ReplaceEncoder(),
        ReplaceAttention(),
        ReplaceSDPA(),
        Unpad(),
        ReplaceMoe(),
        ReplaceXlstm(),
        ReplaceNorm(),
        ReplaceActivation(),
        ReplaceRotary(),
        FuseAppend(),
        FuseResidual(),
        FuseAddNorm(),
        FuseNorm(),
        TuneLaunches(),
        JoinTies(step_by_id),
        *fusion_steps(),
        *compile_steps(thorough=True),
    ]
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        steps.append(entry.load()())
    return {step.id: step for step in steps}


def steps_up_to(level: int) -> list[Step]:
    """The steps up to a level."""
    return [step for step in _steps().values() if step.level <= level]


def step_by_id(step_id: str) -> Step:
    """The step of an id.

    Raises:
        PlanError: no step has this id: the plan comes from another version, or needs an extension package.
    """
    try:
        return _steps()[step_id]
    except KeyError:
        raise PlanError(
            f"no step {step_id!r} in this wavecrest; the plan comes from another version, or from an extension "
            "package that is not installed"
        ) from None
