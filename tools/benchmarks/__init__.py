"""What ``python -m tools.bench`` measures, one module per question."""
