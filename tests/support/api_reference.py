"""Writes docs/api.md: `make api`.

Signatures and the first paragraph of each docstring come from the source, which is parsed and not
imported, so no framework need be installed. Usage lines and shapes come from api_usage.toml. Types
that a name or a default makes obvious are left out.
"""

import ast
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
DOCUMENT = ROOT / "docs" / "api.md"
PACKAGE = ROOT / "src" / "sonicmoe"
USAGE: dict[str, Any] = tomllib.loads((SUPPORT / "api_usage.toml").read_text())
MODULES = ["sonicmoe", "enums", "routing", "watch", "distributed"]
ADAPTERS = (
    "transformers",
    "convert",
    "peft",
    "packed_parameter",
    "trainer",
    "report",
    "checkpointing",
    "torchtitan",
)
MODULES += [f"integrations.{module}" for module in ADAPTERS]
MODULES += ["tools.cost", "plugins"]
INDENT = "    "
OBVIOUS = {"Any", "Callable[[Tensor], Tensor]", "Tensor", "bool", "float", "int", "str"}
OBVIOUS |= {"ActivationType", "KernelBackendMoE", "dist.ProcessGroup", "torch.Generator", "None"}
OBVIOUS |= {"nn.Module", "torch.device", "torch.dtype"}
BEGINNING = """\
# API reference

How do I call it? Letters are in the [glossary](glossary.md); `help(name)` prints all types and
details. The usage lines follow these, and in each section `from … import *`:

"""
SHARED = """
- `router`: a name in `sonicmoe.routing.ROUTERS`, or a `Router`.
- `backend`: "triton" (kernels) or "torch"; None: kernels if the tensors are on a GPU.
- `slot_token` (S,), `token_start` (T+1,): if ids and scores are lists (S,) in token order, not
  (T, K), the token of each entry and the first entry of each token.
- `all_reduce`: function from the counts (E,) of a rank to those of all ranks.
"""


def names() -> dict[str, dict[str, ast.stmt]]:
    """The definition of every public name, under the first module that has it."""
    found: dict[str, dict[str, ast.stmt]] = {}
    seen = set()
    for module in MODULES:
        path = _path(module)
        tree = ast.parse(path.read_text())
        public = _all(tree) or [name for name in _defined(tree) if not name.startswith("_")]
        found[module] = {}
        for name in public:
            file, node = _definition(path, name)
            if (file, name) not in seen:
                found[module][name] = node
            seen.add((file, name))
    return found


def usages(module: str) -> dict[str, dict[str, str]]:
    """The entries of a module in api_usage.toml, in the order of the document."""
    entries = USAGE
    for part in module.split("."):
        entries = entries[part]
    return entries


def dotted(module: str) -> str:
    return module if module == "sonicmoe" else f"sonicmoe.{module}"


def text() -> str:
    """The document."""
    definitions = names()
    parts = [BEGINNING + _block("python", USAGE["setup"]) + SHARED]
    for module in MODULES:
        entries = [_entry(n, definitions[module][n], u) for n, u in usages(module).items()]
        parts.append(f"\n## {dotted(module)}\n\n" + _block("text", "\n\n".join(entries)))
    return "".join(parts)


def _entry(name: str, node: ast.stmt, usage: dict[str, str]) -> str:
    """As `help` prints it: the signature; indented, what it does, usage and methods."""
    use, shapes = usage.get("use", "").strip(), usage.get("shapes", "")
    told = bool(use) and "→" in shapes  # what is returned
    lines = [_signature(name, node, told), _indented(_paragraph(node))]
    if use:
        lines.append(textwrap.indent(_with_shapes(use, shapes.removeprefix("→ ")), 2 * INDENT))
    for method in _methods(node):
        if any(ast.unparse(d) == "property" for d in method.decorator_list):
            assert method.returns is not None
            call = f".{method.name}: {ast.unparse(method.returns)}"
        else:
            returns = None if told else method.returns
            call = _call(f".{method.name}", method.args, returns, skip_self=True)
        lines += [textwrap.indent(call, INDENT), _indented(_paragraph(method), 2)]
    return "\n".join(lines)


def _indented(words: str, times: int = 1) -> str:
    indent = times * INDENT
    return textwrap.fill(words, 100, initial_indent=indent, subsequent_indent=indent)


def _with_shapes(use: str, shapes: str) -> str:
    """Shapes as a comment at the end of the last line, or below it."""
    if not shapes:
        return use
    last = f"{use.splitlines()[-1]}  # {shapes}"
    return f"{use}  # {shapes}" if len(last) <= 92 else f"{use}\n# {shapes}"


def _block(language: str, lines: str) -> str:
    return f"```{language}\n{lines.strip()}\n```\n"


# --- reading the source ---------------------------------------------------------------------------
def _path(module: str) -> Path:
    if module == "sonicmoe":
        return PACKAGE / "__init__.py"
    path = PACKAGE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _all(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def _defined(tree: ast.Module) -> dict[str, ast.stmt]:
    """Functions, classes and annotated constants, which have a docstring after them."""
    found: dict[str, ast.stmt] = {}
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
            node.docstring = ast.literal_eval(following.value)  # type: ignore[attr-defined]
            found[ast.unparse(node.target)] = node
    return found


def _definition(path: Path, name: str) -> tuple[Path, ast.stmt]:
    """Where `name` is defined: in this file, or in one that it imports the name from."""
    tree = ast.parse(path.read_text())
    if name in (defined := _defined(tree)):
        return path, defined[name]
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names):
            folder = path.parents[node.level - 1]
            return _definition(
                folder.joinpath(*(node.module or "").split(".")).with_suffix(".py"), name
            )
    raise LookupError(f"{path} does not define {name}")


def _paragraph(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        docstring = ast.get_docstring(node)
    else:
        docstring = node.docstring  # type: ignore[attr-defined]
    if not docstring:
        raise LookupError(f"{ast.unparse(node).splitlines()[0]} has no docstring")
    return " ".join(docstring.split("\n\n")[0].split())


def _methods(node: ast.stmt) -> Iterator[ast.FunctionDef]:
    for item in node.body if isinstance(node, ast.ClassDef) else ():
        if not isinstance(item, ast.FunctionDef) or item.name.startswith("_"):
            continue
        if ast.get_docstring(item):
            yield item


def _signature(name: str, node: ast.stmt, told: bool) -> str:
    """As the source has it; without the type of the result if the shapes tell it."""
    if isinstance(node, ast.FunctionDef):
        return _call(name, node.args, None if told else node.returns)
    if not isinstance(node, ast.ClassDef):
        assert isinstance(node, ast.AnnAssign)
        return f"{name}: {ast.unparse(node.annotation)}"
    bases = [ast.unparse(base) for base in node.bases]
    if bases == ["Enum"]:
        members = [ast.unparse(n.targets[0]) for n in node.body if isinstance(n, ast.Assign)]
        return f"class {name}(Enum):\n    {', '.join(members)}"
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return _call(f"class {name}", item.args, None, skip_self=True)
    if bases in ([], ["NamedTuple"]):
        return _wrap(f"class {name}(", map(_field, _fields(node)), ")")
    return f"class {name}: a {bases[0]}"


def _fields(node: ast.ClassDef) -> Iterator[ast.AnnAssign]:
    return (item for item in node.body if isinstance(item, ast.AnnAssign))


def _field(field: ast.AnnAssign) -> str:
    return _argument(ast.arg(ast.unparse(field.target), field.annotation), field.value)


def _call(
    name: str, args: ast.arguments, returns: ast.expr | None, *, skip_self: bool = False
) -> str:
    """`name(arguments) -> result`, without obvious types."""
    positional = [*args.posonlyargs, *args.args]
    no_default = [None] * (len(positional) - len(args.defaults))
    shown = list(map(_argument, positional, [*no_default, *args.defaults]))[skip_self:]
    if args.vararg:
        shown.append(f"*{_argument(args.vararg, None)}")
    elif args.kwonlyargs:
        shown.append("*")
    shown += map(_argument, args.kwonlyargs, args.kw_defaults)
    result = ast.unparse(returns) if returns else "None"
    obvious = result.removeprefix("torch.") in OBVIOUS
    return _wrap(f"{name}(", shown, ")" if obvious else f") -> {result}")


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    """The name, its type unless that is obvious, and its default."""
    kind = ast.unparse(argument.annotation or ast.Constant(None)).replace("torch.Tensor", "Tensor")
    told = default is not None and ast.unparse(default) != "None"
    shown = argument.arg
    if not told and not set(kind.split(" | ")) <= OBVIOUS:
        shown += f": {kind}"
    if default is None:
        return shown
    return f"{shown}{' = ' if ':' in shown else '='}{ast.unparse(default)}"


def _wrap(beginning: str, items: Any, end: str, width: int = 96) -> str:
    """One line, or the items on lines of their own, as many on each as fit."""
    items = list(items)
    end = end.replace("torch.Tensor", "Tensor").replace("'", "")
    line = beginning + ", ".join(items) + end
    if len(line) <= width:
        return line
    lines = [""]
    for item in items:
        if len(lines[-1]) + len(item) + 6 > width:
            lines.append("")
        lines[-1] += f" {item}," if lines[-1] else f"    {item},"
    return "\n".join([beginning.rstrip(), *lines, end])


if __name__ == "__main__":
    DOCUMENT.write_text(text())
