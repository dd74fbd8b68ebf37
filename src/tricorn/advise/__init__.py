"""What a model needs and what a machine will do with it, told before it is tried."""
