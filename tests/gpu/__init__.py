"""Tests that need a CUDA GPU; they skip elsewhere."""
