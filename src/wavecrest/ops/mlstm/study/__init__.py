"""What the studies of the three mLSTM ops share: example calls and bounds of errors; not loaded by a call."""
