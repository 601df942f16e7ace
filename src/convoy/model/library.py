"""One thread at a time in `transformers`: where it imports, and while it loads.

Its modules import each other in rings, on first use; two threads at that see each other's half-made ones. And
a load patches its own modules meanwhile.
"""

from __future__ import annotations

import threading

LIBRARY = threading.RLock()
