"""Provides what the tests of `prepare_store` share."""

from wlb.prepare import PrepareOptions


def options(corpus, out, **changes):
    asked = {"tokenizer": "bytes", "shard_bytes": 3000, "heldout_fraction": 0.2, "seed": 3}
    return PrepareOptions(inputs=(str(corpus),), out=str(out), **{**asked, **changes})


class Interrupt(Exception):
    pass


def interrupted_at(limit):
    calls = []

    def progress(status):
        calls.append(status)
        if len(calls) == limit:
            raise Interrupt

    return progress
