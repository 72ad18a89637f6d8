"""Adapters for other frameworks. `import sonicmoe` imports no framework but PyTorch."""
