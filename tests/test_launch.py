"""The short way into Triton hands over what Triton's own way would."""

from types import SimpleNamespace

import pytest
import torch
import triton
from triton.runtime.driver import driver

from sonicmoe.ops import launch

pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="only Triton 3.6 is launched past its lookup"
)

META = [
    {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False},
    {"swizzle": 2, "elem_size": 2, "elem_type": 6, "block_size": [1, 8], "fp4_padded": False},
]


def _launcher(record, args, scratch=0, meta=META):
    """Triton's launcher around a C function that writes down what it was called with."""
    from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc

    kinds = ["tensordesc<bf16>" if type(a) is tuple else "*bf16" for a in args]
    kinds += ["constexpr"] * 2
    found = CudaLauncher.__new__(CudaLauncher)
    found.num_ctas = 1
    found.global_scratch_size, found.global_scratch_align = scratch, 1
    found.profile_scratch_size, found.profile_scratch_align = 0, 1
    found.launch_cooperative_grid, found.launch_pdl = False, True
    found.launch = wrap_handle_tensordesc(record, dict(enumerate(kinds)), meta)
    return found


def _addresses(call):
    return [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in call]


@pytest.fixture
def maps(monkeypatch):
    """A driver whose maps are their own parameters."""
    utils = SimpleNamespace(fill_tma_descriptor=lambda *args: ("map", repr(args)))
    monkeypatch.setattr(driver, "_active", SimpleNamespace(utils=utils))
    launch._fill_map.cache_clear()
    yield
    launch._fill_map.cache_clear()


@pytest.mark.parametrize("grid", [(7,), (7, 3), (7, 3, 2)])
@pytest.mark.parametrize("order", ["boxes first", "boxes between", "no boxes"])
def test_same_arguments_as_triton(maps, grid, order):
    t, u = torch.zeros(48, 64, dtype=torch.bfloat16), torch.zeros(5, 8, dtype=torch.bfloat16)
    first, second = launch.descriptor(t, [64, 64]), launch.descriptor(u, [1, 8])
    args = {
        "boxes first": (first, second, u, None, 12),
        "boxes between": (t, first, 12, second, None),
        "no boxes": (t, None, 12),
    }[order]
    calls = []
    launcher = _launcher(lambda *call: calls.append(call), args)
    compiled = SimpleNamespace(run=launcher, function=99, packed_metadata=(4, 1, 0))
    constants = (128, "silu")
    launcher(
        *(*grid, 1, 1)[:3], 5, 99, (4, 1, 0), None, None, None,
        *[a[1].of(a[0]) if type(a) is tuple else a for a in args], *constants,
    )  # fmt: skip
    ready = launch._make_ready(compiled, args, constants)
    launch._start(ready, grid, 5, args, _addresses(args))
    assert len(calls) == 2
    assert _addresses(calls[0]) == _addresses(calls[1])


def test_what_triton_must_do_itself(maps):
    """Scratch memory is allocated at every launch; without a copy engine descriptors fall apart."""
    t = torch.zeros(48, 64, dtype=torch.bfloat16)
    args = (launch.descriptor(t, [64, 64]),)
    for launcher in (
        _launcher(print, args, scratch=16, meta=META[:1]),
        _launcher(print, args, meta=None),
    ):
        compiled = SimpleNamespace(run=launcher, function=99, packed_metadata=(4, 1, 0))
        assert launch._make_ready(compiled, args, ()) is None


def test_sizes_that_compile_nothing_anew():
    from sonicmoe.kernels import permute, topk

    for kernel, names in ((topk.topk_kernel, {"tokens"}), (permute.place_kernel, {"slots"})):
        assert {kernel.arg_names[place] for place in launch._sizes_of(kernel)} == names
