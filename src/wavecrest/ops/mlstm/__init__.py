"""The mLSTM: over sequences in chunks or token by token, and one step of decoding."""
