"""A stand-in for cuda-python, see `bindings.runtime`."""
