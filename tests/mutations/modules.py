"""`MoE` as a module: hooks, options, state dicts; `watch`, expert parallelism and converters."""

from mutations.mutation import Mutation

_NORMS = "tests/distributed/test_parallelize_model.py -k norms"
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
        "shapes of converted weights are not compared", "integrations/convert/layers.py",
        "        if shape != want:\n", "        if False:\n",
        "tests/integrations/test_convert.py -k ungated",
    ),
    Mutation(
        "weights outside of the experts drift apart", "distributed/drift.py",
        "        if not set(ranks).issuperset(layer.ranks):\n", "        if False:\n",
        "tests/distributed/test_whole_model.py",
    ),
    Mutation(
        "gradients of a layer are sums beside means", "distributed/whole_model.py",
        "            shards.set_gradient_divide_factor(mesh.size())\n", "",
        "tests/distributed/test_parallelize_model.py -k gradients",
    ),
    Mutation(
        "weights outside of the experts are compared once per optimizer", "distributed/drift.py",
        "_checked.get(optimizer) == state", "optimizer in _checked",
        "tests/distributed/test_whole_model.py -k later",
    ),
    Mutation(
        "parameters that are trained later are not compared", "distributed/drift.py",
        ' if p.requires_grad]\n    state', ']\n    state',
        "tests/distributed/test_whole_model.py -k later",
    ),
    Mutation(
        "gradients are summed over expert ranks in place", "distributed/module.py",
        "gradient.contiguous().clone()", "gradient.contiguous()",
        "tests/distributed/test_expert_parallel.py -k has_a_parameter",
    ),
    Mutation(
        "the norm counts one mesh", "distributed/clip.py",
        "torch.cat([n.to(norms[0].device) for n in norms])", "norms[0]", _NORMS,
    ),
    Mutation(
        "norms are gathered over one dimension of a mesh", "distributed/clip.py",
        "Replicate() if p.is_replicate() else Shard(0) for p in placements",
        "Replicate() if i or p.is_replicate() else Shard(0) for i, p in enumerate(placements)",
        _NORMS,
    ),
    Mutation(
        "copies of a gradient count in its norm", "distributed/clip.py",
        "Replicate() if p.is_replicate() else Shard(0) for p in placements",
        "Shard(0) for p in placements", _NORMS,
    ),
    Mutation(
        "norms of Partial gradients are those of one rank's terms", "distributed/clip.py",
        "    if placements != gradient.placements:\n", "    if False:\n", _NORMS,
    ),
    Mutation(
        "layers that share a weight get copies of it", "distributed/module.py",
        "            _replaced[p] = spread\n", "",
        "tests/distributed/test_parallelize_model.py -k share_weights",
    ),
    Mutation(
        "attributes of parameters get lost", "distributed/whole_model.py",
        "        vars(p).update(attributes[name])\n", "        pass\n",
        "tests/distributed/test_parallelize_model.py -k share_weights",
    ),
    Mutation(
        "FSDP2 shards packed experts", "distributed/packed.py",
        "    params[:] = [p for p in params if not isinstance(p, kind)]\n", "",
        "tests/distributed/test_packed_parallel.py -k MXFP4",
    ),
    Mutation(
        "under DDP each rank keeps packed experts of its own", "distributed/packed.py",
        "                dist.broadcast(", "                (lambda *_, **__: None)(",
        "tests/distributed/test_packed_parallel.py -k MXFP4",
    ),
    Mutation(
        "FSDP1 shards dequantized experts", "distributed/packed.py",
        "    if any(isinstance(p, kind) for p in params):\n", "    if False:\n",
        "tests/distributed/test_packed_parallel.py -k refused",
    ),
    Mutation(
        "biases of ranks drift apart", "routing/sigmoid.py",
        "if all_reduce is None and (ranks := self._ranks()) > 1:",
        "if all_reduce is None and (ranks := 1) > 1:",
        "tests/distributed/test_whole_model.py -k biases",
    ),
    Mutation(
        "results of users' routers are not checked", "moe.py",
        "        if not self.routing._is_trusted():\n", "        if False:\n",
        "tests/routing/test_own_router.py -k wrong_results",
    ),
    Mutation(
        "parameters of routers are not summed over expert ranks", "distributed/module.py",
        "            if not copies:\n", "            if True:\n",
        "tests/distributed/test_expert_parallel.py -k has_a_parameter",
    ),
    Mutation(
        "users' maps of slots are trusted", "moe.py",
        "trusted=r.token_start is not None and self.routing._is_trusted(),",
        "trusted=r.token_start is not None,",
        "tests/routing/test_own_router.py -k wrong_results",
    ),
    Mutation(
        "a subclass of our router is trusted", "routing/base.py",
        'cls.trusted = vars(cls).get("trusted", False)', "pass",
        "tests/routing/test_own_router.py -k subclass",
    ),
    Mutation(
        "layers that PEFT wraps are counted twice", "watch.py",
        "for part in block.modules()", "for part in block.children()",
        "tests/test_watch.py -k peft",
    ),
    Mutation(
        "the report lists the gradients of frozen weights", "layer/meta.py",
        "requires_grad_(part.requires_grad)", "requires_grad_(part.is_floating_point())",
        "tests/test_model_report.py -k kernels_are_those",
    ),
    Mutation(
        "experts of gpt-oss are not seen", "watch.py",
        '("top_k_index", "router_indices")', '("top_k_index",)',
        "tests/test_watch.py -k GptOss",
    ),
    Mutation(
        "the report forgets FSDP2's dtype", "integrations/report.py",
        "state._mp_policy.param_dtype), p._module_info", "None), p._module_info",
        "tests/test_model_report.py -k fsdp",
    ),
]  # fmt: skip
