"""Layers with a native split: forward (F), input gradient (I) and weight gradient (W) are separate pieces of work."""
