"""Operators: every stage of the layer as `torch.ops.sonicmoe.*`, for both backends.

All functional but those that end in `_into`, which write to their first arguments, and
`checked_scales`, which counts its calls.
"""

from .fp8 import checked_scales as checked_scales
from .fp8 import dequantize_rows as dequantize_rows
from .fp8 import fp8_down_and_combine as fp8_down_and_combine
from .fp8 import fp8_dx as fp8_dx
from .fp8 import fp8_dz as fp8_dz
from .fp8 import fp8_gemm as fp8_gemm
from .fp8 import fp8_recomputed as fp8_recomputed
from .fp8 import fp8_up as fp8_up
from .fp8 import fp8_weight_gradient as fp8_weight_gradient
from .fp8 import fp8_weight_gradient_into as fp8_weight_gradient_into
from .fp8 import quantize_rows as quantize_rows
from .fp8 import quantize_weight as quantize_weight
from .fp8 import quantize_weight_into as quantize_weight_into
from .fp8 import scored_activation as scored_activation
from .grouped_gemm import bias_gradient as bias_gradient
from .grouped_gemm import combine as combine
from .grouped_gemm import down as down
from .grouped_gemm import down_and_combine as down_and_combine
from .grouped_gemm import dx as dx
from .grouped_gemm import dz as dz
from .grouped_gemm import gathered_gemm as gathered_gemm
from .grouped_gemm import recomputed_z as recomputed_z
from .grouped_gemm import scaled_transpose as scaled_transpose
from .grouped_gemm import up as up
from .grouped_gemm import weight_gradient as weight_gradient
from .grouped_gemm import weight_gradient_into as weight_gradient_into
from .packed import dequantize_weight as dequantize_weight
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
