"""Recording: from an op to its node, and from a chain to its values."""
