"""Benchmarks that users run: cases, inputs, verification, timing, memory, tuning, results.

`run` combines them: a candidate is verified first and timed only if it is right. Comparisons with
other packages, energy and training experiments are in the folder benchmarks/ of the repository.
"""
