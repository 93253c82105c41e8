"""nginx and HAProxy with the configuration that docs/how-to/deploy-behind.md shows."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from support import binaries
from support.process import HOST, ServerProcess, free_port, new_folder

PAGE = Path(__file__).parents[2] / "docs/how-to/deploy-behind.md"


def shown(language: str, containing: str = "") -> str:
    """The page's one block in this language that contains this text."""
    found = re.findall(
        rf"^```{language}\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    (block,) = [block for block in found if containing in block]
    return block


class ProxyServer(ServerProcess):
    """A proxy in front of two servers."""

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def probe(self) -> None:
        socket.create_connection((HOST, self.port), 1).close()


def start_proxy(kind: str, ports: tuple[int, int], **replaced: str) -> ProxyServer:
    """`ports` are those of the two servers. `replaced`: text of the page, as `_60s="1s"`."""
    binary = binaries.find(kind)
    folder, port = new_folder(kind), free_port()
    settings = shown(kind)
    for old, new in zip(("8000", "8001", "8002"), (port, *ports), strict=True):
        settings = settings.replace(f"{HOST}:{old}", f"{HOST}:{new}")
    for old, new in replaced.items():
        assert old.lstrip("_") in settings
        settings = settings.replace(old.lstrip("_"), new)
    file = folder / "proxy.conf"
    file.write_text(_whole_nginx(folder, settings) if kind == "nginx" else settings)
    words = ["-p", str(folder), "-e", "stderr", "-c", str(file)]
    return ProxyServer(
        binary, words if kind == "nginx" else ["-f", str(file)], port, folder
    ).start()


def _whole_nginx(folder: Path, http: str) -> str:
    paths = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{path}_temp_path {folder}/{path};\n" for path in paths)
    user = "user root;\n" if os.geteuid() == 0 else ""
    return (
        f"daemon off;\nworker_processes 1;\npid {folder}/pid;\n{user}"
        f"events {{}}\nhttp {{\naccess_log off;\n{temporary}{http}}}\n"
    )
