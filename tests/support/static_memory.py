"""What `torch.cuda.make_graphed_callables` returns, on any device: results in fixed memory.

Like its graphs, which share a pool of memory, each call writes over the inputs, activations and
outputs of the call before, and over all gradients. It computes eagerly.
"""

import torch


def pool():
    """The `capture` of one `sonicmoe.integrations.cuda_graphs.Graphed`."""
    memory: list[torch.Tensor] = []
    return lambda flat, static: _captured(flat, static, memory)


def _captured(flat, static, memory):
    parameters = tuple(flat.parameters())
    wanted = [t for t in (*static, *parameters) if t.requires_grad]
    outputs = [t.detach().clone() for t in flat(*static)]
    gradients = {id(t): torch.zeros_like(t) for t in wanted}
    memory.extend(gradients.values())
    last = []

    class Replayed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            for t in memory:
                t.fill_(torch.nan)
            for own, given in zip(static, inputs, strict=False):
                own.copy_(given)
            with torch.enable_grad():
                last[:] = flat(*static)
            for own, new in zip(outputs, last, strict=True):
                own.copy_(new.detach())
            return tuple(t.detach() for t in outputs)

        @staticmethod
        def backward(ctx, *upstream):
            pairs = [(t, g) for t, g in zip(last, upstream, strict=True) if t.requires_grad]
            roots, given = zip(*pairs, strict=True)
            found = torch.autograd.grad(roots, wanted, given, allow_unused=True, retain_graph=True)
            unused = {id(t) for t, g in zip(wanted, found, strict=True) if g is None}
            for t, g in zip(wanted, found, strict=True):
                if g is not None:
                    gradients[id(t)].copy_(g)
            return tuple(
                gradients[id(t)].detach() if id(t) in gradients and id(t) not in unused else None
                for t in (*static, *parameters)
            )

    return lambda *tensors: Replayed.apply(*tensors, *parameters)
