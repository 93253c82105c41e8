"""A public name that is imported from the wrong package: the error names the right one."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from semel.imports import PUBLIC

DOCS = Path(__file__).parents[2] / "docs"
PACKAGES = [
    "semel",
    "semel.brokers",
    "semel.bus",
    "semel.client",
    "semel.http",
    "semel.http.fastapi",
    "semel.http.sse",
    "semel.http.sqlalchemy",
    "semel.http.starlette",
    "semel.http.ws",
    "semel.inbox",
    "semel.outbox",
    "semel.relay",
    "semel.rooms",
    "semel.stores",
    "semel.stores.sql",
    "semel.worker",
]


@pytest.mark.parametrize("package", PACKAGES)
def test_name_of_another_package_raises_an_import_error_with_the_line_to_write(package):
    name, home = (
        ("Outbox", "semel.outbox") if package != "semel.outbox" else ("Relay", "semel.relay")
    )
    with pytest.raises(ImportError, match=f"{name} is not in {package}. Write: from {home} import"):
        exec(f"from {package} import {name}")


def test_room_door_imported_from_http_names_its_module():
    with pytest.raises(ImportError, match=r"Write: from semel\.http\.ws import RoomDoor$"):
        from semel.http import RoomDoor  # noqa: F401


def test_name_of_several_modules_names_each():
    with pytest.raises(ImportError, match=r"http\.sse import Limits or from semel\.http\.ws"):
        from semel.http import Limits  # noqa: F401


def test_module_that_is_no_package_names_the_right_one():
    with pytest.raises(ImportError, match=r"Write: from semel\.worker import Worker$"):
        from semel.inbox import Worker  # noqa: F401


def test_name_of_another_module_is_no_attribute():
    import semel.http
    import semel.inbox

    assert not hasattr(semel.http, "RoomDoor")
    assert getattr(semel.inbox, "Worker", None) is None
    with pytest.raises(AttributeError, match=r"from semel\.worker import Worker"):
        semel.inbox.Worker  # noqa: B018


@pytest.mark.parametrize("package", PACKAGES)
def test_unknown_name_is_an_attribute_error(package):
    module = import_module(package)
    assert not hasattr(module, "Nonsense")
    with pytest.raises(ImportError, match="cannot import name 'Nonsense'"):
        exec(f"from {package} import Nonsense")


@pytest.mark.parametrize("home", PUBLIC)
def test_every_listed_name_is_in_its_module(home):
    for name in PUBLIC[home].split():
        assert hasattr(import_module(home), name), name


def test_every_class_that_the_documentation_imports_is_listed():
    text = "\n".join(page.read_text() for page in DOCS.rglob("*.md"))
    imports = re.findall(r"^ *from (semel[\w.]*) import (\([^)]*\)|[^\n]*)", text, re.MULTILINE)
    missing = {
        (module, name)
        for module, names in imports
        for name in re.findall(r"\b[A-Z]\w+", names)
        if not any(name in listed.split() for listed in PUBLIC.values())
    }
    assert not missing
