"""Operators: every stage of the layer as `torch.ops.sonicmoe.*`, for both backends.

All functional but those that end in `_into`, which add a gradient to their first argument.
"""

from .fp8 import checked_scales as checked_scales
from .fp8 import fp8_down_and_combine as fp8_down_and_combine
from .fp8 import fp8_down_backward as fp8_down_backward
from .fp8 import fp8_down_backward_into as fp8_down_backward_into
from .fp8 import fp8_gemm as fp8_gemm
from .fp8 import fp8_recomputed as fp8_recomputed
from .fp8 import fp8_up as fp8_up
from .fp8 import fp8_up_backward as fp8_up_backward
from .fp8 import fp8_up_backward_into as fp8_up_backward_into
from .fp8 import quantize_rows as quantize_rows
from .fp8 import quantize_weight as quantize_weight
from .grouped_gemm import combine as combine
from .grouped_gemm import down as down
from .grouped_gemm import down_and_combine as down_and_combine
from .grouped_gemm import down_backward as down_backward
from .grouped_gemm import down_backward_into as down_backward_into
from .grouped_gemm import recomputed_z as recomputed_z
from .grouped_gemm import up as up
from .grouped_gemm import up_backward as up_backward
from .grouped_gemm import up_backward_into as up_backward_into
from .lora import lora_down_backward as lora_down_backward
from .lora import lora_gemm as lora_gemm
from .lora import lora_up as lora_up
from .lora import scaled_transpose as scaled_transpose
from .routing import balance as balance
from .routing import balance_backward as balance_backward
from .routing import count as count
from .routing import permute as permute
from .routing import router_gradient_into as router_gradient_into
from .routing import sigmoid_topk as sigmoid_topk
from .routing import sigmoid_topk_backward as sigmoid_topk_backward
from .routing import tiles as tiles
from .routing import topk as topk
from .routing import topk_backward as topk_backward
from .token_rounding import round_logits as round_logits
from .token_rounding import round_logits_backward as round_logits_backward
from .token_rounding import round_tokens as round_tokens
