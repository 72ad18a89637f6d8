"""Settings under which plain PyTorch is as exact as it can be at each dtype."""

import pytest
import torch


@pytest.fixture(autouse=True)
def honest_gemms():
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    yield
    torch.cuda.empty_cache()
