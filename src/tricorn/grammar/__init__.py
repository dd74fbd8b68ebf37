"""Constrained output: from a client's constraint to the ids that may come next."""
