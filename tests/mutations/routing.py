"""Routers, permutation and statistics."""

from mutations.mutation import Mutation

_TOPK, _ROUTERS = "tests/routing/test_topk.py", "tests/routing/test_router_kernels.py"

MUTATIONS = [
    Mutation(
        "what a hook on a router of ours returns is trusted", "routing/base.py",
        'return self.trusted and (not hooks or all(hasattr(h, "watches") for h in hooks.values()))',
        "return self.trusted", "tests/routing/test_router_in_layer.py -k a_hook_returns",
    ),
    Mutation(
        "slots that a hook moved are trusted", "moe.py",
        "trusted=r.token_start is not None and self.routing._is_trusted(),",
        "trusted=r.token_start is not None and self.routing.trusted,",
        "tests/routing/test_router_in_layer.py -k a_hook_moves",
    ),
    Mutation(
        "the router is fused under autocast", "routing/scores.py",
        "torch.is_autocast_enabled(x.device.type)  #", "False  #",
        "tests/test_moe.py -k under_autocast_the_router",
    ),
    Mutation(
        "pairs with a token past T reach the last token", "validation.py",
        "(slot_token < x.shape[0]), ids, -1)", "(slot_token <= x.shape[0]), ids, -1)",
        "tests/test_published.py -k out_of_range",
    ),
    Mutation(
        "a boolean index in the backward pass", "routing/token_rounding.py",
        "        dlogits = ops.round_logits_backward(",
        "        dscore[dscore > 0]\n        dlogits = ops.round_logits_backward(",
        "tests/test_no_waiting.py",
    ),
    Mutation(
        "ties go to the higher index", "kernels/topk.py",
        "| (0xFFFF - column)", "| column", _TOPK, interpreted=True,
    ),
    Mutation(
        "the bias reaches the weights", "kernels/sigmoid.py",
        "    score = a * scale\n", "    score = (a + tl.load(bias + chosen)) * scale\n",
        _ROUTERS, interpreted=True,
    ),
    Mutation(
        "a softmax without its other experts", "kernels/balance.py",
        "s[None, :] - inner[:, None] +", "s[None, :] +", _ROUTERS, interpreted=True,
    ),
    Mutation(
        "a slot whose expert is not here gets a row", "kernels/permute.py",
        "    here = (expert >= 0) & (expert < num_experts)\n", "    here = expert < num_experts\n",
        _TOPK, interpreted=True,
    ),
    Mutation(
        "logits at 32 bits", "kernels/topk.py",
        "    ptr = logits + token.to(tl.int64)[:, None] * logits_stride + e[None, :]\n    NARROW",
        "    ptr = logits + token[:, None] * logits_stride + e[None, :]\n    NARROW",
        "tests/experts/test_large.py -k logits", gpu=True,
    ),
    Mutation(
        "rows in the order of arrival", "kernels/permute.py",
        "i + tl.load(to_row + p.to(tl.int64) * num_experts + expert, mask=here, other=0)",
        "tl.atomic_add(to_row + expert, 1, mask=here)",
        "tests/experts/test_streams_and_graphs.py -k bitwise", gpu=True,
    ),
    Mutation(
        "the statistics count added pairs as dropped", "routing/statistics.py",
        "dropped=(choice - rows)", "dropped=(rows - choice)",
        "tests/routing/test_routers.py -k dropped_and_added",
    ),
]  # fmt: skip
