"""The layer and its modules: gradients, memory, checkpoints."""

from mutations.mutation import Mutation

MUTATIONS = [
    Mutation(
        "dX without the router's share", "autograd.py",
        "ops.router_gradient_into(dx, dlogits, weight)", "pass", "tests/test_published.py",
    ),
    Mutation(
        "main_grad is overwritten", "reference/grouped_gemm.py",
        "main_grad.add_(dw2)", "main_grad.copy_(dw2)", "tests/test_main_grad.py",
    ),
    Mutation(
        "a checkpoint computes the output again", "checkpoint.py",
        "return None if hooks is None else []", "return None",
        "tests/integrations/test_checkpointing.py",
    ),
    Mutation(
        "the gradient of the output is lost in a checkpoint", "checkpoint.py",
        "        return dout, None\n", "        return None, None\n",
        "tests/integrations/test_checkpointing.py",
    ),
    Mutation(
        "the loss comes after the experts", "moe.py",
        "            out = finish(out, deferred)\n",
        "            out = finish(out, deferred)\n"
        "            if aux_loss is not None:\n"
        "                aux_loss = self._aux_loss(logits, r, p.counts, name)\n",
        "tests/integrations/test_checkpointing.py",
    ),
]  # fmt: skip
