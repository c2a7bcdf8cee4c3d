"""Checks of messages by the facts that they tell, so that a message can be reworded."""


def lacks(text: str, *facts: object) -> list[str]:
    """Returns the facts that do not follow each other in the text."""
    missing: list[str] = []
    rest = text
    for fact in map(str, facts):
        before, found, after = rest.partition(fact)
        rest = after if found else before
        missing += [] if found else [fact]
    return missing
