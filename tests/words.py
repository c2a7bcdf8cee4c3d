"""Checks messages by the facts that they contain, so that messages can be reworded."""


def lacks(text: str, *facts: object) -> list[str]:
    """Returns the facts that the text does not contain in this order."""
    missing: list[str] = []
    rest = text
    for fact in map(str, facts):
        before, found, after = rest.partition(fact)
        rest = after if found else before
        missing += [] if found else [fact]
    return missing
