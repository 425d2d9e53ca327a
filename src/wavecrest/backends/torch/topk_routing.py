"""The router of a mixture of experts by PyTorch."""

from __future__ import annotations

from wavecrest.backends.torch.common import PRIORITY
from wavecrest.ops._topk_routing.backend import op
from wavecrest.ops._topk_routing.reference import reference

# the definition is PyTorch's operations: torch.topk says nothing about equal numbers
op.attach("torch", reference, priority=PRIORITY)
