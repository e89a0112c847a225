"""The garbage collector, kept from looking through what stays."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """For a block that imports modules and builds what stays as long as the process: nothing is collected within, and
    what is there afterwards is never looked through again.

    Otherwise the collector goes through the modules again and again while they grow, a quarter of the time that vLLM
    takes to import, and later through all of them whenever it looks for old garbage.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        if was_on:
            gc.enable()
