"""Kernels: from a program to loops, their text, and binaries. Knows no tensor, touches no GPU."""
