"""These tests run where TRITON_INTERPRET=1 was set before Python started."""

import os

assert os.environ.get("TRITON_INTERPRET") == "1", "run them through test_interpreter_kernels.py"

import interpreter  # noqa: E402, F401 mends bf16 products
