"""The experts: one path from every public function to the GEMMs.

`prepare` checks and sorts the rows, `run` has the layer's statements, `nodes` what is kept for the
backward pass. The arithmetic is in `ops`.
"""
