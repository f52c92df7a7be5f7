"""FP8: formats, quantisation with transposed copy and amax, scaled GEMMs, recipes, the weight cache."""
