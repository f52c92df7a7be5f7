"""The test suite: unit, dist (gloo processes), gpu, golden, packaging."""
