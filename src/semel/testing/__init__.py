"""For tests, ours and yours: a clock you own, contracts for stores and brokers, a simulator.

The contracts (`contracts`, `logs`, `bells`, `brokers`, `inboxes`) need pytest, pytest-asyncio and
hypothesis; nothing here is imported by the library itself.
"""
