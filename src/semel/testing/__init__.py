"""For tests, ours and yours: a clock you own, the contracts a store must keep, a simulator.

`contracts` needs pytest, pytest-asyncio (auto mode) and hypothesis; nothing here is imported by
the library itself.
"""
