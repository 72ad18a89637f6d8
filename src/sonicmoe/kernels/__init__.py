"""Device code only: Triton kernels and the functions they are made of. Nothing imports torch."""
