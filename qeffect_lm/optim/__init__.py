"""Optimizer: flat buffers, the schedule-independent gradient norm, AdamW on masters, learning-rate
schedules."""
