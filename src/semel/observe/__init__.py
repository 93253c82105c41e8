"""What to watch, and from when on somebody should look: rules for Prometheus.

    python -m semel.observe > /etc/prometheus/semel.yml

The metrics themselves are told by `semel.health`. The rules make the four numbers of them that say
how rooms do, and an alert for each; they are plain text, to be shipped as they are or changed.
"""

from __future__ import annotations

from importlib.resources import files

__all__ = ["rules"]


def rules() -> str:
    """The rules, as the file that Prometheus loads by `rule_files`."""
    return files(__name__).joinpath("rules.yml").read_text("utf-8")
