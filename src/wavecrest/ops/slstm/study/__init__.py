"""Code that the studies of both sLSTM ops share: example calls and error bounds; a call does not load it."""
