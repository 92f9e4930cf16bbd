"""Chains as data: shells, what is known of tensors, the trie of recorded programs."""
