"""The event bus: workers say how a job goes on, and everybody who watches it hears it in order."""

from semel.bus.stages import SEQ_RANGES, Stages, get_next_seq

__all__ = ["SEQ_RANGES", "Stages", "get_next_seq"]
