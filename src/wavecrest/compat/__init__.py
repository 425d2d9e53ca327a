"""Names of published guides, over this package: `aiter` and `xlstm`. `docs/compat.md` has the guides' examples."""
