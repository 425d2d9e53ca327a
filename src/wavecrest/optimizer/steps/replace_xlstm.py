"""The layers of transformers' xLSTM over to wavecrest's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wavecrest.errors import InvalidArgument, StepRefused
from wavecrest.nn.hooks import watched
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext, structural_copy
from wavecrest.optimizer.steps.params import Sites

if TYPE_CHECKING:
    from torch import nn

# where the classes of its parts come from: package xlstm, where it is installed
OWN = ("transformers.", "torch.nn.", "xlstm.")
# parts of the time of elementwise work and copies, and of norms, that go, by guess
PASSES_GAIN, NORM_GAIN = 0.6, 0.5


class ReplaceXlstm(Step):
    """mLSTM layers, MLPs and norms become wavecrest's, as `patch_transformers_xlstm` makes them.

    transformers computes an mLSTM in PyTorch, gates and chunks one by one: here it is one op for a prompt of any
    length. The parameters are shared, so that the state dict stays as it is.
    """

    id = "replace_xlstm"
    title = "xLSTM layers → wavecrest"
    level = 4
    params_type = Sites

    def find(self, context: StepContext) -> Found:
        """The xLSTM models of transformers in the model that are not patched yet."""
        from wavecrest.models.xlstm.transformers import backbones, is_patched, patch_transformers_xlstm

        assert context.model is not None
        found = backbones(context.model)
        if not found:
            return Found((), note="no xLSTM of transformers in the model")
        sites = [path for path, module in found if not is_patched(module)]
        if not sites:
            return Found((), note="its xLSTM layers are wavecrest's already")
        for path in sites:
            _check_own(path, context.model.get_submodule(path))
        copied = structural_copy(context.model)
        try:
            for path in sites:
                patch_transformers_xlstm(copied.get_submodule(path))
        except InvalidArgument as error:
            raise StepRefused(str(error)) from error
        return Found(tuple(sites), {"sites": sites})

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """Passes over memory that fall away."""
        passes, norms = context.share("elementwise", "memory"), context.share("normalisation")
        basis = f"elementwise work and copies are {passes:.0%} of the time, norms {norms:.0%}"
        return Prediction.of_saved(PASSES_GAIN * passes + NORM_GAIN * norms, basis)

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Patch each xLSTM in place.

        Raises:
            StepRefused: a site is no xLSTM of transformers, or has parts of another class or with code of their own.
        """
        from wavecrest.models.xlstm.transformers import patch_transformers_xlstm

        try:
            for path in params["sites"]:
                _check_own(path, model.get_submodule(path))
                patch_transformers_xlstm(model.get_submodule(path))
        except InvalidArgument as error:
            raise StepRefused(str(error)) from error
        return model


def _check_own(path: str, backbone: Any) -> None:
    """Refuse parts that may compute something else: of another package's class, with hooks or their own forward."""
    for block in getattr(backbone, "blocks", ()):
        for name, part in (row for row in block.named_modules() if row[0]):
            kind, where = type(part), f"{name} in a block of {path or 'the model'}"
            if not kind.__module__.startswith(OWN):
                raise StepRefused(f"{where} is a {kind.__name__}, which is not transformers' own")
            if watched(part) or "forward" in vars(part):
                raise StepRefused(f"{where} has hooks, or a forward of its own")
