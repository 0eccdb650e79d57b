"""The shape of the project: what may import what, what is packaged, and what an import costs."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [path for folder in ("flowrl", "rewards", "pipelines") for path in sorted((ROOT / folder).rglob("*.py"))]

# rooms that a file may import from, by the room it lies in
ALLOWED = {
    "registry": set(),
    "catalog": {"registry", "errors"},
    "explain": {"registry"},
    "environment": set(),
    "yaml_text": {"errors"},
    "section": {"errors"},
    "overrides": {"catalog", "errors", "yaml_text"},
    "config": {"registry", "catalog", "errors", "explain", "overrides", "section", "yaml_text", "core"},
    "shapes": {"shapes"},
    "core": {"core", "registry", "errors"},
    "rewards": {"rewards", "core", "shapes", "registry", "catalog", "errors"},
    "pipelines": {"pipelines", "core", "registry", "catalog"},
    "flow": {"flow", "pipelines", "core", "registry", "catalog", "config", "errors"},
    "report": {"report", "core"},
}


def room(parts):
    return parts[1] if parts[0] == "flowrl" and len(parts) > 1 else parts[0]


def imported_rooms(path):
    inside = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = inside[: len(inside) - node.level]
            yield room([*base, *(node.module or "").split(".")] if len(base) == 1 else list(base))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flowrl":
            yield room(node.module.split("."))
        elif isinstance(node, ast.Import):
            yield from (room(name.name.split(".")) for name in node.names if name.name.startswith("flowrl."))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down_only(path):
    own = room(path.relative_to(ROOT).with_suffix("").parts)
    if own in ALLOWED and path.name != "pretrain.py":
        assert set(imported_rooms(path)) <= ALLOWED[own]


def test_the_packages_list_is_complete():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    found = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for folder in ("flowrl", "rewards", "pipelines", "configs", "assets")
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(packages) == {name if name.startswith("flowrl") else f"flowrl.{name}" for name in found}


def test_scenes_renderer_and_checker_need_numpy_and_pillow_only():
    for name in ("scenes", "render", "checker", "prompts"):
        tree = ast.parse((ROOT / "flowrl" / "shapes" / f"{name}.py").read_text(encoding="utf-8"))
        modules = {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level}
        modules |= {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        assert modules - set(sys.stdlib_module_names) <= {"numpy", "PIL"}


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_import_is_silent_and_leaves_torch_alone():
    result = python(
        "import flowrl, flowrl.config, flowrl.cli, sys\n"
        "flowrl.load_config(); flowrl.METHODS if hasattr(flowrl, 'METHODS') else None\n"
        "assert not {'torch', 'diffusers', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_public_names_resolve_and_unknown_ones_are_told():
    import flowrl

    for name in flowrl.__all__:
        assert getattr(flowrl, name) is not None
    with pytest.raises(AttributeError, match="public names: "):
        flowrl.nothing  # noqa: B018


@pytest.mark.parametrize("folder", ["rewards", "pipelines"])
def test_a_folder_is_not_imported_twice_under_two_names(folder):
    result = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert f"import this package as `flowrl.{folder}`" in result.stderr
