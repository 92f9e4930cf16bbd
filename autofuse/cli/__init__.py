"""The command line: `python -m autofuse`."""
