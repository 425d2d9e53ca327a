"""Code that the studies of the three mLSTM ops share: example calls and error bounds; a call does not load it."""
