"""The package as a user meets it: what it exports, what importing it does, what the wheel holds."""

import email
import json
import re
import runpy
import subprocess
import sys
import textwrap
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import compatibility
import pytest
from mutations import MUTATIONS

import sonicmoe
from sonicmoe import cli
from sonicmoe.extras import TESTED, tested
from sonicmoe.tools import doctor

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TRAINER = sorted((ROOT / "trainer/src").rglob("*.py"))
LONGEST = 450


def test_public_names_are_frozen():
    """A name in this list is a promise: removing one needs a new major version."""
    assert sorted(sonicmoe.__all__) == [
        "ActivationType",
        "Experts",
        "Fp8Blocks",
        "Fp8Weights",
        "Int4",
        "KernelBackendMoE",
        "LowRank",
        "MemoryPolicy",
        "MoE",
        "Mxfp4",
        "Nf4",
        "OptionArguments",
        "PackedWeight",
        "experts",
        "graphed",
        "grouped_experts",
        "moe_TC_softmax_topk_layer",
        "moe_general_routing_inputs",
        "report",
        "topk_scores",
        "warmup",
        "watch",
    ]
    assert all(hasattr(sonicmoe, name) for name in sonicmoe.__all__)


# --- importing ------------------------------------------------------------------------------------
def in_fresh_python(program: str) -> str:
    """The output of a program in a process that has only torch imported."""
    done = subprocess.run(
        [sys.executable, "-c", "import torch\n" + textwrap.dedent(program)],
        capture_output=True, text=True, cwd=ROOT / "src",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def importing() -> dict:
    """What `import sonicmoe` asks for and changes, watched in a process of its own."""
    said = in_fresh_python("""
        import builtins, json, os, sys, torch.utils.flop_counter, types, warnings

        owners = [torch, torch.Tensor, torch.nn, torch.nn.Module, torch.nn.functional,
                  torch.autograd, torch.autograd.Function, torch.library, torch.backends, os]
        gpu, variables, triton, original = [], [], [], builtins.__import__

        def watch_gpu(name):
            setattr(torch.cuda, name, lambda *args, **kwargs: gpu.append(name))
        for name in ("_lazy_init", "is_available", "device_count", "current_device",
                     "get_device_capability", "get_device_properties"):
            watch_gpu(name)

        class Watched(type(os.environ)):
            def __getitem__(self, key):
                frame = sys._getframe(1)
                while frame.f_globals.get("__name__") in ("os", "collections.abc"):
                    frame = frame.f_back
                variables.append((frame.f_globals.get("__name__", ""), key))
                return super().__getitem__(key)
        os.environ.__class__ = Watched
        os.environ.get("HOME")

        def watched(name, globals=None, *args, **kwargs):
            importer = (globals or {}).get("__name__", "")
            if name.split(".")[0] == "triton":
                triton.append(importer)
            return original(name, globals, *args, **kwargs)
        builtins.__import__ = watched

        owners += [torch.cuda, builtins]  # as they are while they are watched
        before = [dict(vars(owner)) for owner in owners]
        state = lambda: (list(warnings.filters), list(sys.meta_path), sys.excepthook)
        state_before = state()
        import sonicmoe
        changed = [
            f"{owner.__name__}.{name}"
            for owner, old in zip(owners, before)
            for name, value in vars(owner).items()
            if old.get(name, None) is not value and not isinstance(value, types.ModuleType)
        ]
        print(json.dumps({
            "gpu": gpu, "variables": variables, "triton": triton, "changed": changed,
            "same state": state() == state_before, "modules": list(sys.modules),
            "initialized": torch.cuda._initialized,
        }))
    """)  # fmt: skip
    return json.loads(said)


def test_import_touches_no_gpu(importing):
    assert importing["gpu"] == [] and not importing["initialized"]


def test_import_reads_no_environment_variable(importing):
    """Torch reads some; sonicmoe none. A read counts for the module that asks `os` for it."""
    assert importing["variables"][0] == ["__main__", "HOME"]
    assert [pair for pair in importing["variables"] if pair[0].startswith("sonicmoe")] == []


def test_import_asks_for_no_triton(importing):
    """Torch's own FLOP counter may bring Triton in; no module of ours does, until a kernel runs."""
    assert [name for name in importing["triton"] if name.startswith("sonicmoe")] == []
    assert [name for name in importing["modules"] if name.startswith("sonicmoe.kernels")] == []


def test_import_patches_nothing(importing):
    """No attribute of torch, of the interpreter or of the warning filters changes its value."""
    assert importing["changed"] == [] and importing["same state"]


def test_import_and_cpu_need_no_triton_at_all():
    assert in_fresh_python("""
        import sys
        sys.modules["triton"] = None
        import sonicmoe
        out, _ = sonicmoe.MoE(4, 2, hidden_size=16, intermediate_size=8)(torch.randn(3, 16))
        print(tuple(out.shape))
    """) == "(3, 16)"  # fmt: skip


def test_import_is_quick():
    """At most half of what torch takes, in CPU time, whatever else the machine does."""
    program = """
        from time import process_time
        before = process_time()  # of torch and the interpreter
        import sonicmoe
        print((process_time() - before) / before)
    """
    assert float(in_fresh_python(program)) <= 0.5


# --- the wheel ------------------------------------------------------------------------------------
def built(project: Path, folder: Path, name: str) -> zipfile.ZipFile:
    build = pytest.importorskip("flit_core.buildapi", reason="comes with the extra 'test'")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        file = build.build_wheel(str(folder))
    assert file == f"{name}-{sonicmoe.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(folder / file)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    with built(ROOT, tmp_path_factory.mktemp("wheel"), "sonicmoe") as archive:
        yield archive


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = wheel.namelist()
    assert "sonicmoe/py.typed" in names
    assert sum(entry.compress_size for entry in wheel.infolist()) <= 800_000
    assert any(name.endswith("/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"sonicmoe"}
    shipped = {name for name in names if name.endswith(".py")}
    assert shipped == {str(path.relative_to(ROOT / "src")) for path in SOURCES}


def test_wheel_of_the_trainer(tmp_path):
    """Of the same version, which it needs at least, and found by the command `sonicmoe`."""
    with built(ROOT / "trainer", tmp_path, "sonicmoe_trainer") as archive:
        about = f"sonicmoe_trainer-{sonicmoe.__version__}.dist-info"
        entries = archive.read(f"{about}/entry_points.txt").decode()
        metadata = archive.read(f"{about}/METADATA").decode()
        shipped = {name for name in archive.namelist() if name.endswith(".py")}
    assert shipped == {str(path.relative_to(ROOT / "trainer/src")) for path in TRAINER}
    assert f"[{cli.PLUGINS}]\ntrainer=sonicmoe_trainer.cli:register" in entries
    assert f"Requires-Dist: sonicmoe>={sonicmoe.__version__}\n" in metadata


def test_wheel_pins_nothing(wheel):
    metadata = email.message_from_bytes(
        wheel.read(next(n for n in wheel.namelist() if n.endswith("/METADATA")))
    )
    needs = metadata.get_all("Requires-Dist")
    assert [need for need in needs if "extra ==" not in need] == [
        "torch>=2.11",
        "triton>=3.6; platform_system == 'Linux'",
    ]
    for need in needs:
        requirement = need.split(";")[0]
        assert not re.search(r"<|==|~=|@", requirement), f"{requirement}: no caps, no pins"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] or metadata["Author-email"]
    classifiers = metadata.get_all("Classifier")
    for minor in range(11, 14):
        assert f"Programming Language :: Python :: 3.{minor}" in classifiers
    assert metadata["Requires-Python"] == ">=3.11"


def test_wheels_for_a_package_index(tmp_path):
    """Links of the READMEs and the project's URLs are absolute, and what they name exists."""
    program = runpy.run_path(str(ROOT / "release/wheel.py"))
    repository = "https://example.org/someone/sonicmoe"
    program["copy_for_index"](tmp_path / "copy", repository)
    start = re.compile(rf"{repository}/(blob|raw)/v{sonicmoe.__version__}/")
    for folder, least in ((".", 20), ("trainer", 5)):
        name = "sonicmoe" if folder == "." else "sonicmoe_trainer"
        with built(tmp_path / "copy" / folder, tmp_path, name) as archive:
            about = f"{name}-{sonicmoe.__version__}.dist-info/METADATA"
            metadata = email.message_from_bytes(archive.read(about))
        assert f"Repository, {repository}" in metadata.get_all("Project-URL")
        links = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
        ours = [start.sub("", link) for link in links if link.startswith(repository)]
        assert len(ours) > least and all(link.startswith(("https://", "#")) for link in links)
        for link in ours:
            assert (ROOT / link.split("#")[0]).exists(), link


def test_a_release_needs_an_address_and_a_date(tmp_path):
    program = runpy.run_path(str(ROOT / "release/wheel.py"))
    for name in ("pyproject.toml", "CHANGELOG.md", "src/sonicmoe/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    project, changes = tmp_path / "pyproject.toml", tmp_path / "CHANGELOG.md"
    project.write_text(re.sub('repository = ".*"', 'repository = ""', project.read_text()))
    assert "set [tool.sonicmoe] repository" in program["not_ready"](tmp_path)
    address = 'repository = "https://example.org/someone/sonicmoe"'
    project.write_text(project.read_text().replace('repository = ""', address))
    heading = f"## {sonicmoe.__version__}"
    changes.write_text(re.sub(f"{heading}.*", f"{heading} (unreleased)", changes.read_text()))
    assert "its date" in program["not_ready"](tmp_path)
    changes.write_text(changes.read_text().replace("(unreleased)", "(2026-11-20)"))
    assert program["not_ready"](tmp_path) is None


# --- the repository -------------------------------------------------------------------------------
def test_one_version():
    """That of the package, of the newest entry of the changelog, and to cite."""
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == sonicmoe.__version__
    assert f'\nversion: "{sonicmoe.__version__}"\n' in (ROOT / "CITATION.cff").read_text()


def test_tested_versions():
    """What we call tested ran: in the matrix, with constraints.txt or on a GPU. The oldest versions
    are those that we ask for."""
    found = compatibility.versions_run()
    for name, numbers in found.items():
        assert TESTED[name] == (".".join(map(str, min(numbers))), ".".join(map(str, max(numbers))))
    assert f"Tested with {tested()}" in " ".join((ROOT / "README.md").read_text().split())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={TESTED["Python"][0]}"' in project
    for name in list(TESTED)[1:]:
        assert f'"{name.lower()}>={TESTED[name][0]}' in project


def test_test_tools_are_pinned():
    """Whatever `make test` installs by name has its version in constraints.txt."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    trainer = tomllib.loads((ROOT / "trainer/pyproject.toml").read_text())["project"]
    needs = extras["test"] + trainer["dependencies"]
    names = {re.split(r"[<>=;\[ ]", need)[0] for need in needs} - {"sonicmoe"}
    constraints = (ROOT / "constraints.txt").read_text()
    pinned = set(re.findall(r"^([\w-]+)[=<]", constraints, re.MULTILINE))
    assert names - {"flit_core"} <= pinned
    assert {"torch", "triton"} <= pinned


@pytest.mark.parametrize("path", SOURCES + TRAINER, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_file_is_short(path):
    lines = len(path.read_text().splitlines())
    assert lines <= LONGEST, f"{lines} lines: split it by concept"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.broken)
def test_mutation_finds_its_place(mutation):
    assert mutation.old in (ROOT / mutation.package / mutation.file).read_text()
    assert (ROOT / mutation.tests.split(" -k ")[0]).is_file()


# --- the doctor -----------------------------------------------------------------------------------
H200 = doctor.Gpu("NVIDIA H200", (9, 0), 139.8)
HEALTHY = doctor.Machine(
    triton="3.6.0", interpreting=False, gpus=(H200,), torch_for_gpu=True, gpu_complaint=None,
    driver_tool="nvidia-smi", compiler="gcc", python_header="Python.h",
    versions={"Python": "3.11.7", "torch": "2.13.1+cu130", "Triton": "3.6.0"},
)  # fmt: skip


def test_doctor_reports_on_this_machine():
    text = doctor.report()
    for word in ("python", "torch", "triton", "gpu", "compiler", "backend", sonicmoe.__version__):
        assert word in text


def test_doctor_names_the_tuned_table(monkeypatch, tmp_path):
    table = tmp_path / "mine.json"
    monkeypatch.setenv("SONICMOE_TUNED", str(table))
    assert doctor._tuned(HEALTHY) == ["nothing yet"]
    table.touch()
    assert doctor._tuned(HEALTHY) == [str(table)]


def test_doctor_without_triton():
    assert "triton    not found" in in_fresh_python("""
        import sys
        sys.modules["triton"] = None
        from sonicmoe.tools.doctor import report
        print(report())
    """)


def test_doctor_finds_a_healthy_machine_healthy():
    assert doctor.hints(HEALTHY) == []
    assert doctor.backend(HEALTHY).startswith("triton")
    assert doctor.backend(replace(HEALTHY, gpus=())).startswith("torch")


@pytest.mark.parametrize(
    ("illness", "word"),
    [
        ({"gpus": (), "torch_for_gpu": False}, "GPU build"),
        ({"gpus": (), "gpu_complaint": "the driver is too old"}, "too old"),
        ({"gpus": (doctor.Gpu("Tesla V100", (7, 0), 16.0),)}, "older than sm_80"),
        ({"triton": None}, "pip install triton"),
        ({"interpreting": True}, "TRITON_INTERPRET"),
        ({"compiler": None}, "gcc"),
        ({"python_header": None}, "python3-dev"),
        ({"versions": {"torch": "2.99.0a0"}}, "torch 2.99.0a0 is newer than what was tested"),
        ({"versions": {"transformers": "5.9.1"}}, "install 5.10 or newer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_doctor_names_what_is_wrong(illness, word):
    (hint,) = doctor.hints(replace(HEALTHY, **illness))
    assert word in hint
