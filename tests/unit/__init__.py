"""Tests of one process."""
