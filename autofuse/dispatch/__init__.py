"""Dispatch: what torch and Python do with a wrapped tensor."""
