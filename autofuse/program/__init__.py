"""Programs: what a chain recorded, as data, and what follows from what in it."""
