"""The mesh of ranks and the layers cut along it."""
