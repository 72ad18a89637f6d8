"""Operators `torch.ops.sonicmoe.*`, for both backends: the passes of the layer's autograd nodes,
the routers, the quantizers of weights.

All functional but those that end in `_into`, which write to their first arguments or to
`main_grad`, and `checked_scales`, which counts its calls.
"""

from . import bf16 as bf16  # the kinds register themselves
from . import fp8 as fp8
from .experts import combine as combine
from .experts import down as down
from .experts import down_backward as down_backward
from .experts import recomputed as recomputed
from .experts import scaled_transpose as scaled_transpose
from .experts import up as up
from .experts import up_backward as up_backward
from .quantize import checked_scales as checked_scales
from .quantize import quantize_weight as quantize_weight
from .quantize import quantize_weight_into as quantize_weight_into
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
