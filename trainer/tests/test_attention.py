"""Both kinds of attention against fp64; FlexAttention repeats bit for bit on a GPU."""

import functools

import pytest
import torch
from layouts import LAYOUTS, laid_out
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention

from sonicmoe_trainer import attention, loop
from sonicmoe_trainer.attention import attend, causal_mask, repeatable_mask
from sonicmoe_trainer.model import Block, Decoder, rotary
from sonicmoe_trainer.presets import preset

CPU = torch.device("cpu")
HEADS = [(4, 4), (4, 2), (4, 1)]
SMALL = {
    "vocab_size": 64, "context": 200, "num_layers": 2, "hidden_size": 64, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 16, "num_experts": 4, "intermediate_size": 32,
}  # fmt: skip


@pytest.fixture
def flex_on_a_cpu(monkeypatch):
    """PyTorch's own check refuses gradients on a CPU; without Inductor they are right there."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None, raising=False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def deterministic():
    loop.make_deterministic(True)
    yield
    loop.make_deterministic(False)


def inputs(length, heads=(4, 2), dtype=torch.float32, device="cpu", batch=2, size=16):
    """q, k, v and the gradient of the output, with outliers: tokens, a channel and a head of v."""
    generator = torch.Generator().manual_seed(length)

    def values(count, tokens=1.0, channel=1.0):
        t = torch.randn(batch, count, length, size, generator=generator)
        t[:, :, 1::17] *= tokens
        t[..., 3] *= channel
        t[:, 0] *= channel
        return t.to(device, dtype)

    q, k = values(heads[0], tokens=2), values(heads[1], tokens=4)
    v, dout = values(heads[1], tokens=4, channel=4), values(heads[0], channel=3)
    return [t.requires_grad_() for t in (q, k, v)], dout


def results(tensors, dout, function):
    """The output and the gradients."""
    out = function(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, dout)]


def exact(tensors, dout):
    """In fp64, by the formula."""
    tensors = [t.detach().double().requires_grad_() for t in tensors]

    def formula(q, k, v):
        repeat = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(repeat, dim=1) for t in (k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -torch.inf).softmax(-1) @ v

    return results(tensors, dout.double(), formula)


def check(found, wanted, limit):
    for got, want in zip(found, wanted, strict=True):
        assert ((got.double() - want).norm() / want.norm()).item() < limit


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("length", [5, 130, 256])
def test_by_default(length, heads):
    tensors, dout = inputs(length, heads)
    check(results(tensors, dout, attend), exact(tensors, dout), 1e-5)


@pytest.mark.parametrize("length", [128, 200])
def test_with_a_mask(length, flex_on_a_cpu):
    tensors, dout = inputs(length)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    mask = causal_mask(length, CPU)
    found = results(tensors, dout, lambda q, k, v: compiled(q, k, v, mask))
    check(found, exact(tensors, dout), 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_tensors(layout):
    tensors, dout = inputs(130)
    views = [laid_out(t.detach(), layout) for t in (*tensors, dout)]
    views = [t if v is None else v for t, v in zip((*tensors, dout), views, strict=True)]
    *views, dout = [t.detach() for t in views]
    views = [t.requires_grad_() for t in views]
    check(results(views, dout, attend), exact(views, dout), 1e-5)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("queries", [1, 5, 32])
def test_the_last_tokens_see_no_later_keys(queries, heads):
    (q, k, v), _ = inputs(33, heads)
    last = attend(q[:, :, -queries:], k, v)
    torch.testing.assert_close(last, attend(q, k, v)[:, :, -queries:])


def test_a_mask_decides_which_kernel_runs(monkeypatch):
    (q, k, v), _ = inputs(33)
    monkeypatch.setattr(attention, "flex_attention", lambda *args, **options: "flex")
    assert attend(q, k, v, causal_mask(33, CPU)) == "flex"
    assert attend(q, k, v).shape == q.shape
    assert attend(q[:, :, -1:], k, v, causal_mask(33, CPU)).shape == (2, 4, 1, 16)


def test_a_mask_is_made_once_and_only_where_it_is_needed(deterministic):
    gpu = torch.device("cuda")
    assert causal_mask(256, CPU) is causal_mask(256, CPU)
    assert repeatable_mask(256, 64, CPU) is None
    assert repeatable_mask(64, 64, gpu) is None
    assert repeatable_mask(256, 8, gpu) is None
    loop.make_deterministic(False)
    assert repeatable_mask(256, 64, gpu) is None


@pytest.mark.parametrize("recompute", [False, True])
def test_all_layers_compile_once(recompute, flex_on_a_cpu, monkeypatch):
    """For training, at any depth and in any step; with the gradients that SDPA has."""
    used = []

    def mask(length, head_dim, device):
        used.append(length)
        return causal_mask(length, device)

    monkeypatch.setattr("sonicmoe_trainer.model.repeatable_mask", mask)
    ids, targets = torch.randint(64, (2, 2, 200), generator=torch.Generator().manual_seed(0))

    def gradients(decoder):
        decoder.zero_grad()
        loss, aux_loss = decoder(ids, targets)
        (loss + aux_loss).backward()
        return [p.grad.double() for p in decoder.parameters()]

    sizes = preset("demo").override(SMALL).model
    torch.manual_seed(0)
    plain, repeatable = Decoder(sizes, "torch"), Decoder(sizes, "torch", recompute)
    repeatable.load_state_dict(plain.state_dict())
    wanted = gradients(plain)
    assert not used
    counter = CompileCounterWithBackend("aot_eager")
    compile_with = functools.partialmethod(torch.nn.Module.compile, backend=counter)
    monkeypatch.setattr(Block, "compile", compile_with)
    repeatable.compile_blocks()
    x = torch.randn(2, 200, sizes.hidden_size)
    table = rotary(0, 200, sizes.head_dim, sizes.rope_theta, CPU)
    repeatable.blocks[0](x.requires_grad_(), *table, causal_mask(200, CPU))
    first = counter.frame_count
    for _ in range(2):
        check(gradients(repeatable), wanted, 1e-4)
    assert used == [200, 200]
    assert 0 < first == counter.frame_count


# --- on a GPU -------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("length", [200, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_compiled_flex_attention_is_right_and_repeats(dtype, length, size, deterministic):
    tensors, dout = inputs(length, (8, 4), dtype, "cuda", batch=4, size=size)
    mask = repeatable_mask(length, size, tensors[0].device)
    assert mask is not None
    compiled = torch.compile(attend, fullgraph=True)
    runs = [results(tensors, dout, lambda q, k, v: compiled(q, k, v, mask)) for _ in range(3)]
    for run in runs[1:]:
        assert all(map(torch.equal, runs[0], run))
    check(runs[0], exact(tensors, dout), 2e-2 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.gpu
def test_the_default_kernel_is_right():
    tensors, dout = inputs(1024, (8, 4), torch.bfloat16, "cuda", size=128)
    check(results(tensors, dout, attend), exact(tensors, dout), 2e-2)
