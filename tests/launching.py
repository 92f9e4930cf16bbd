"""CUDA's runner over CPU kernels: what hands over pointers and launches, where there is no GPU."""

from autofuse.trial import Called, LaunchingRunner, install, launches, refusals

__all__ = ["Called", "LaunchingRunner", "install", "launches", "refusals"]
