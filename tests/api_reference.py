"""Writes docs/api.md: `make api`.

Signatures and the first paragraph of each docstring come from the source, which is parsed and not
imported, so no framework need be installed. Usage lines and shapes come from api_usage.toml.
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
DOCUMENT = TESTS.parent / "docs" / "api.md"
PACKAGE = TESTS.parent / "src" / "sonicmoe"
USAGE: dict[str, Any] = tomllib.loads((TESTS / "api_usage.toml").read_text())
MODULES = (
    "sonicmoe", "enums", "routing", "watch", "distributed", "integrations.transformers",
    "integrations.lora", "integrations.checkpointing", "integrations.torchtitan",
)  # fmt: skip
BEGINNING = """\
# API reference

How do I call it? Every public name with its signature, what it does, and usage with shapes. Letters
are in the [glossary](glossary.md); `help(name)` prints details; `make api` writes this file.

The usage lines are one program, which begins with

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


def text() -> str:
    """The document."""
    definitions = names()
    parts = [BEGINNING + _block("python", USAGE["setup"])]
    for module in MODULES:
        dotted = module if module == "sonicmoe" else f"sonicmoe.{module}"
        parts.append(f"\n## {dotted}\n")
        for name, usage in usages(module).items():
            parts.append(f"\n### {dotted}.{name}\n\n")
            parts.append(_entry(name, definitions[module][name], usage))
    return "".join(parts)


def _entry(name: str, node: ast.stmt, usage: dict[str, str]) -> str:
    signatures, says = [_signature(name, node)], [_paragraph(node)]
    for method in _methods(node):
        signatures.append(_call(f".{method.name}", method.args, method.returns, skip_self=True))
        says.append(f"`{method.name}`: {_paragraph(method)}")
    out = _block("py", "\n".join(signatures)) + "\n" + "\n\n".join(says) + "\n"
    shapes = f"\n# {usage['shapes']}" if "shapes" in usage else ""
    return out + "\n" + _block("python", usage["use"].rstrip() + shapes)


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
            return _definition(path.parent / f"{node.module}.py", name)
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


def _signature(name: str, node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef):
        return _call(name, node.args, node.returns)
    if not isinstance(node, ast.ClassDef):
        assert isinstance(node, ast.AnnAssign)
        return f"{name}: {ast.unparse(node.annotation)}"
    bases = [ast.unparse(base) for base in node.bases]
    if bases == ["Enum"]:
        members = [ast.unparse(n.targets[0]) for n in node.body if isinstance(n, ast.Assign)]
        return f"class {name}(Enum):\n    {', '.join(members)}"
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return _call(name, item.args, None, skip_self=True)
    if bases in ([], ["NamedTuple"]):
        return _wrap(f"{name}(", map(ast.unparse, _fields(node)), ")")
    return f"class {name}({', '.join(bases)})"


def _fields(node: ast.ClassDef) -> Iterator[ast.AnnAssign]:
    return (item for item in node.body if isinstance(item, ast.AnnAssign))


def _call(
    name: str, args: ast.arguments, returns: ast.expr | None, *, skip_self: bool = False
) -> str:
    """`name(arguments) -> result`, as the source has it."""
    positional = [*args.posonlyargs, *args.args]
    no_default = [None] * (len(positional) - len(args.defaults))
    shown = list(map(_argument, positional, [*no_default, *args.defaults]))[skip_self:]
    if args.vararg:
        shown.append(f"*{_argument(args.vararg, None)}")
    elif args.kwonlyargs:
        shown.append("*")
    shown += map(_argument, args.kwonlyargs, args.kw_defaults)
    return _wrap(f"{name}(", shown, f") -> {ast.unparse(returns)}" if returns else ")")


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    shown = ast.unparse(argument)
    if default is None:
        return shown
    return f"{shown}{' = ' if argument.annotation else '='}{ast.unparse(default)}"


def _wrap(beginning: str, items: Any, end: str, width: int = 96) -> str:
    """One line, or the items on lines of their own, as many on each as fit."""
    items = [item.replace("torch.Tensor", "Tensor") for item in items]
    end = end.replace("torch.Tensor", "Tensor")
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
