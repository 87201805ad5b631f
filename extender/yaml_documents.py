"""Read YAML that may be hostile: aliases do not expand without bound."""

import sys
from typing import Any, Final

import yaml
from typing_extensions import override  # in typing from Python 3.12 on

MOST_REPEATED: Final = 100_000
"""Values that the aliases of one document may add to those that are written out."""


class BoundedLoader(yaml.SafeLoader):
    """YAML's safe loader, but aliases may add `MOST_REPEATED` values at most.

    An alias costs a few bytes and stands for a whole subtree: twenty lines of aliases of aliases
    make billions of values for the code that walks the document.
    """

    @override
    def construct_document(self, node: yaml.Node) -> Any:  # the library's
        """Build the document, once its size is known."""
        counts: dict[int, int] = {}
        if _count(node, counts) > len(counts) + MOST_REPEATED:
            problem = f"its aliases stand for more than {MOST_REPEATED} values"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_document(node)


def yaml_documents(text: str) -> list[object]:
    """Return the documents of a text.

    Raises:
        yaml.YAMLError: it is no YAML, or too large.
        ValueError, RecursionError: a value cannot be read, or is nested too deeply.
    """
    return list(yaml.load_all(text, BoundedLoader))


def _count(node: yaml.Node, counts: dict[int, int]) -> int:
    """Count the values below a node, and the node itself."""
    if id(node) in counts:
        return counts[id(node)]
    counts[id(node)] = sys.maxsize  # a node that contains itself never ends
    total = 1
    if isinstance(node, yaml.SequenceNode):
        total += sum(_count(item, counts) for item in node.value)
    elif isinstance(node, yaml.MappingNode):
        total += sum(_count(key, counts) + _count(value, counts) for key, value in node.value)
    counts[id(node)] = total
    return total
