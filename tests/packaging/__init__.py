"""Tests of the wheel: what it holds and that its scripts start."""
