"""Passes without gradients: generation, its text, and perplexity."""
