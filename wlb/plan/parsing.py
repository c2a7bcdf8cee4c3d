"""Reading records back: what is no record is refused by its name, not by a raw traceback."""

from collections.abc import Generator
from contextlib import contextmanager

from wlb.plan.errors import UserError


@contextmanager
def parsing(what: str) -> Generator[None, None, None]:
    """Turn what a missing or misplaced value raises into a UserError that names the record.

    A ValueError passes unchanged, because the records themselves name the value that is wrong.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"this is no {what} as `to_json` writes it ({reason}); give all of what it wrote"
        ) from error
