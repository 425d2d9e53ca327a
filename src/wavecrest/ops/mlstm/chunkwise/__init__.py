"""The mLSTM over sequences, in chunks whose tokens are products of matrices."""

from wavecrest.ops.mlstm.chunkwise.backend import mlstm_chunkwise, mlstm_parallel

__all__ = ["mlstm_chunkwise", "mlstm_parallel"]
