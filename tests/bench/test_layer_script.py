"""benchmarks/layer.py on the CPU: other implementations beside ours, each verified first."""

from pathlib import Path

import layer
import pytest
from research import peers

from sonicmoe.bench import dense, results

TINY = ["--device", "cpu", "--shape", "64,32,16,4,2"]


def test_peers_are_measured_beside_our_layer(quick, tmp_path, capsys):
    assert layer.main([*TINY, "--peers", "grouped_mm", "--results", str(tmp_path)]) == 0
    records = results.read(tmp_path)
    assert [r["candidate"] for r in records] == ["sonicmoe", "sonicmoe", "dense", "grouped_mm"]
    assert records[3]["command"].startswith("python benchmarks/layer.py --device cpu")
    assert "| grouped_mm |" in capsys.readouterr().out


def test_an_unknown_peer_is_refused():
    with pytest.raises(ValueError, match="--peers: expected names of grouped_mm, scattermoe"):
        layer.main([*TINY, "--peers", "someone"])


STAND_IN = """
import torch
import torch.nn.functional as F

def moe_TC_softmax_topk_layer(x, router_w, w1, b1, w2, b2, K, stream, activation, inference):
    values, ids = F.linear(x, router_w).topk(K, dim=-1)
    scores, out = values.softmax(-1), torch.zeros_like(x)
    for e in range(w1.shape[-1]):
        token, k = (ids == e).nonzero(as_tuple=True)
        z = x[token] @ w1[:, :, e].T
        y = (F.silu(z[:, ::2]) * z[:, 1::2]) @ w2[:, :, e].T
        out = out.index_add(0, token, scores[token, k, None] * y)
    return (out * SCALE,)
"""


def stand_in(folder, source, installed="sonic_moe-0.1.2.post1.dist-info"):
    """A package with the published import name and, in its metadata, the published pip name."""
    (folder / installed).mkdir(parents=True)
    (folder / "sonicmoe").mkdir()
    (folder / "sonicmoe" / "__init__.py").write_text(source)
    return folder / "sonicmoe"


@pytest.mark.parametrize("scale", [1.0, 1.1])
def test_the_published_package_answers_from_its_own_process(tmp_path, scale):
    """A stand-in under the published names: what the folder holds is measured, if it is right."""
    from research.published import Failed, Published

    from sonicmoe.bench.cases import Case

    folder = stand_in(tmp_path, "print('whatever a package may print')\n")
    (folder / "enums.py").write_text("ActivationType = {'SWIGLU': None}\n")
    (folder / "functional.py").write_text(STAND_IN.replace("SCALE", str(scale)))
    case = Case.of_shape("64,32,16,4,2")
    with Published(str(tmp_path), case, "uniform", "float32", "cpu") as package:
        if scale == 1.0:
            found = package.needs()
            assert found["first_call_s"] > 0 and found["kept_mib"] > 0 and len(found["checks"]) == 5
            assert package.forward() > 0 and package.both() > 0 and package.forward() > 0
        else:
            with pytest.raises(Failed, match="differs from fp64 in out, x"):
                package.needs()


def test_a_package_that_cannot_be_imported_is_reported(tmp_path):
    from research.published import Failed, Published

    from sonicmoe.bench.cases import Case

    stand_in(tmp_path, "raise RuntimeError('not today')\n")
    case = Case.of_shape("64,32,16,4,2")
    with (
        Published(str(tmp_path), case, "uniform", "float32", "cpu") as package,
        pytest.raises(Failed, match="RuntimeError: not today"),
    ):
        package.needs()


def test_a_package_that_never_answers_is_given_up(tmp_path, monkeypatch):
    from research import published

    from sonicmoe.bench.cases import Case

    stand_in(tmp_path, "import time; time.sleep(60)\n")
    monkeypatch.setattr(published, "TIMEOUT_S", 0.5)
    case = Case.of_shape("64,32,16,4,2")
    with (
        published.Published(str(tmp_path), case, "uniform", "float32", "cpu") as package,
        pytest.raises(published.Failed, match=r"no answer within 0\.5 s"),
    ):
        package.needs()


def folder_without_it(path):
    return path / "missing", "no sonicmoe in"


def folder_with_this_package(path):
    stand_in(path, "", installed="sonicmoe-0.1.0.dist-info")
    return path, "another sonicmoe in"


def clone_of_this_repository(path):
    return Path(__file__).parents[2] / "src", "another sonicmoe in"


@pytest.mark.parametrize(
    "make", [folder_without_it, folder_with_this_package, clone_of_this_repository]
)
def test_another_package_is_never_measured_as_the_published_one(tmp_path, make):
    folder, got = make(tmp_path)
    with pytest.raises(ValueError, match=f"--sonicmoe-path: expected .+ got {got}.+--target"):
        layer.main([*TINY, "--sonicmoe-path", str(folder)])


def test_a_shadowed_package_is_not_measured(tmp_path):
    """Python must import what was found: a .pth file or a finder may put another first."""
    from research.published import Failed, Published

    from sonicmoe.bench.cases import Case

    stand_in(tmp_path, "__file__ = '/elsewhere/sonicmoe/__init__.py'\n")
    (tmp_path / "sonicmoe" / "enums.py").write_text("ActivationType = {'SWIGLU': None}\n")
    (tmp_path / "sonicmoe" / "functional.py").write_text(STAND_IN)
    case = Case.of_shape("64,32,16,4,2")
    with (
        Published(str(tmp_path), case, "uniform", "float32", "cpu") as package,
        pytest.raises(Failed, match="imports /elsewhere/sonicmoe instead of"),
    ):
        package.needs()


def test_the_version_of_the_published_package_is_recorded(quick, tmp_path):
    folder = stand_in(tmp_path / "theirs", "")
    (folder / "enums.py").write_text("ActivationType = {'SWIGLU': None}\n")
    (folder / "functional.py").write_text(STAND_IN.replace("SCALE", "1.0"))
    where = ["--sonicmoe-path", str(folder.parent), "--results", str(tmp_path / "results")]
    assert layer.main([*TINY, "--peers", *where]) == 0
    versions = {r["candidate"]: r.get("version") for r in results.read(tmp_path / "results")}
    assert versions == {"sonicmoe": None, "dense": None, "published": "0.1.2.post1"}


def test_a_peer_that_breaks_between_turns_does_not_stop_us(quick, tmp_path, capsys, monkeypatch):
    right, calls = dense.dense, []

    def breaks_later(*given):
        forward, both = right(*given)

        def forward_once():
            calls.append(1)
            if len(calls) > 1:
                raise MemoryError("too hot")
            forward()

        return forward_once, both

    monkeypatch.setattr(dense, "dense", breaks_later)
    assert layer.main([*TINY, "--peers", "--results", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "dense is not timed: MemoryError: too hot" in captured.err and len(calls) == 2
    assert [r["candidate"] for r in results.read(tmp_path)] == ["sonicmoe", "sonicmoe"]
    assert "| dense " not in captured.out


def test_a_peer_that_breaks_does_not_stop_us(quick, tmp_path, capsys, monkeypatch):
    def broken(inputs):
        raise MemoryError("too large")

    monkeypatch.setitem(peers.PEERS, "grouped_mm", broken)
    assert layer.main([*TINY, "--peers", "grouped_mm", "--results", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "grouped_mm is not timed: MemoryError: too large" in captured.err
    assert "grouped_mm" not in captured.out and "sonicmoe" in captured.out
