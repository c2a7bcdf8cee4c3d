"""Provides options and an interruption for tests of `prepare_store`."""

from wlb.prepare import PrepareOptions


def options(corpus, out, **changes):
    asked = {"tokenizer": "bytes", "shard_bytes": 3000, "heldout_fraction": 0.2, "seed": 3}
    return PrepareOptions(inputs=(str(corpus),), out=str(out), **{**asked, **changes})


class Interrupt(Exception):
    pass


def interrupted_at(limit):
    """Returns a progress callback that raises `Interrupt` at its `limit`-th call."""
    calls = []

    def progress(status):
        calls.append(status)
        if len(calls) == limit:
            raise Interrupt

    return progress
