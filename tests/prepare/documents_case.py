"""Provides text documents in memory."""

from dataclasses import dataclass, field

from wlb.prepare import Skip


@dataclass(frozen=True)
class ListedDocuments:
    """Documents in memory, with the interface of a listing of files. Items are (name, text)."""

    description: str
    items: tuple[tuple[str, str], ...]
    skipped: dict[Skip, int] = field(default_factory=dict)

    @property
    def names(self):
        return tuple(name for name, _ in self.items)

    @property
    def sizes(self):
        return tuple(len(text.encode("utf-8", "surrogatepass")) for _, text in self.items)

    def read(self, row):
        text = self.items[row][1]
        try:
            text.encode()
        except UnicodeEncodeError:
            return Skip.NOT_UTF8
        return text
