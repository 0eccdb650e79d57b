"""Another project has the name `flowrl` in the package index, and installs a folder of that name too."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.identity import AUTHOR, WAY_OUT, conflicts

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the path where distributions can be put."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site, name="flowrl", author="Someone Else"):
    info = site / f"{name.replace('-', '_')}-2.0.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 2.0", *([f"Author: {author}"] if author else [])]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")


def python(*arguments, path, **options):
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
        **options,
    )


def test_nothing_is_said_of_this_environment():
    assert conflicts() == []


@pytest.mark.parametrize(("name", "author"), [("flowrl", AUTHOR), ("flowrl-align", AUTHOR), ("flowrl-other", "X")])
def test_a_leftover_under_the_old_name_and_other_names_are_no_conflict(site, name, author):
    install(site, name, author)
    assert conflicts() == []


@pytest.mark.parametrize("author", ["Someone Else", None])
def test_another_projects_distribution_elsewhere_can_hide_this_one(site, author):
    install(site, author=author)
    assert conflicts() == [
        f"another project's distribution 'flowrl' 2.0 is installed in {site} and can hide those of flowrl-align in "
        f"{ROOT / 'flowrl'}: {WAY_OUT}"
    ]


def test_another_projects_distribution_in_the_same_folder_has_its_files_mixed_with_ours(site):
    install(site)
    (site / "flowrl").symlink_to(ROOT / "flowrl")
    (said,) = conflicts()
    assert "its files are mixed with those of flowrl-align" in said


def test_the_command_and_doctor_tell_at_the_start_and_go_on(tmp_path):
    install(tmp_path)
    result = python("-m", "flowrl.cli", "--version", path=[ROOT, tmp_path])
    assert result.returncode == 0
    assert result.stderr.startswith("warning another project's distribution 'flowrl' 2.0 is installed in")
    assert WAY_OUT in result.stderr


@pytest.mark.parametrize("init", ["__version__ = '2.0'\n", "raise ImportError('of its own')\n", None])
def test_the_command_refuses_to_start_on_another_projects_package(tmp_path, init):
    (tmp_path / "flowrl").mkdir()
    if init:
        (tmp_path / "flowrl" / "__init__.py").write_text(init, encoding="utf-8")
    (tmp_path / "flowrl_align").symlink_to(ROOT / "flowrl" / "command")
    result = python("-S", "-c", "from flowrl_align import main; main()", path=[tmp_path], cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error the package 'flowrl' that Python finds (")
    assert result.stderr.endswith(f"is not that of flowrl-align: {WAY_OUT}\n")


def test_the_command_starts_on_this_package():
    result = python("-c", "from flowrl_align import main; main()", "--version", path=[ROOT])
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("flowrl 0.")


def test_install_lines_of_the_docs_name_the_distribution_flowrl_align():
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?<!un)install '?flowrl(?!-align)\b", text), path
    assert WAY_OUT in (ROOT / "README.md").read_text(encoding="utf-8")
    assert 'name = "flowrl-align"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
