"""Warp-specialized kernels of the grouped GEMMs for Hopper (sm_90), in Gluon."""
