"""Runs another file, which ends when whoever started it does, however that ends.

python leash.py server.py 3
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

LOOK_EVERY_S = 0.3


def watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=watch, args=(os.getppid(),), daemon=True).start()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
