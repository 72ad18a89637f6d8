"""What `torch.cuda.make_graphed_callables` returns, on any device: results in fixed memory.

Like its graphs, each call writes over inputs, activations, outputs and gradients of the call
before. It computes eagerly.
"""

import torch


def capture(flat, static):
    """The `capture` of `sonicmoe.integrations.cuda_graphs.Graphed`."""
    parameters = tuple(flat.parameters())
    wanted = [t for t in (*static, *parameters) if t.requires_grad]
    outputs = [t.detach().clone() for t in flat(*static)]
    gradients = {id(t): torch.zeros_like(t) for t in wanted}
    last = []

    class Replayed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
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
