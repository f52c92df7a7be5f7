"""What surrounds a training step: loop, metrics, evaluation, launching, determinism, start-up checks."""
