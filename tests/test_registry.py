import pytest

from flowrl.registry import Registry, import_string


def test_names_are_checked_without_importing():
    registry = Registry("thing", {"one": "nowhere:x", "two": "math:pi"})
    assert list(registry) == ["one", "two"]
    assert "one" in registry
    assert registry.load("two") == pytest.approx(3.14159, abs=1e-5)
    with pytest.raises(ValueError, match="unknown thing 'tow'; did you mean 'two'?"):
        registry.load("tow")
    with pytest.raises(ValueError, match="unknown thing 'zebra'; known: one, two"):
        registry.load("zebra")
    with pytest.raises(ValueError, match="thing 'one' is registered twice"):
        registry.register("one", "math:e")


@pytest.mark.parametrize("target", ["math", "math:", ":pi", "math:nothing"])
def test_bad_import_strings(target):
    with pytest.raises(ValueError, match="math|pi"):
        import_string(target)
