"""The experts: one path from every public function to the GEMMs.

`prepare` checks and sorts the rows, `run` has the layer's statements, `nodes` their gradients, and
`bf16`, `fp8` and `lora` the arithmetic that `operands` defines.
"""
