"""Portable kernels of the grouped GEMMs, in Triton."""
