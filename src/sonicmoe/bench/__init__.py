"""The instruments: cases, inputs, correctness, time, memory, peers, kept results.

`run` puts them together: a subject is verified first and timed only if it is right.
"""
