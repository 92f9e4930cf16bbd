"""The hot path once more, compiled by LLVM; without it Python does the same."""
