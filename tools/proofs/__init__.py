"""What ``tools.parity --device cuda`` runs: engines in lock step, runs killed and resumed, and a float64 reference."""
