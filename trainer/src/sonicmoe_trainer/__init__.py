"""A small trainer for Mixture-of-Experts language models: `sonicmoe train` and related commands.

Nothing is imported here, so that the command line starts fast.
"""
