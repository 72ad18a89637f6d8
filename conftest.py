"""One place where it is decided what runs here: see tests/support/devices.py."""

import gc
import os
from collections import Counter
from pathlib import Path

import compatibility
import devices
import pytest
import torch
from hypothesis import settings

if devices.INTERPRETING:  # before any kernel is defined
    import fast_interpreter  # noqa: F401
    import interpreter  # noqa: F401
os.environ["SONICMOE_TUNED"] = ""  # the choices that are shipped, not those of this machine
# PyTorch reads this once, at the first GEMM of a process: with it cuBLAS can repeat itself.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# transformers 5.22 with the package kernels 0.17 makes models that cannot be pickled.
os.environ.setdefault("USE_HUB_KERNELS", "NO")
if not torch.cuda.is_available():
    # On problems this small, threads only compete with other workers and with other processes.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes to compile in
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # 4% of the time that kernels take to compile
elif "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # workers share the cores, for compiling too
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["PYTEST_XDIST_WORKER_COUNT"]

ROOT = Path(__file__).parent
# Folders and files that `make test-fast` leaves out: compilers, frameworks, other processes.
SLOW = {
    "bench",
    "distributed",
    "features",
    "integrations",
    "trainer",
    "test_candidates_compile.py",
    "test_compatibility.py",
    "test_driver.py",
    "test_machine_code.py",
    "test_machine_code_fp8.py",
    "test_machine_code_fp8_dz.py",
    "test_machine_code_memory.py",
    "test_package.py",
    "test_rounding_machine_code.py",
    "test_examples.py",
    "test_first_contact.py",
    "test_router_in_layer.py",
    "test_rounding_script.py",
    "test_token_rounding.py",
    "test_warmup.py",
}

settings.register_profile("sonicmoe", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("sonicmoe")


def pytest_addoption(parser):
    words = "write the table of docs/integrations.md from what passes"
    parser.addoption("--compatibility", action="store_true", help=words)
    words = "write the row of this cell, as 'torch 2.11.0', too: `make matrix`"
    parser.addoption("--cell", help=words)
    words = "every 24th test, in Triton's interpreter"
    parser.addoption("--part", action="store_true", help=words)


def pytest_configure(config):
    cell = config.getoption("--cell")
    if cell or config.getoption("--compatibility"):
        config.pluginmanager.register(compatibility.Recorder(cell=cell))


def pytest_ignore_collect(collection_path, config):
    """Do not import what has no test for the interpreter, or with `-m gpu` none for a GPU."""
    only = "interpreter" if devices.INTERPRETING else "cuda"
    is_all = not devices.INTERPRETING and config.option.markexpr != "gpu"
    return None if is_all or devices.has_tests_for(only, collection_path) else True


def pytest_generate_tests(metafunc):
    devices.parametrize(metafunc)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
    others = {item for item in items if not _is_for_this_process(item)}
    config.hook.pytest_deselected(items=list(others))
    items[:] = [item for item in items if item not in others]
    if config.getoption("--part"):
        items[:] = items[::24]
    for item in items:
        if not SLOW.isdisjoint(item.path.relative_to(ROOT).parts):
            item.add_marker(pytest.mark.slow)
    # The longest tests first: at the end one worker would run them while the others are idle.
    longest = ("test_interpreter_kernels.py", "test_candidates_compile.py")
    items.sort(key=lambda item: (item.path.name not in longest, "slow" not in item.keywords))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


def pytest_collection_finish():
    """What has been imported stays: walking over it is a quarter of the time that a kernel takes to
    compile."""
    gc.collect()
    gc.freeze()


def _is_for_this_process(item) -> bool:
    for device in set(devices.devices_of(item)) - {"cpu"}:
        # Else another process would not find it.
        assert devices.has_tests_for(device, item.path), f"{item.nodeid}: name {device!r} here"
    device = devices.device_of(item)
    if device == "cuda":
        item.add_marker(pytest.mark.gpu)
    return device is not None


@pytest.fixture
def on_device(request):
    """One of "cpu", "interpreter" and "cuda"."""
    return request.param


@pytest.fixture
def device(on_device):
    return "cuda" if on_device == "cuda" else "cpu"


@pytest.fixture
def backend(on_device):
    return "torch" if on_device == "cpu" else "triton"


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _honest_gemms(request):
    """On a GPU, plain PyTorch is as exact as it can be at each dtype."""
    if "gpu" not in request.node.keywords:
        yield
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def runs(monkeypatch):
    """How often each operator was really computed."""
    from sonicmoe.reference import grouped_gemm, routing

    counted: Counter = Counter()
    for module, names in (
        (routing, ("topk", "balance", "permute")),
        (grouped_gemm, ("up", "down", "combine")),
    ):
        for name in names:
            original = getattr(module, name)

            def run(*args, _original=original, _name=name):
                counted[_name] += 1
                return _original(*args)

            monkeypatch.setattr(module, name, run)
    return counted
