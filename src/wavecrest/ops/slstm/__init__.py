"""The sLSTM: over sequences, and one step of decoding."""
