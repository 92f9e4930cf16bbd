"""The op table: a row per op, and what of torch the rows cover."""
