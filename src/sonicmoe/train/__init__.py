"""A small trainer for Mixture-of-Experts language models: `sonicmoe train` and related commands.

Nothing is imported here: the command line starts fast, and each optional package is loaded by the
one file that needs it.
"""
