"""A contract for import-linter: these modules import the standard library and nothing else.

Import-linter's own `forbidden` contract needs the name of every package it forbids; this one
forbids whatever is not Python's, so a driver nobody thought of is caught too. A module that does
not exist is passed over.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import cast

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class StandardLibraryOnly(Contract):
    """The listed modules may import their own package and the standard library."""

    modules = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        strays = [stray for module in self._modules() for stray in _strays(graph, module)]
        return ContractCheck(kept=not strays, metadata={"strays": strays})

    def _modules(self) -> list[str]:
        # On an instance, import-linter has replaced the field by what the file says.
        return cast("list[str]", self.modules)

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported, line in check.metadata["strays"]:
            output.print_error(f"{importer} imports {imported} (line {line})")


def _strays(graph: ImportGraph, module: str) -> Iterator[tuple[str, str, int]]:
    """What `module` imports directly that is neither ours nor Python's."""
    if module not in graph.modules:
        return
    own = module.partition(".")[0]
    for imported in sorted(graph.find_modules_directly_imported_by(module)):
        root = imported.partition(".")[0]
        if root == own or root in sys.stdlib_module_names:
            continue
        details = graph.get_import_details(importer=module, imported=imported)
        yield module, imported, details[0]["line_number"]
