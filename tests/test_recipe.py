"""An operator that is done by its recipe hands the driver what it would hand over itself.

No GPU: tensors on the CPU pass for tensors on one, and launches are written down.
"""

import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from test_operators import ARGUMENTS, CALLS
from triton.runtime.jit import JITFunction

from sonicmoe import ops
from sonicmoe.ops import launch, launch_products, launch_routing, memory, recipe
from sonicmoe.ops.here import here
from sonicmoe.tuning import Target, table

pytestmark = pytest.mark.skipif(
    not launch._AS_READ, reason="only Triton 3.6 to 3.9 are launched past their lookup"
)
_ALLOCATE = getattr(torch._C._dynamo.guards, "_empty_strided_cpu")  # noqa: B009
STREAM = 5


class Gpu:
    """What was launched, and the buffers that were given out, all of them held."""

    def __init__(self, as_one):
        self.launches, self.buffers = [], []
        self.as_one = as_one  # whether a kernel's arguments come so, as since Triton 3.7

    def allocate(self, *how):
        self.buffers.append(_ALLOCATE(*how))
        return self.buffers[-1]

    def run(self, *call):
        self.launches.append((*call[:-1], *call[-1]) if self.as_one else call)

    def start(self, bound, compiled, index, args):
        """For `launch._start`; a map is the address and the boxes that it was asked for."""
        maps = [_AsAsked() for a in args if type(a) is tuple]
        kernel = launch.Compiled(self.run, ("head",), maps, (bound.kernel.__name__,), self.as_one)
        return launch._written_out(kernel, args, bound.sizes, index)

    def seen(self, step, given):
        """Launches and results of `step`, with names for the addresses of arguments and buffers."""
        self.launches.clear()
        self.buffers.clear()
        result = step()
        places = [(f"argument {i}", t) for i, t in enumerate(given)]
        places += [(f"buffer {i}", t) for i, t in enumerate(self.buffers)]

        def name(value):
            if type(value) is tuple:
                return tuple(map(name, value))
            if type(value) is not int or value < 2**32:
                return value
            for who, t in places:
                if 0 <= value - t.data_ptr() < max(t.nbytes, 1):
                    return who, value - t.data_ptr()
            return "nobody's"

        results = result if type(result) is tuple else (result,)
        described = [
            t if t is None else (name(t.data_ptr()), t.shape, t.stride(), t.dtype) for t in results
        ]
        return [name(call) for call in self.launches], described


class _AsAsked(dict):
    def __missing__(self, key):
        return key


@pytest.fixture(params=[False, True], ids=["in a row", "as one"])
def gpu(monkeypatch, request):
    gpu = Gpu(request.param)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda t: 0)
    monkeypatch.setattr(here, "knows_the_gpu", True)
    monkeypatch.setattr(memory, "_is_current_gpu", lambda device: True)
    monkeypatch.setattr(memory, "on_current_gpu", gpu.allocate)
    monkeypatch.setattr(launch_products, "target_of", lambda t: Target(90, 132))
    monkeypatch.setattr(JITFunction, "run", lambda *args, **options: None)
    monkeypatch.setattr(launch, "_start", gpu.start)
    _forget_all()
    yield gpu
    _forget_all()


def _forget_all():
    table.forget()
    launch._bound.clear()
    for module in (launch_products, launch_routing, *_lazy()):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def _lazy():
    from sonicmoe.ops import launch_hopper, launch_token_rounding

    return launch_hopper, launch_token_rounding


# Empty results, and factors that PyTorch copies first, since they do not lie as the weights do.
REFUSED = {
    ("permute", 2),
    ("adapted_product", 1),
    ("adapted_down_backward", 0),
    ("adapted_down_backward", 1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "call"), [c for c in CALLS if c[0] != "router_gradient_into"])
def test_hands_over_the_same(name, call, dtype, gpu):
    *args, _backend = ARGUMENTS[name][call]
    if name.endswith("_into"):
        args[0] = args[0].float()

    def fresh():
        """None of the arguments where it was, each in memory of its own."""
        new = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        first = 1 if name.endswith("_into") else 0  # an fp32 buffer
        for i, a in enumerate(new[first:], first):
            if isinstance(a, torch.Tensor) and a.dtype == torch.float32:
                new[i] = a.to(dtype)
        return *new, "triton"

    operator = getattr(ops, name)

    def step(function):
        given = fresh()
        return gpu.seen(lambda: function(*given), [a for a in given if torch.is_tensor(a)])

    step(operator)  # compiles
    want = step(operator.__wrapped__)
    assert step(operator) == want  # written down
    (written,) = recipe.known[f"sonicmoe::{name}"].values()
    # A product of fp32 depends on a setting of PyTorch's, too.
    product = any(stage in name for stage in ("up", "down", "adapted")) and dtype == torch.float32
    refused = (name, call) in REFUSED or product
    assert (written is None) == refused
    assert step(operator) == want


def _operator(function, schema="(Tensor x, int n, str backend) -> Tensor"):
    """`function`, and the recipes that are known of it."""
    schema = torch._C.parse_schema(f"test::{function.__name__}{schema}")
    return recipe.by_recipe(function, schema), recipe.known[schema.name]


@triton.jit
def kernel(x, y, n, BLOCK: tl.constexpr):
    pass


def _launched(x, y, n):
    launch.launch(kernel, (n,), x, y, n, BLOCK=64)
    return y


def _new(*shape, dtype=torch.float32):
    return memory.empty(shape, dtype, torch.device("cpu"))


def test_another_kind_of_arguments_has_another_recipe(gpu):
    def doubled(x, n, backend):
        return _launched(x, _new(*x.shape, dtype=x.dtype), n)

    operator, recipes = _operator(doubled)
    x = torch.zeros(16, 16)
    others = [
        (x, 3), (x, 4), (x[:4], 3), (x.mT, 3), (x.bfloat16(), 3),
        (torch.zeros(96), 3), (torch.zeros(97)[1:], 3),
    ]  # fmt: skip
    for number, given in enumerate(others, 1):
        operator(*given, "triton")  # where Triton itself launches what it compiled
        results = [operator(*given, "triton") for _ in range(4)]
        assert len(recipes) == number and None not in recipes.values()
        assert {(t.shape, t.stride(), t.dtype) for t in results} == {
            (given[0].shape, _new(*given[0].shape).stride(), given[0].dtype)
        }
        address, n = given[0].data_ptr(), given[1]
        assert gpu.launches[-4:] == [
            (n, 1, 1, STREAM, "head", address, t.data_ptr(), n, "kernel") for t in results
        ]


def test_who_is_called(gpu):
    """The function itself runs twice, then where its recipe is not to be used."""
    calls = []

    def counted(x, n, backend):
        calls.append(backend)
        return _launched(x, _new(4), n)

    operator, recipes = _operator(counted)
    x = torch.zeros(4)
    for _ in range(5):
        operator(x, 1, "triton")
    assert calls == ["triton"] * 2 and len(gpu.launches) == 4  # and one by Triton itself
    operator(x, 1, "torch")
    assert calls[2:] == ["torch"] and len(recipes) == 1
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(print)
    operator(x, 1, "triton")  # who listens hears of it from Triton
    hook.remove(print)
    assert len(calls) == 4
    table.forget()  # another table, another choice
    operator(x, 1, "triton")
    assert len(calls) == 5


def test_only_so_many_are_remembered(gpu, monkeypatch):
    monkeypatch.setattr(recipe, "_MOST", 5)

    def doubled(x, n, backend):
        return _launched(x, _new(4), n)

    operator, recipes = _operator(doubled)
    x = torch.zeros(4)
    for n in range(1, 8):
        operator(x, n, "triton")
        assert [kind[-2] for kind in recipes] == list(range(1, n + 1))[-5:]
    for n in (7, 7, 1):
        operator(x, n, "triton")
    assert [kind[-2] for kind in recipes] == [4, 5, 6, 7, 1]


def test_other_sizes_are_not_compiled_again(gpu):
    def planes(x, n, backend):
        y = _new(n, *x.shape)
        _launched(launch.descriptor(y, [4, 16]), x, n)
        return _launched(y[n - 1], _new(*x.shape), n)

    operator, recipes = _operator(planes)
    for tokens in (16, 32, 48):
        for _ in range(3):
            operator(torch.zeros(tokens), 2 * tokens, "triton")
        if tokens == 16:
            before = recipe._compiled.cache_info().misses
    assert recipe._compiled.cache_info().misses == before
    assert len(recipes) == 3 and None not in recipes.values()


def test_what_pytorch_computes_is_refused(gpu):
    shared = torch.zeros(40)
    everywhere = torch.zeros(4)
    refused = {
        "computes": lambda x, n, backend: _launched(x + 1, _new(4), n),
        "changes": lambda x, n, backend: _launched(x.mul_(2), _new(4), n),
        "zeroes an argument": lambda x, n, backend: _launched(x.zero_(), _new(4), n),
        "reads": lambda x, n, backend: _launched(x, _new(4), n + int(x[0])),
        "knows a tensor": lambda x, n, backend: _launched(everywhere, _new(4), n),
        "returns an argument": lambda x, n, backend: _launched(x, x, n),
        "returns a part": lambda x, n, backend: _launched(x, _new(4), n)[:2],
        "returns other numbers": lambda x, n, backend: _launched(x, _new(4), n).view(torch.int32),
        "returns nothing": lambda x, n, backend: _launched(x, _new(0), n),
        "rounds as told": lambda x, n, backend: _launched(
            x, _new(4), len(launch.dot_precision(x)) * n
        ),
    }
    for name, function in refused.items():
        function.__name__ = name.replace(" ", "_")
        operator, recipes = _operator(function)
        for _ in range(4):
            operator(torch.zeros(4), 1, "triton")
        assert list(recipes.values()) == [None], name

    def both(x, y, backend):
        return _launched(x, _new(4), 1)

    operator, recipes = _operator(both, "(Tensor x, Tensor y, str backend) -> Tensor")
    for x, y in ((shared[:20], shared[16:36]), (shared[16:36], shared[:20]), (shared, shared[4:8])):
        for _ in range(3):
            operator(x, y, "triton")
    assert set(recipes.values()) == {None}
    operator(shared[:16], shared[16:32], "triton")
    operator(shared[:16], shared[16:32], "triton")
    assert list(recipes.values())[-1] is not None


def test_what_triton_launches_itself_is_refused(gpu, monkeypatch):
    """Because it has more to do at every launch."""
    monkeypatch.setattr(launch, "_start", lambda *args: None)

    def doubled(x, n, backend):
        return _launched(x, _new(4), n)

    operator, recipes = _operator(doubled)
    for _ in range(3):
        operator(torch.zeros(4), 1, "triton")
    assert list(recipes.values()) == [None]


def test_a_buffer_where_another_was(gpu, monkeypatch):
    """Given back and given out again while it was written down, and elsewhere later on."""
    first, *others = (torch.zeros(4) for _ in range(5))
    given_out = iter([*others[:2], first, first.view(4), *others[2:]])
    monkeypatch.setattr(memory, "on_current_gpu", lambda *how: next(given_out))

    def chain(x, n, backend):
        _launched(x, _new(4), n)
        return _launched(x, _new(4), n)

    operator, recipes = _operator(chain)
    for _ in range(2):
        operator(torch.zeros(4), 1, "triton")
    assert None not in recipes.values()
    gpu.launches.clear()
    assert operator(torch.zeros(4), 1, "triton") is others[3]
    assert [call[6] for call in gpu.launches] == [t.data_ptr() for t in others[2:]]


def test_buffers_are_given_back_when_they_were_needed_last(gpu, monkeypatch):
    alive, most = weakref.WeakSet(), []

    def allocate(*how):
        t = _ALLOCATE(*how)
        alive.add(t)
        most.append(len(alive))
        return t

    def chain(x, n, backend):
        t = x
        for _ in range(6):
            t = _launched(t, _new(4), n)
        return t

    monkeypatch.setattr(memory, "on_current_gpu", allocate)
    operator, recipes = _operator(chain)
    for _ in range(3):
        most.clear()
        operator(torch.zeros(4), 1, "triton")
        assert max(most) == 2
    assert list(recipes.values()) != [None]


def test_views_and_zeros(gpu):
    """What lies inside of a buffer is found there; zeros are written each time."""

    def parts(x, n, backend):
        planes, zeros = _new(3, 16), _new(5).zero_()
        _launched(x[4:], planes[2], n)
        return _launched(planes, zeros, n), planes, None

    operator, recipes = _operator(
        parts, "(Tensor x, int n, str backend) -> (Tensor, Tensor, Tensor)"
    )
    x = torch.zeros(16)
    operator(x, 7, "triton")
    for _ in range(4):
        gpu.launches.clear()
        zeros, planes, nothing = operator(x, 7, "triton")
        assert nothing is None and torch.equal(zeros, torch.zeros(5))
        first, second = gpu.launches
        assert first[5:7] == (x.data_ptr() + 16, planes.data_ptr() + 128)
        assert second[5:7] == (planes.data_ptr(), zeros.data_ptr())
        zeros.fill_(3)
    assert list(recipes.values()) != [None]


def test_an_error_while_it_is_written_down(gpu):
    fails = [False, True, False, False, False]

    def sometimes(x, n, backend):
        if fails.pop(0):
            raise RuntimeError("out of memory")
        return _launched(x, _new(4), n)

    operator, recipes = _operator(sometimes)
    x = torch.zeros(4)
    operator(x, 1, "triton")
    with pytest.raises(RuntimeError, match="out of memory"):
        operator(x, 1, "triton")
    assert here.recording is None and torch._C._len_torch_dispatch_stack() == 0
    for _ in range(3):
        operator(x, 1, "triton")
    assert len(fails) == 2 and None not in recipes.values()


def test_threads_write_down_what_they_do_themselves(gpu):
    """What another thread allocates and computes meanwhile is not part of it."""
    inside, outside = threading.Event(), threading.Event()
    slow = [False, True, False]

    def waits(x, n, backend):
        if slow.pop(0):
            inside.set()
            assert outside.wait(10)
        return _launched(x, _new(4), n)

    operator, recipes = _operator(waits)
    operator(torch.zeros(4), 1, "triton")
    thread = threading.Thread(target=_in_a_thread, args=(operator,))
    thread.start()
    assert inside.wait(10)
    _launched(torch.zeros(8) + 1, _new(8), 2)
    outside.set()
    thread.join()
    gpu.launches.clear()
    operator(torch.zeros(4), 1, "triton")
    assert len(gpu.launches) == 1 and None not in recipes.values() and len(slow) == 1


def _in_a_thread(operator):
    here.knows_the_gpu = True
    operator(torch.zeros(4), 1, "triton")


def test_a_thread_meets_the_gpu_by_a_launch(gpu, monkeypatch):
    """Which no recipe sees to: the first call of a thread, seen or not, is the operator's own."""
    met, calls = [], []
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: met.append(1)))
    monkeypatch.setattr(here, "knows_the_gpu", False)

    def counted(x, n, backend):
        calls.append(n)
        return _launched(x, _new(4), n)

    operator, recipes = _operator(counted)

    def twice():
        for _ in range(2):
            operator(torch.zeros(4), 1, "triton")

    twice()
    assert len(met) == 1 and None not in recipes.values()
    twice()
    assert len(calls) == 2
    thread = threading.Thread(target=twice)
    thread.start()
    thread.join()
    assert len(met) == 2 and len(calls) == 3
