"""For tests, ours and yours: a clock you own, contracts for stores and brokers, a simulator.

`contracts`, `logs`, `bells` and `brokers` need pytest, pytest-asyncio and hypothesis; nothing here is imported by
the library itself.
"""
