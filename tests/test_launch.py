"""A cached launch hands the driver what Triton's own launch would."""

from types import SimpleNamespace

import pytest
import torch
import triton
from triton.runtime.driver import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from sonicmoe.launch import descriptors, launcher
from sonicmoe.launch.thread_state import thread_state

pytestmark = pytest.mark.skipif(
    not launcher._CACHED, reason="only launches of Triton 3.6 to 3.9 are cached"
)
# The driver's function that makes a map, and the place of a kernel's first argument in a launch.
FILL, FIRST = (
    ("fill_tma_descriptor", 13)
    if triton.__version__.startswith("3.6.")
    else ("fill_tma_descriptor_tiled", 15)
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
    if FILL.endswith("_tiled"):
        found.gsan_enabled = False
        found.arg_annotations, found.kernel_signature = "annotations", b"signature"
    found.launch = wrap_handle_tensordesc(record, dict(enumerate(kinds)), meta)
    return found


def _bound(args, constants=()):
    """Of a kernel that takes `args`, and `constants` after them."""
    names = [f"arg{i}" for i in range(len(args) + len(constants))]
    kernel = SimpleNamespace(arg_names=names)
    return launcher.Bound(kernel, **dict(zip(names[len(args) :], constants, strict=True)))


def _start(compiled, grid, args):
    compiled.start(grid, 5, launcher.read(args, frozenset())[1])


def _addresses(call):
    """All arguments in a row, also where the kernel's own came as one."""
    *first, last = call
    flat = [*first, *last] if isinstance(last, list | tuple) else call
    return [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in flat]


@pytest.fixture
def maps(monkeypatch):
    """A driver whose maps are their own parameters."""
    utils = SimpleNamespace(**{FILL: lambda *args: ("map", repr(args))})
    active = SimpleNamespace(utils=utils, get_current_stream=lambda index: 5)
    monkeypatch.setattr(driver, "_active", active)
    launcher._encode.cache_clear()
    yield
    launcher._encode.cache_clear()


@pytest.mark.parametrize("grid", [(7,), (7, 3), (7, 3, 2)])
@pytest.mark.parametrize("order", ["boxes first", "boxes between", "no boxes"])
def test_same_arguments_as_triton(maps, grid, order):
    t, u = torch.zeros(48, 64, dtype=torch.bfloat16), torch.zeros(5, 8, dtype=torch.bfloat16)
    first, second = descriptors.descriptor(t, [64, 64]), descriptors.descriptor(u, [1, 8])
    args = {
        "boxes first": (first, second, u, None, 12),
        "boxes between": (t, first, 12, second, None),
        "no boxes": (t, None, 12, 0.5),
    }[order]
    calls = []
    of_triton = _launcher(lambda *call: calls.append(call), args)
    compiled = SimpleNamespace(run=of_triton, function=99, packed_metadata=(4, 1, 0))
    constants = (128, "silu")
    of_triton(
        *(*grid, 1, 1)[:3], 5, 99, (4, 1, 0), None, None, None,
        *[a[1].of(a[0]) if type(a) is tuple else a for a in args], *constants,
    )  # fmt: skip
    _start(launcher._compiled(_bound(args, constants), compiled, args), grid, args)
    assert len(calls) == 2
    assert _addresses(calls[0]) == _addresses(calls[1])


def test_arguments_as_one():
    """Since Triton 3.7 one C function launches all kernels."""
    calls = []
    of_triton = SimpleNamespace(
        global_scratch_size=0, profile_scratch_size=0, gsan_enabled=False,
        launch_cooperative_grid=False, launch_pdl=True,
        arg_annotations="annotations", kernel_signature=b"signature",
        launch=lambda *call: calls.append(call),
    )  # fmt: skip
    compiled = SimpleNamespace(run=of_triton, function=99, packed_metadata=(4, 1, 0))
    t = torch.zeros(48, 64, dtype=torch.bfloat16)
    args = (t, None, 12)
    _start(launcher._compiled(_bound(args, (128,)), compiled, args), (7,), args)
    kernels_own = (t.data_ptr(), None, 12, 128)
    described = (None, None, None, None, None, "annotations", b"signature", kernels_own)
    assert calls == [(7, 1, 1, 5, 99, False, True, (4, 1, 0), *described)]
    of_triton.gsan_enabled = True
    assert launcher._compiled(_bound((t,)), compiled, (t,)) is None


def test_a_map_is_filled_once_for_an_address_and_its_boxes(monkeypatch):
    filled, calls = [], []
    monkeypatch.setattr(launcher, "_encode", lambda: lambda *a: filled.append(a) or len(filled))
    monkeypatch.setattr(launcher._Maps, "_MOST", 3)
    memory = torch.zeros(4, 64, 64, dtype=torch.bfloat16)
    args = (descriptors.descriptor(memory[0], [64, 64]),)
    of_triton = _launcher(lambda *call: calls.append(call), args, meta=META[:1])
    compiled = SimpleNamespace(run=of_triton, function=99, packed_metadata=(4, 1, 0))
    run = launcher._compiled(_bound(args), compiled, args)

    def start(t):
        _start(run, (1,), (descriptors.descriptor(t, [64, 64]),))
        used = filled[_addresses(calls[-1])[FIRST] - 1]
        assert used[0] == t.data_ptr() and used[5:7] == (list(t.shape), list(t.stride()))
        return len(filled)

    assert [start(memory[i]) for i in (0, 1, 0, 1)] == [1, 2, 2, 2]
    assert start(memory[0, :32]) == 3 and start(memory[0]) == 3
    assert start(memory[2]) == 4 and start(memory[0]) == 5  # all forgotten when there are too many


class _OnGpu(torch.Tensor):
    def get_device(self):
        return 0


class _Kernel:
    """Counts what it compiles, and writes down which of them was started."""

    arg_names = ("x", "y", "tokens", "n", "BLOCK", "FUNCTION")
    params = tuple(SimpleNamespace(num=i, do_not_specialize=i == 2) for i in range(6))

    def __init__(self):
        self.compiled, self.started = 0, []

    def __getitem__(self, grid):
        def compile_and_run(*args, **options):
            self.compiled += 1
            args = [(a,) if isinstance(a, TensorDescriptor) else a for a in args]
            meta = META[: sum(type(a) is tuple for a in args)]
            run = _launcher(lambda *call: self.started.append(call[4]), args, meta=meta)
            return SimpleNamespace(run=run, function=self.compiled, packed_metadata=(4, 1, 0))

        return compile_and_run


def _zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype).as_subclass(_OnGpu)


X = _zeros(48, 64)
USUAL = {"x": X, "y": None, "tokens": 100, "n": 48, "BLOCK": 64, "FUNCTION": len}
ANOTHER_KERNEL = (
    {"x": _zeros(48, 64, dtype=torch.bfloat16)},
    {"x": _zeros(49)[1:]},
    {"x": descriptors.descriptor(X, [64, 64])},
    {"x": descriptors.descriptor(X, [32, 64])},
    {"y": X},
    {"y": _zeros(49)[1:]},
    {"tokens": 2**31},
    {"n": 1},
    {"n": 47},
    {"n": 2**31},
    {"n": 0.5},
    {"BLOCK": 128},
    {"FUNCTION": max},
)
SAME_KERNEL = ({"x": _zeros(3)}, {"tokens": 1}, {"tokens": 64}, {"n": 32}, {"n": 0})


@pytest.fixture
def gpu(maps, monkeypatch):
    monkeypatch.setattr(launcher, "_current_device", lambda: 0)
    monkeypatch.setattr(thread_state, "has_cuda_context", True)


def test_a_profiler_hears_of_every_launch_from_triton(gpu):
    kernel, hook = _Kernel(), triton.knobs.runtime.launch_enter_hook
    bound = launcher.Bound(kernel, BLOCK=64, FUNCTION=len)
    args = [USUAL[name] for name in ("x", "y", "tokens", "n")]
    for listening, by_triton, kept in ((True, 3, 0), (False, 4, 1), (True, 7, 1)):
        if listening:
            hook.add(print)
        for _ in range(3):
            launcher.launch(bound, (7,), *args)
        hook.remove(print)
        assert (kernel.compiled, len(bound.compiled)) == (by_triton, kept)


def test_what_triton_compiles_anew_for_is_another_kernel(gpu):
    kernel = _Kernel()

    def run(change):
        *args, block, function = (USUAL | change).values()
        launcher.launch(kernel, (7,), *args, BLOCK=block, FUNCTION=function)

    for change in ({}, *ANOTHER_KERNEL, *SAME_KERNEL):
        run(change)
    assert kernel.compiled == 1 + len(ANOTHER_KERNEL)
    assert kernel.started == [1] * len(SAME_KERNEL)
    kernel.started.clear()
    for change in ({}, *ANOTHER_KERNEL):
        run(change)
    assert kernel.started == list(range(1, kernel.compiled + 1))


def test_the_value_of_a_float_is_no_other_kernel(gpu):
    kernel = _Kernel()
    for n in (0.5, 0.25, 1.0):
        launcher.launch(kernel, (7,), X, None, 100, n, BLOCK=64, FUNCTION=len)
    assert kernel.compiled == 1


def test_what_triton_must_do_itself(maps):
    """Scratch memory is allocated at every launch; without TMA descriptors fall apart."""
    t = torch.zeros(48, 64, dtype=torch.bfloat16)
    args = (descriptors.descriptor(t, [64, 64]),)
    for of_triton in (
        _launcher(print, args, scratch=16, meta=META[:1]),
        _launcher(print, args, meta=None),
    ):
        compiled = SimpleNamespace(run=of_triton, function=99, packed_metadata=(4, 1, 0))
        assert launcher._compiled(_bound(args), compiled, args) is None


def test_sizes_that_compile_nothing_anew():
    from sonicmoe.kernels import permute, topk

    for kernel, names in ((topk.topk_kernel, {"tokens"}), (permute.place_kernel, {"slots"})):
        assert {kernel.arg_names[place] for place in launcher.Bound(kernel).unspecialized} == names
