"""The instruments: what the machine can do, and how near the engine comes to it."""
