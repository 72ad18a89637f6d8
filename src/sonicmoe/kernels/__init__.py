"""Device code: kernels and the functions they are made of.

`triton/` holds the portable grouped GEMMs, `hopper/` those for Hopper in Gluon; the rest is shared.
"""
