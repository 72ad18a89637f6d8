"""The published SonicMoE, measured in its own process because it has the import name of this one.

`Published` starts this file as a script. There `sonicmoe` is the published package, found in the
folder the user names; our own modules are imported before it, and then lose their names.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import types
from dataclasses import asdict
from pathlib import Path

NAME = "published"
BUILD = (
    "pip install --target FOLDER --no-deps sonic-moe==0.1.2.post1 quack-kernels==0.3.11 "
    "nvidia-cutlass-dsl==4.4.2 nvidia-cutlass-dsl-libs-base==4.4.2 apache-tvm-ffi "
    "torch-c-dlpack-ext einops"
)
TIMEOUT_S = 580  # its first call compiles and benchmarks for minutes
OURS: dict[str, types.ModuleType] = {}  # modules of this package in that process
_ANSWER = "answer: "  # begins the lines that are for us; the package may print others


class Failed(Exception):
    """The package cannot be measured; the message says why."""


def find(folder: str | Path) -> tuple[Path, str]:
    """Where the published package lies, and its version; ValueError if `folder` has another one."""
    for place in map(Path, _search_path(str(Path(folder).resolve())).split(os.pathsep)):
        package = place / "sonicmoe"
        if (package / "__init__.py").is_file():
            version = _published_version(place)
            if version is None:
                raise _not_published(f"another sonicmoe in {place}")
            return package.resolve(), version
    raise _not_published(f"no sonicmoe in {folder}")


def _published_version(place: Path) -> str | None:
    """Of the package that pip installed, or of a clone; None where that is not `sonic-moe`."""
    installed = sorted(path.name for path in place.glob("*.dist-info"))
    if any(name.startswith("sonicmoe-") for name in installed):
        return None  # this package, which overwrites files of the same name
    for name in installed:
        if name.startswith("sonic_moe-"):
            return name.removeprefix("sonic_moe-").removesuffix(".dist-info")
    files = (place / "pyproject.toml", place / "setup.py")
    if any("sonic-moe" in file.read_text() for file in files if file.is_file()):
        found = re.search(r'__version__ = "(.+)"', (place / "sonicmoe/__init__.py").read_text())
        return f"{found[1]} (clone)" if found else None
    return None


def _not_published(got: str) -> ValueError:
    from sonicmoe.errors import bad_argument

    expected = "a folder with the published package, sonic-moe"
    return bad_argument("--sonicmoe-path", expected, got, f"Build one with Python 3.12: {BUILD}.")


class Published:
    """The package on the inputs of a case; each call of `forward` and `both` times it once."""

    def __init__(self, folder: str, case, routing: str, dtype: str, device: str = "cuda") -> None:
        import sonicmoe  # ours; in the process that is started it is the published package

        package, self.version = find(folder)
        request = {
            "folder": str(Path(folder).resolve()),
            "package": str(package),
            "source": str(Path(sonicmoe.__file__).parent),
            "routing": routing,
            "dtype": dtype,
            "device": device,
            "problem": asdict(case.problem),
            "activation": case.activation.value,
            "router": case.router,
        }
        # Its compiling processes start one after the other, 5 to 7 s each, anew for each of its
        # kernels: with 15 of them 440 s were not enough for one shape on 16 cores.
        env = {"QUACK_COMPILE_WORKERS": "1"} | os.environ
        env["PYTHONPATH"] = _search_path(request["folder"])
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (__exit__ closes it)
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(request)],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip

    def __enter__(self) -> "Published":
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def needs(self) -> dict:
        """Verify it and return memory and kernel time; takes minutes."""
        return self._ask("needs")

    def forward(self) -> float:
        return self._ask("forward")

    def both(self) -> float:
        return self._ask("both")

    def _ask(self, what: str):
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._process.kill()

        assert self._process.stdin and self._process.stdout
        watch = threading.Timer(TIMEOUT_S, give_up)
        watch.start()
        try:
            self._process.stdin.write(f"{what}\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith(_ANSWER):
                    return json.loads(line.removeprefix(_ANSWER))
        except BrokenPipeError:  # it ended before it was asked
            pass
        finally:
            watch.cancel()
        if late.is_set():
            raise Failed(f"no answer within {TIMEOUT_S} s")
        self._process.wait()
        self._errors.seek(0)
        raise Failed((self._errors.read().strip().splitlines() or ["it ended"])[-1][:300])


def _search_path(folder: str) -> str:
    """The folder and what its .pth files name, also for the processes that the package starts."""
    named = [
        str(Path(folder, line))
        for file in sorted(Path(folder).glob("*.pth"))
        for line in file.read_text().splitlines()
        if line and not line.startswith(("#", "import "))
    ]
    return os.pathsep.join([folder, *named])


def _import_ours(source: str) -> None:
    """Import what measures without running our package's own import, and free its name."""
    package = types.ModuleType("sonicmoe")
    package.__path__ = [source]
    sys.modules["sonicmoe"] = package
    from research import measure, timing  # noqa: F401
    from sonicmoe.tools import candidates, inputs, verify  # noqa: F401

    for name in [name for name in sys.modules if name.split(".")[0] == "sonicmoe"]:
        OURS[name] = sys.modules.pop(name)


def _subject(request: dict):
    """The published layer on our inputs, and the inputs."""
    import torch

    from research.timing import is_cuda

    Candidate, leaves_of = (
        getattr(OURS["sonicmoe.tools.candidates"], name) for name in ("Candidate", "leaves_of")
    )
    make_inputs = OURS["sonicmoe.tools.inputs"].make_inputs
    Case = OURS["sonicmoe.tools.cases"].Case
    ActivationType = OURS["sonicmoe.enums"].ActivationType
    Problem = OURS["sonicmoe.shapes"].Problem

    import sonicmoe
    from sonicmoe.enums import ActivationType as TheirActivation
    from sonicmoe.functional import moe_TC_softmax_topk_layer

    imported = Path(sonicmoe.__file__).resolve().parent
    if imported != Path(request["package"]):
        raise SystemExit(f"Python imports {imported} instead of {request['package']}")
    activation = ActivationType(request["activation"])
    problem = Problem(**request["problem"])
    case = Case(NAME, problem, activation, router=request["router"])
    i = make_inputs(case, request["routing"], request["device"], getattr(torch, request["dtype"]))
    on_gpu = is_cuda(request["device"])
    stream = torch.cuda.current_stream().cuda_stream if on_gpu else None
    options = {}
    if case.router != "softmax_over_topk":
        options["is_softmax_over_topk"] = False
        options["norm_topk_probs"] = case.router == "topk_over_softmax_normalized"

    def forward() -> torch.Tensor:
        return moe_TC_softmax_topk_layer(
            i.x, i.router_w, i.w1.permute(1, 2, 0), None, i.w2.permute(1, 2, 0), None,
            problem.K, stream, TheirActivation[activation.name], False, **options,
        )[0]  # fmt: skip

    return Candidate(NAME, True, forward, leaves_of(i, router=True), i.dout), i


def _serve(request: dict) -> None:
    """Answer the requests of `Published`, one line each, until its end of the pipe closes."""
    here = Path(__file__).resolve().parent
    sys.path = [p for p in sys.path if Path(p).resolve() != here] + [str(here.parent)]
    _import_ours(request["source"])
    from research.measure import needs, timers_of
    from research.timing import wall_ms

    verify, passed = (getattr(OURS["sonicmoe.tools.verify"], n) for n in ("verify", "passed"))
    candidate, inputs = _subject(request)

    def checked() -> dict:
        first = wall_ms(candidate.forward_backward, request["device"]) / 1e3
        checks = verify(candidate, inputs, peer=True)
        if not passed(checks):
            bad = ", ".join(check.tensor for check in checks if not check.passed)
            raise SystemExit(f"differs from fp64 in {bad}")
        found = {"first_call_s": first, "checks": [asdict(c) for c in checks]}
        return found | needs(candidate)

    answers = {"needs": checked} | timers_of(candidate)._asdict()
    for line in sys.stdin:
        print(_ANSWER + json.dumps(answers[line.strip()]()), flush=True)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
