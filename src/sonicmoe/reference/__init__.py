"""Plain PyTorch: what every kernel is held against, and what runs where there is no GPU.

`layer` is the whole layer on one screen, differentiated by autograd: the oracle of the tests.
The other files are the operators with their backward passes written out; the `torch` backend runs
them, so that it keeps for the backward pass exactly what the kernels keep.
"""
