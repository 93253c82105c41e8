"""Run one piece of work in many threads at the same moment."""

from __future__ import annotations

import threading


def in_threads(work, count):
    """The results, in no particular order; the first error is raised."""
    barrier = threading.Barrier(count)
    results, errors = [], []

    def one():
        barrier.wait()
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
