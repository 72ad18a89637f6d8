"""Device code only: Triton kernels and the functions they are made of. Nothing here imports torch."""
