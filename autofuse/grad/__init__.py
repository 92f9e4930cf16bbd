"""Autograd: what a flush leaves behind, and the derivative rules as kernels and as torch's ops."""
