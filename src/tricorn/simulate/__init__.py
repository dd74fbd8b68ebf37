"""The simulation: scheduler, cache and supervision, unchanged, on an executor that computes fingerprints, under a clock
that only moves when told to."""
