"""Golden files: formats that must stay readable."""
