"""Benchmarks that only developers run: peers, energy, training experiments, the report."""
