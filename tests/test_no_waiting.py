"""No host synchronisation, seen without a GPU: the host's way through the kernels reads no value.

Launches do nothing here, so that every line between them runs as for an H200 on CPU tensors, and
whatever would bring a value to the host, or make a size depend on one, fails.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sonicmoe
from sonicmoe import MoE, routing
from sonicmoe.launch import grouped_gemm, memory
from sonicmoe.launch import routing as launch_routing
from sonicmoe.launch import token_rounding as launch_token_rounding
from sonicmoe.layer import prepare
from sonicmoe.layer import run as layer_run
from sonicmoe.routing import losses, scores, sigmoid, token_rounding
from sonicmoe.tuning import Target

READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
DEPENDS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "is_nonzero",
)


class ValuesStayOnTheDevice(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in DEPENDS, f"{func} waits for the device"
        if name == "index":
            masks = [t for t in args[1] if t is not None and t.dtype == torch.bool]
            assert not masks, "a boolean index waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def host_alone(monkeypatch):
    def forbidden(name):
        def read(*args, **kwargs):
            raise AssertionError(f"Tensor.{name} waits for the device")

        return read

    for module in (grouped_gemm, launch_routing, launch_token_rounding):
        monkeypatch.setattr(module, "launch", lambda *args, **kwargs: None)
    for module in (prepare, layer_run, scores, losses, sigmoid, token_rounding):
        monkeypatch.setattr(module, "resolve_backend", lambda backend, x: "triton")
    # What no kernel writes may serve as an index further on.
    monkeypatch.setattr(
        memory, "empty", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device)
    )
    monkeypatch.setattr(grouped_gemm, "target_of", lambda t: Target(90, 132))
    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, forbidden(name))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("router", sorted(routing.ROUTERS))
def test_a_step_reads_nothing(router, bias, host_alone):
    moe = MoE(8, 2, 64, 32, add_bias=bias, router=router).to(torch.bfloat16)
    x = torch.randn(48, 64, dtype=torch.bfloat16, requires_grad=True)
    with ValuesStayOnTheDevice():
        out, aux = moe(x)
        torch.autograd.grad([out, aux], [x, *moe.parameters()], [torch.ones_like(out), None])


def test_sorted_rows_read_nothing(host_alone):
    w1, w2 = torch.randn(4, 64, 16), torch.randn(4, 16, 32)
    rows = torch.randn(30, 16, requires_grad=True)
    with ValuesStayOnTheDevice():
        out = sonicmoe.grouped_experts(rows, torch.tensor([3, 0, 20, 1]), w1, w2)
        torch.autograd.grad(out, rows, torch.ones_like(out))
