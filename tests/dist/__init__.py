"""Tests that start several gloo processes."""
