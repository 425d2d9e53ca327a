"""Residual additions into the norms behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext
from wavecrest.optimizer.steps.params import Sites

if TYPE_CHECKING:
    from torch import nn

# tensors of the sum's size that are read and written: of a norm, of an addition before it, and of both in one kernel
# which gives the sum too or not
NORM, ADDITION, BOTH, ALONE = 2, 3, 4, 3


class FuseAddNorm(Step):
    """Modules whose forward adds before one of their norms compute both in one kernel."""

    id = "fuse_add_norm"
    title = "residual additions → norms"
    level = 4
    params_type = Sites
    # these replace the norms, or the additions
    tried_after = ("replace_norm", "replace_encoder", "fuse_residual")

    def find(self, context: StepContext) -> Found:
        """Modules whose forward, by its source, normalises a sum."""
        from torch import nn

        from wavecrest.nn import added_norm

        assert context.model is not None
        if context.device.kind == "cpu":
            return Found((), note="on the CPU the op is PyTorch's addition and norm, so nothing would change")
        sites, reasons, alone, kept = [], [], 0, 0
        for path, module in context.model.named_modules():
            if type(module) is nn.TransformerEncoderLayer:
                reasons.append("PyTorch runs its TransformerEncoderLayer as one operation")
                continue
            sums = added_norm.sums_of(module)
            if isinstance(sums, str):
                reasons += [sums] if sums else []
                continue
            sites.append(path)
            alone += len(sums.alone)
            kept += len(sums.kept)
        left_out = "; ".join(dict.fromkeys(reasons))
        if not sites:
            return Found((), note=left_out or "no module adds before a norm of its own")
        note = f"{alone + kept} norms with the addition before them; of {kept} the sum is used again"
        return Found(tuple(sites), {"sites": sites}, note + (f"; left out: {left_out}" if left_out else ""))

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """By the tensors that are read and written: a captured graph does not say which kernel adds what."""
        from wavecrest.nn import added_norm

        assert context.model is not None
        share, saved = context.share("normalisation"), 0
        for path in found.sites:
            sums = added_norm.sums_of(context.model.get_submodule(path))
            assert isinstance(sums, added_norm.Sums)
            saved += (NORM + ADDITION) * (len(sums.alone) + len(sums.kept))
            saved -= ALONE * len(sums.alone) + BOTH * len(sums.kept)
        norms = sum(added_norm.is_norm(module) for module in context.model.modules())
        part = share * saved / (NORM * max(norms, 1))
        # no more than there is of additions
        least = min(part, context.share("elementwise", "other"))
        return Prediction.of_saved(
            least,
            f"{found.note}; normalisation is {share:.0%} of the time, and {least:.1%} are read or written for sums",
        )

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Change each site in place."""
        from wavecrest.nn import added_norm

        for path in params["sites"]:
            added_norm.adopt(model.get_submodule(path))
        return model
