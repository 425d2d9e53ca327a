"""xLSTM Large (xLSTM 7B): model, loader, generation, and the official packages' kernel names; and the block stack."""

from wavecrest.models.xlstm.backend import mLSTMBackend, mLSTMBackendConfig
from wavecrest.models.xlstm.beams import Beams
from wavecrest.models.xlstm.blocks import xLSTMBlockStack, xLSTMBlockStackConfig, xLSTMLMModel
from wavecrest.models.xlstm.config import ConfigWarning, xLSTMLargeConfig
from wavecrest.models.xlstm.generation import DecodeFallback, Generated
from wavecrest.models.xlstm.kernels import (
    Fallback,
    KernelFallback,
    fallbacks,
    get_available_mlstm_kernels,
    get_available_mlstm_sequence_kernels,
    get_available_mlstm_step_kernels,
    get_mlstm_kernel,
    get_mlstm_sequence_kernel,
    get_mlstm_step_kernel,
)
from wavecrest.models.xlstm.model import xLSTMLarge
from wavecrest.models.xlstm.quantize import quantize
from wavecrest.models.xlstm.sampling import Sampling
from wavecrest.models.xlstm.scheduler import Finished, Scheduler
from wavecrest.models.xlstm.speculation import Verified, prompt_lookup
from wavecrest.models.xlstm.state import State, StatePool, select_rows
from wavecrest.models.xlstm.weights import (
    convert_fused_weights_to_single_weights,
    convert_single_weights_to_fused_weights,
)

__all__ = [
    "Beams",
    "ConfigWarning",
    "DecodeFallback",
    "Fallback",
    "Finished",
    "Generated",
    "KernelFallback",
    "Sampling",
    "Scheduler",
    "State",
    "StatePool",
    "Verified",
    "convert_fused_weights_to_single_weights",
    "convert_single_weights_to_fused_weights",
    "fallbacks",
    "get_available_mlstm_kernels",
    "get_available_mlstm_sequence_kernels",
    "get_available_mlstm_step_kernels",
    "get_mlstm_kernel",
    "get_mlstm_sequence_kernel",
    "get_mlstm_step_kernel",
    "mLSTMBackend",
    "mLSTMBackendConfig",
    "prompt_lookup",
    "quantize",
    "select_rows",
    "xLSTMBlockStack",
    "xLSTMBlockStackConfig",
    "xLSTMLMModel",
    "xLSTMLarge",
    "xLSTMLargeConfig",
]
