"""Capture and replay: graph backends, the register of known storages, the capture transaction."""
