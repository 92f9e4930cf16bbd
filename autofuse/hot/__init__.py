"""The hot path once more, compiled by LLVM at import; without it Python does the same."""
