"""`MoE` as a module: hooks, options, state dicts; `watch`, expert parallelism and converters."""

from mutations.mutation import Mutation

MUTATIONS = [
    Mutation(
        "token_start need not ascend", "validation.py",
        "fits = (inside | absent).all() & (token_start.diff() >= 0).all()",
        "fits = (inside | absent).all()", "tests/experts/test_experts.py -k token_start",
    ),
    Mutation(
        "backward hooks of the router do not fire", "routing/plain_linear.py",
        "    return not forward_hooks and not backward_hooks\n", "    return not forward_hooks\n",
        "tests/test_moe.py -k hook",
    ),
    Mutation(
        "a replaced router.forward is not called", "routing/plain_linear.py",
        'or "forward" in module.__dict__:', "or False:", "tests/test_moe.py -k replaced",
    ),
    Mutation(
        "global hooks do not see the router", "routing/plain_linear.py",
        " or _has_any_global_hook():", ":", "tests/test_moe.py -k hook",
    ),
    Mutation(
        "a patched nn.Linear.forward is not called", "routing/plain_linear.py",
        "return nn.Linear.forward is _FORWARD and not _IS_PATCHED", "return not _IS_PATCHED",
        "tests/test_moe.py -k replaced",
    ),
    Mutation(
        "the shared expert ignores std", "moe.py",
        "                gate_up=gate_up,\n                std=std,\n",
        "                gate_up=gate_up,\n", "tests/test_moe_options.py -k std",
    ),
    Mutation(
        "a state dict of another gate_up order is loaded", "moe.py",
        "            check_order(local_metadata, self.gate_up, remedy)\n", "            pass\n",
        "tests/test_state_dict.py",
    ),
    Mutation(
        "a state dict does not note its gate_up order", "moe.py",
        "            note_order(destination, prefix[:-1], self.gate_up)\n", "            pass\n",
        "tests/test_state_dict.py",
    ),
    Mutation(
        "layers share a Sigmoid", "moe.py",
        "            value._join(self)\n", "            pass\n",
        "tests/routing/test_router_in_layer.py -k one_layer",
    ),
    Mutation(
        "layers that share a router count each other's rows", "watch.py",
        "        self._layer_of[layer.routing] = name\n\n", "        pass\n\n",
        "tests/test_watch.py -k share",
    ),
    Mutation(
        "a copy of a watched model is watched", "watch.py",
        "        return _Hook, ()\n", "        return _Hook, (self.function,)\n",
        "tests/test_watch.py -k copied",
    ),
    Mutation(
        "memory can be set to a string that nothing reads", "layer/options.py",
        '    "memory": lambda moe, name, value: memory_policy(value),\n', "",
        "tests/test_moe_options.py -k memory",
    ),
    Mutation(
        "shapes of converted weights are not compared", "integrations/convert.py",
        "        if shape != want:\n", "        if False:\n",
        "tests/integrations/test_convert.py -k ungated",
    ),
    Mutation(
        "weights outside of the experts drift apart", "distributed/drift.py",
        "            if not set(ranks).issuperset(group):\n", "            if False:\n",
        "tests/distributed/test_whole_model.py",
    ),
    Mutation(
        "biases of ranks drift apart", "routing/sigmoid.py",
        "if all_reduce is None and (ranks := self._ranks()) > 1:",
        "if all_reduce is None and (ranks := 1) > 1:",
        "tests/distributed/test_whole_model.py -k biases",
    ),
]  # fmt: skip
