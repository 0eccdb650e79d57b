"""The shape of the project: what may import what, what is packaged, and what an import costs."""

import ast
import os
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
    "folder": {"core", "errors"},
    "model_folder": {"errors"},
    "config": {"registry", "catalog", "errors", "explain", "overrides", "section", "yaml_text", "core"},
    "preflight": {"config", "catalog", "errors", "folder", "model_folder", "core"},
    "resume": {"config", "core", "errors"},
    "shapes": {"shapes"},
    "core": {"core", "registry", "errors"},
    "rewards": {"rewards", "core", "shapes", "registry", "catalog", "errors"},
    "pipelines": {"pipelines", "core", "registry", "catalog", "errors", "model_folder"},
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
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    name_of = {folder: name for name, folder in settings["package-dir"].items()}
    folders = {
        path.parent.relative_to(ROOT).as_posix()
        for folder in ("flowrl", "rewards", "pipelines", "configs", "assets")
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(settings["packages"]) == {name_of.get(folder, folder.replace("/", ".")) for folder in folders}


def test_scenes_renderer_and_checker_need_numpy_and_pillow_only():
    for name in ("scenes", "render", "checker", "prompts"):
        tree = ast.parse((ROOT / "flowrl" / "shapes" / f"{name}.py").read_text(encoding="utf-8"))
        modules = {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level}
        modules |= {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        assert modules - set(sys.stdlib_module_names) <= {"numpy", "PIL"}


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=120, check=False)


def test_import_is_silent_and_leaves_torch_alone():
    result = python(
        "import flowrl, flowrl.config, flowrl.cli, sys\n"
        "flowrl.load_config(); flowrl.METHODS if hasattr(flowrl, 'METHODS') else None\n"
        "assert not {'torch', 'diffusers', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_reading_prompts_costs_neither_torch_nor_tables():
    result = python(
        "import flowrl.core.prompts, sys\nassert not {'torch', 'pandas', 'pyarrow', 'numpy'} & set(sys.modules)"
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
        [sys.executable, "-c", f"import {folder}"],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert f"import this package as `flowrl.{folder}`" in result.stderr


@pytest.mark.parametrize(("module", "failed"), [("flowrl.planted", 1), ("elsewhere", 0)])
def test_a_file_that_flowrl_opens_without_an_encoding_fails_the_suite(tmp_path, module, failed):
    (tmp_path / "test_planted.py").write_text(
        f"def test_it():\n    exec('import os; open(os.devnull).close()', {{'__name__': {module!r}}})\n",
        encoding="utf-8",
    )
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, tmp_path],
        env=os.environ | {"PYTHONWARNDEFAULTENCODING": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    assert (result.returncode, "1 failed" in result.stdout) == (failed, bool(failed)), result.stdout


def test_make_test_has_python_look_for_missing_encodings():
    assert "test: export PYTHONWARNDEFAULTENCODING = 1" in (ROOT / "Makefile").read_text(encoding="utf-8")
