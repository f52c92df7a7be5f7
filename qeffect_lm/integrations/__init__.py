"""Adapters for other trainers."""
