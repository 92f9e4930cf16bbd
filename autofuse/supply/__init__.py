"""Supply: kernels from memory, from disk, or from a compiler in this process or another."""
