"""Kept FP8 weights: every change that PyTorch can show is seen, others are an error."""

import copy
import gc
import io
import pickle
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint

from sonicmoe import Fp8Weights, MoE, experts, grouped_experts
from sonicmoe.layer import fp8_weights
from sonicmoe.reference import fp8


@pytest.fixture
def quantized(monkeypatch):
    """Weights that were quantized, in order."""
    found, quantize, into = [], fp8.quantize_weight, fp8.quantize_weight_into
    monkeypatch.setattr(fp8, "quantize_weight", lambda w, *o: found.append(w) or quantize(w, *o))
    monkeypatch.setattr(
        fp8, "quantize_weight_into", lambda *given: found.append(given[-1]) or into(*given)
    )
    return found


def layer(**options: Any) -> MoE:
    torch.manual_seed(0)
    common: dict[str, Any] = {"precision": "fp8", "dtype": torch.bfloat16}
    return MoE(4, 2, 32, 16, **common | {"cache_fp8_weights": True} | options)


def tokens() -> torch.Tensor:
    return torch.randn(12, 32, generator=torch.Generator().manual_seed(1)).bfloat16()


def fresh(moe: MoE) -> torch.Tensor:
    """The output of a layer that quantizes in every call."""
    other = layer(cache_fp8_weights=False)
    other.load_state_dict(moe.state_dict())
    return other(tokens())[0]


def test_quantized_once_while_nothing_changes(quantized):
    moe = layer()
    for _ in range(3):
        moe(tokens())[0].sum().backward()
    assert len(quantized) == 2
    with torch.no_grad():
        moe(tokens())
    assert len(quantized) == 2


def test_each_call_compares_another_sample(monkeypatch):
    samples, check = [], fp8.checked_scales

    def record(*args):
        samples.append(args[6].clone())
        return check(*args)

    monkeypatch.setattr(fp8, "checked_scales", record)
    moe = layer()
    for _ in range(4):
        moe(tokens())
    assert torch.equal(torch.stack(samples), torch.arange(3)[:, None, None].expand(3, 2, 4))


def buffers(moe: Any) -> list[torch.Tensor]:
    kept = moe._fp8_weights._kept
    return [t for part in (kept.first, kept.second) for t in part.quantized if t is not None]


def test_weights_are_quantized_in_place():
    moe = layer()
    optimizer = torch.optim.SGD(moe.parameters(), 1.0)
    moe(tokens())[0].sum().backward()
    before = buffers(moe)
    old = [t.clone() for t in before]
    optimizer.step()
    moe.refresh_fp8_weights()
    with torch.no_grad():
        moe.c_proj.weight.mul_(2)
    moe(tokens())
    after = buffers(moe)
    assert len(before) == 7 and all(a is b for a, b in zip(after, before, strict=True))
    for was, now in zip(old, after, strict=True):
        assert not torch.equal(was.float(), now.float())


def test_without_a_cache_quantized_in_every_call(quantized):
    moe = layer(cache_fp8_weights=False)
    for _ in range(3):
        moe(tokens())
    assert len(quantized) == 6
    moe.refresh_fp8_weights()


class WritesData(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data.mul_(1.5)


OPTIMIZERS = {
    "foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "for loop": lambda p: torch.optim.AdamW(p, 0.1, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),  # leaves the version counter alone
    "data": WritesData,
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_of_optimizers_are_seen(kind, compiled, quantized):
    moe = layer()
    optimizer = OPTIMIZERS[kind](moe.parameters())
    torch._dynamo.reset()
    step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
    for _ in range(2):
        before = moe(tokens())[0]
        before.sum().backward()
        quantized.clear()
        step()
        assert len(quantized) == 2  # at once
        after = moe(tokens())[0]
        assert len(quantized) == 2
        assert not torch.equal(before, after) and torch.equal(after, fresh(moe))
    torch._dynamo.reset()


def test_an_optimizer_of_other_parameters_quantizes_nothing(quantized):
    moe, other = layer(), nn.Linear(4, 4)
    moe(tokens())[0].sum().backward()
    quantized.clear()
    for parameters in (other.parameters(), moe.router.parameters()):
        torch.optim.AdamW(parameters, 0.1).step()
    assert not quantized
    torch.optim.AdamW([moe.c_proj.weight], 0.1, fused=True).step()
    assert [w.data_ptr() for w in quantized] == [moe.c_proj.weight.data_ptr()]
    assert torch.equal(moe(tokens())[0], fresh(moe))


def test_an_optimizer_in_the_backward_pass():
    """W2 is quantized again before the backward pass reads W1."""
    found = []
    for cached in (True, False):
        moe = layer(cache_fp8_weights=cached)
        for p in moe.parameters():
            optimizer = torch.optim.SGD([p], 0.1)
            p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        for _ in range(3):
            out = moe(tokens())[0]
            out.sum().backward()
        found.append(out)
    assert torch.equal(*found)


def test_a_dropped_layer_is_forgotten():
    moe = layer()
    moe(tokens())
    store = weakref.ref(moe._fp8_weights)
    assert store() in fp8_weights._stores
    del moe
    gc.collect()
    assert store() is None


def _inference(w):
    with torch.inference_mode():
        w.mul_(2)


def _replaced(moe):
    moe.c_fc.weight = nn.Parameter(2 * moe.c_fc.weight.detach())


def _loaded(moe, **options):
    state = {name: 2 * t for name, t in moe.state_dict().items()}
    moe.load_state_dict(state, **options)


def _through_fp32(moe):
    """Back in bf16 with other values, and with luck at the same address."""
    with torch.no_grad():
        moe.c_fc.float()
        moe.c_fc.weight.data.mul_(2)
        moe.c_fc.bfloat16()


CHANGES = {
    "in place": lambda moe: moe.c_fc.weight.detach().mul_(2),
    "foreach": lambda moe: torch._foreach_mul_([moe.c_fc.weight.detach()], 2),
    "inference": lambda moe: _inference(moe.c_proj.weight),
    "init": lambda moe: nn.init.normal_(moe.c_fc.weight),
    "reset": lambda moe: moe.reset_parameters(),
    "load": _loaded,
    "load, assigned": lambda moe: _loaded(moe, assign=True),
    "load of a part": lambda moe: moe.c_fc.load_state_dict(
        {"weight": 2 * moe.c_fc.weight.detach()}
    ),
    "replaced": _replaced,
    "data assigned": lambda moe: setattr(moe.c_fc.weight, "data", 2 * moe.c_fc.weight.data),
    "set_": lambda moe: moe.c_fc.weight.set_(2 * moe.c_fc.weight.detach()),
    "another dtype": _through_fp32,
    "to_empty": lambda moe: (moe.to_empty(device="cpu"), moe.reset_parameters()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change):
    moe = layer()
    before = moe(tokens())[0]
    with torch.no_grad():
        CHANGES[change](moe)
    after = moe(tokens())[0]
    assert not torch.equal(before, after) and torch.equal(after, fresh(moe))


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rank", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


UNSEEN = {
    "data": lambda w: w.data.mul_(2),
    "storage": lambda w: w.untyped_storage().copy_((2 * w.detach()).untyped_storage()),
    "numpy": lambda w: w.detach().view(torch.int16).numpy().__iadd__(1 << 7),
}


@pytest.mark.parametrize("name", ["c_fc", "c_proj"])
@pytest.mark.parametrize("change", UNSEEN)
def test_other_changes_are_an_error_without_a_refresh(change, name):
    moe = layer()
    before = moe(tokens())[0]
    UNSEEN[change](getattr(moe, name).weight)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^{name}\.weight: expected the values it had"):
            moe(tokens())
    with pytest.raises(ValueError, match=rf"^{name}\.weight: expected the values it had"):
        torch.optim.SGD(moe.parameters(), 0.1).step()
    moe.refresh_fp8_weights()
    after = moe(tokens())[0]
    assert not torch.equal(before, after) and torch.equal(after, fresh(moe))


def test_weights_that_are_not_finite_are_no_error():
    moe = layer()
    with torch.no_grad():
        moe.c_fc.weight[1, 2, 3] = torch.nan
        moe.c_proj.weight[2, 0, 1] = torch.inf
    for _ in range(2):
        assert moe(tokens())[0].isnan().any()


def test_an_expert_that_was_not_finite_and_is_repaired_unseen():
    moe = layer()
    with torch.no_grad():
        moe.c_fc.weight[1, 2, 3] = torch.nan
    moe(tokens())
    moe.c_fc.weight.data[1, 2, 3] = 0.01
    with pytest.raises(ValueError, match=r"^c_fc\.weight: expected the values it had"):
        moe(tokens())
    moe.refresh_fp8_weights()
    assert not moe(tokens())[0].isnan().any()


def test_weights_in_the_other_order_of_memory():
    """The dense strides of `transformers`: (E, K, N)."""
    moe = layer()
    for part in (moe.c_fc, moe.c_proj):
        part.weight = nn.Parameter(part.weight.detach().mT.contiguous().mT)
    for _ in range(2):
        assert torch.equal(moe(tokens())[0], fresh(moe))
    moe.c_proj.weight.data[3, 5, 7] += 1
    with pytest.raises(ValueError, match="c_proj"):
        moe(tokens())


def test_functional_call_uses_what_it_is_given(quantized):
    moe = layer()
    moe(tokens())
    doubled = {"c_fc.weight": 2 * moe.c_fc.weight.detach()}
    found = torch.func.functional_call(moe, doubled, (tokens(),))[0]
    expected = copy.deepcopy(moe)
    expected.load_state_dict(moe.state_dict() | doubled)
    assert torch.equal(found, expected(tokens())[0])
    assert torch.equal(moe(tokens())[0], fresh(moe))


def test_weights_that_are_computed_are_never_cached(quantized):
    moe = layer()

    class Doubled(nn.Module):
        def forward(self, w):
            return 2 * w

    torch.nn.utils.parametrize.register_parametrization(moe.c_fc, "weight", Doubled())
    for grad in (True, False, True):
        del quantized[:]
        with torch.set_grad_enabled(grad):
            moe(tokens())
        assert len(quantized) == 2


def test_what_inference_cached_can_be_trained():
    moe = layer()
    with torch.inference_mode():
        want = moe(tokens())[0]
    out = moe(tokens())[0]
    out.sum().backward()
    assert torch.equal(out, want) and moe.c_fc.weight.grad is not None
    with torch.inference_mode():
        other = layer()  # inference tensors have no version counter
        assert torch.equal(other(tokens())[0], want)


@pytest.mark.parametrize("memory", ["keep", "e4m3", "recompute"])
@pytest.mark.parametrize("name", ["c_fc", "c_proj"])
def test_weights_refreshed_before_the_backward_pass_are_an_error(name, memory):
    moe, x = layer(memory=memory), tokens().requires_grad_()
    out = moe(x)[0]
    out_again = moe(x)[0]
    torch.autograd.grad(out.sum(), x)
    getattr(moe, name).weight.data.mul_(2)  # which autograd does not see
    moe.refresh_fp8_weights()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out_again.sum(), x)


def test_other_weights_leave_those_of_a_running_step_alone():
    moe, x = layer(), tokens().requires_grad_()
    want = torch.autograd.grad(moe(x)[0].sum(), x)[0]
    out = moe(x)[0]
    doubled = {"c_fc.weight": 2 * moe.c_fc.weight.detach()}
    torch.func.functional_call(moe, doubled, (x,))
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], want)


def test_threads_quantize_once(quantized, monkeypatch):
    """The second thread waits for the weights that the first one quantizes."""
    moe, inside, go_on = layer(), threading.Event(), threading.Event()
    moe(tokens())
    with torch.no_grad():
        moe.c_fc.weight.mul_(2)
        moe.c_proj.weight.mul_(2)
    want = fresh(moe)
    quantized.clear()
    names = ("quantize_weight", "quantize_weight_into")
    for name, function in [(name, getattr(fp8, name)) for name in names]:

        def waiting(*given, function=function):
            found = function(*given)
            inside.set()
            assert go_on.wait(60)
            return found

        monkeypatch.setattr(fp8, name, waiting)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: moe(tokens())[0])
        assert inside.wait(60)  # W1 is new, W2 is not yet
        second = pool.submit(lambda: moe(tokens())[0])
        time.sleep(0.2)
        go_on.set()
        assert torch.equal(first.result(), want) and torch.equal(second.result(), want)
    assert len(quantized) == 2


def test_threads_with_weights_of_their_own():
    """At every line of one thread, another one calls with other weights."""
    weights = [[torch.full((4, 32, 32), value) for _ in range(2)] for value in (1.0, 16.0)]
    other = threading.Event()

    def scales(store, own):
        try:
            return [q.w_scale[0].item() for q in store.quantized(*own, True, False, "torch")]
        finally:
            other.set()

    with ThreadPoolExecutor(1) as pool:
        for stop in range(1, 1000):
            store, line, there = layer()._fp8_weights, 0, None

            def trace(frame, event, _):
                nonlocal line, there
                if frame.f_code.co_filename == fp8_weights.__file__ and event == "line":
                    line += 1
                    if line == stop:  # noqa: B023
                        other.clear()
                        there = pool.submit(scales, store, weights[1])  # noqa: B023
                        other.wait(0.02)  # longer if it waits for this one
                return trace

            before = sys.gettrace()
            sys.settrace(trace)
            try:
                found = scales(store, weights[0])
            finally:
                sys.settrace(before)
            assert found == [2.0**-8] * 2, f"at line {stop}"
            if there is None:
                break
            assert there.result(60) == [2.0**-4] * 2, f"at line {stop}"
    assert 20 < stop < 999


def test_copies_and_pickles_are_empty():
    moe = layer()
    out = moe(tokens())[0]
    sizes = []
    for m in (moe, layer(cache_fp8_weights=False)):
        file = io.BytesIO()
        torch.save(m, file)
        sizes.append(file.tell())
    assert sizes[0] < sizes[1] + 1024
    for other in (copy.deepcopy(moe), pickle.loads(pickle.dumps(moe))):
        assert other._fp8_weights is not moe._fp8_weights and not other._fp8_weights.is_kept
        assert torch.equal(other(tokens())[0], out)
    assert list(moe.state_dict()) == ["router.weight", "c_fc.weight", "c_proj.weight"]


def test_to_frees_them():
    moe = layer()
    moe(tokens())
    assert moe._fp8_weights.is_kept
    nn.Sequential(moe).to("cpu")
    assert not moe._fp8_weights.is_kept


def test_fsdp2_quantizes_in_every_call(process_group, quantized):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    moe = layer()
    block = nn.Sequential(nn.Identity(), moe)  # the layer itself has no mark
    fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(block.parameters(), 1.0)
    found = []
    for i in range(3):
        found.append(block(tokens())[0])
        (found[-1] + block(tokens())[0]).sum().backward()
        assert len(quantized) == 4 * (i + 1)
        optimizer.step()
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
    del quantized[:]
    beside = layer()
    for _ in range(2):
        beside(tokens())
    assert len(quantized) == 2  # not sharded, so kept


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_quantizes_in_every_call(process_group, quantized, use_orig_params):
    block = FullyShardedDataParallel(
        nn.Sequential(layer()), use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    for grad in (True, False, True):
        del quantized[:]
        with torch.set_grad_enabled(grad):
            block(tokens())
        assert len(quantized) == 2


@pytest.mark.parametrize("collective", ["broadcast", "all_reduce"])
def test_collectives_need_a_refresh(process_group, collective):
    """If they bump the version counter one day, the documents may say so."""
    w = layer().c_fc.weight
    before = w._version
    with torch.no_grad():
        dist.broadcast(w, 0) if collective == "broadcast" else dist.all_reduce(w)
    assert w._version == before


def test_activation_checkpointing(quantized):
    """The recomputation finds the kept weights, and saves the same tensors."""
    moe, x = layer(), tokens()
    want = torch.autograd.grad(moe(x)[0].sum(), list(moe.parameters()))
    moe.refresh_fp8_weights()
    assert len(quantized) == 4

    def run(x):
        return checkpoint(moe, x, use_reentrant=False)[0]

    torch._dynamo.reset()
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        got = torch.autograd.grad(function(x).sum(), list(moe.parameters()))
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
    assert len(quantized) == 4
    torch._dynamo.reset()


def test_compiled_models_read_kept_weights(quantized):
    torch._dynamo.reset()
    moe, x = layer(), tokens().requires_grad_()
    moe.refresh_fp8_weights()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(moe, fullgraph=True, backend=counter)
    optimizer = torch.optim.AdamW(moe.parameters(), 0.05, fused=True)

    def step(layer):
        out, loss = layer(x)
        gradients = torch.autograd.grad(out.float().square().sum() + loss, list(moe.parameters()))
        return [out, *gradients]

    outs = []
    for _ in range(3):
        quantized.clear()
        got = step(compiled)
        assert not quantized
        for p, gradient in zip(moe.parameters(), got[1:], strict=True):
            p.grad = gradient
        for a, b in zip(got, step(moe), strict=True):
            assert torch.equal(a, b)
        outs.append(got[0])
        optimizer.step()
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])
    state = {name: 2 * t for name, t in moe.state_dict().items()}
    nn.Sequential(moe).load_state_dict({f"0.{name}": t for name, t in state.items()})
    loaded = compiled(x)[0]
    assert torch.equal(loaded, fresh(moe)) and not torch.equal(loaded, outs[2])
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_layers_of_a_model_are_compiled_once():
    """PyTorch gives up compiling a function after eight variants of it."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    x = tokens().requires_grad_()
    for moe in (layer() for _ in range(9)):
        moe.refresh_fp8_weights()
        moe.compile(fullgraph=True, backend=counter)
        moe(x)[0].sum().backward()
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_stale_weights_of_a_compiled_model():
    torch._dynamo.reset()
    moe, x = layer(), tokens()
    moe(x)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    out = compiled(x.requires_grad_())[0]
    with torch.no_grad():
        moe.c_fc.weight[2].mul_(2)
    assert compiled(x)[0].isnan().any()
    with pytest.raises(ValueError, match=r"^c_fc\.weight: expected the values it had"):
        torch.optim.SGD(moe.parameters(), 0.1).step()
    with pytest.raises(ValueError, match=r"^c_fc\.weight: expected the values it had"):
        moe(x)
    moe.refresh_fp8_weights()
    assert torch.equal(compiled(x)[0], fresh(moe))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    torch._dynamo.reset()


def test_compiled_with_other_weights(quantized):
    """They are quantized in the call, as are all before the first call that is not compiled."""
    torch._dynamo.reset()
    moe, x = layer(), tokens()
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    want = compiled(x)[0]
    assert len(quantized) == 2 and torch.equal(moe(x)[0], want)
    doubled = {"c_fc.weight": 2 * moe.c_fc.weight.detach()}
    expected = torch.func.functional_call(moe, doubled, (x,))[0]
    moe(x)
    quantized.clear()
    call = torch.compile(
        lambda own, x: torch.func.functional_call(moe, own, (x,)), backend="aot_eager"
    )
    assert torch.equal(call(doubled, x)[0], expected) and len(quantized) == 2
    assert torch.equal(compiled(x)[0], want) and len(quantized) == 2
    torch._dynamo.reset()


def arguments(strided: bool) -> dict[str, Any]:
    """Of `experts`; weights may be views of parameters."""
    moe, x = layer(), tokens()
    scores, ids = moe.router(x).detach().float().topk(2)
    weights = [moe.c_fc.weight.detach(), moe.c_proj.weight.detach()]
    given: dict[str, Any] = {"x": x, "ids": ids, "scores": scores}
    if strided:
        given["owners"] = [nn.Parameter(w.mT.contiguous()) for w in weights]
        given["w1"], given["w2"] = (owner.mT for owner in given["owners"])
    else:
        given["owners"] = [nn.Parameter(w) for w in weights]
        given["w1"], given["w2"] = given["owners"]
    return given


def run_experts(given: dict[str, Any], **options: Any) -> torch.Tensor:
    names = ("x", "ids", "scores", "w1", "w2")
    return experts(*(given[name] for name in names), precision="fp8", **options)


def run_grouped(given: dict[str, Any], **options: Any) -> torch.Tensor:
    counts = torch.full((4,), 3)
    weights = (given["w1"], given["w2"])
    return grouped_experts(given["x"], counts, *weights, precision="fp8", **options)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("function", [run_experts, run_grouped])
def test_functions(function, strided, quantized):
    given, kept = arguments(strided), Fp8Weights()
    optimizer = torch.optim.SGD(given["owners"], 0.1)
    for _ in range(2):
        want = function(given)
        quantized.clear()
        for _ in range(2):
            out = function(given, fp8_weights=kept)
            assert torch.equal(out, want)
        assert len(quantized) in (0, 2)
        out.sum().backward()
        quantized.clear()
        optimizer.step()
        assert len(quantized) == 2
        if strided:  # views of the new values
            given["w1"], given["w2"] = (owner.mT for owner in given["owners"])
        function(given, fp8_weights=kept)
        assert len(quantized) == 2
    with torch.no_grad():
        given["owners"][1].data.mul_(2)
    with pytest.raises(ValueError, match=r"^w2: expected the values it had"):
        function(given, fp8_weights=kept)
    kept.refresh()
    assert torch.equal(function(given, fp8_weights=kept), function(given))


def test_bad_stores():
    given = arguments(False)
    with pytest.raises(ValueError, match=r"^fp8_weights: expected an Fp8Weights, got bool"):
        run_experts(given, fp8_weights=True)
    with pytest.raises(ValueError, match=r"^fp8_weights: expected None without precision"):
        experts(*list(given.values())[:3], given["w1"], given["w2"], fp8_weights=Fp8Weights())


def test_refresh_of_weights_that_are_gone():
    given, kept = arguments(False), Fp8Weights()
    kept.refresh()
    run_experts(given, fp8_weights=kept)
    kept.refresh()
    assert kept.is_kept
    given.clear()
    gc.collect()
    kept.refresh()
    assert not kept.is_kept
