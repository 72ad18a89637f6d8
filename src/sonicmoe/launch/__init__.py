"""Host code that picks a configuration, allocates and launches kernels. Needs Triton."""
