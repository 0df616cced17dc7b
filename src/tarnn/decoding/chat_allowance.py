"""The allowance of a template's rendering: what its steps and values cost, paid before a value gets long.

A loop or a macro pays for each turn, an operation for the length of what it makes. Operations whose result may be much
longer than what it is made of (products, joins, replacements, indents) pay before they are done.
"""

import re
from contextvars import ContextVar
from typing import Any

from jinja2.exceptions import TemplateError

ALLOWANCE, PER_CHARACTER = 2**26, 64  # of every rendering, and more of it for each character that goes in
STEP, ITEM = 64, 16  # cost of an iteration, a call or a filter; of a value that is no text
MANY = 8  # cost of a character that may become a text of its own
MOST_BITS = 4096  # of a product or power
LEFT: ContextVar[list[int]] = ContextVar("allowance")
TOO_MUCH = "it takes too many steps, or writes more than a conversation can need"
# filters that write their values as texts, and those that only look at the first item or the length
WRITING = {
    "capitalize", "e", "escape", "forceescape", "format", "indent", "join", "lower", "replace", "safe", "string", "striptags",
    "sum", "title", "tojson", "trim", "truncate", "upper", "urlencode", "wordcount",
}  # fmt: skip
LOOKING = {"attr", "count", "d", "default", "first", "last", "length"}
# in a format, with % or braces: a width or precision above 999, or one that is computed
LONG_WIDTH = re.compile(r"%(\([^)]*\))?[-+#_^0 ]*\d*\.?(\*|\d{4})|\{[^{}]*:[^{}]*(\d{4}|\{)")


def pay(cost: int) -> bool:
    """Take a cost from the allowance of this rendering. Raises TemplateError where none is left."""
    left = LEFT.get()
    left[0] -= cost
    if left[0] < 0:
        raise TemplateError(TOO_MUCH)
    return True


def weight(value: Any) -> int:
    """Count the characters of a value written as text, about; no further than the allowance goes."""
    total, items, most = 0, [value], LEFT.get()[0]
    while items and total <= most:
        item = items.pop()
        total += len(item) if isinstance(item, str) else ITEM
        if isinstance(item, dict):
            items += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            items += item
    return total


def size(value: Any) -> int:
    """Count the characters or items of a value, none deeper."""
    return len(value) + 1 if isinstance(value, str | list | tuple | dict | range) else 1


def written(value: Any) -> Any:
    """Pay for what a template writes."""
    pay(weight(value))
    return value


def held(value: Any) -> Any:
    """Pay for a list, tuple or dict that a template makes, with all that is in it."""
    pay(weight(value))
    return value


def joined(*parts: Any) -> str:
    """Join the parts of `a ~ b`."""
    pay(weight(parts))
    return "".join(map(str, parts))


def compared(value: Any) -> Any:
    """Pay for the right-hand side of a comparison, which is looked through."""
    pay(ITEM + (size(value) if isinstance(value, list | tuple) else size(value) // 64))  # a text is searched faster
    return value


def check_product(operator: str, left: Any, right: Any) -> None:
    """Pay for `left * right` or `left ** right`, before it is computed."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * max(right, 1)
        if bits > MOST_BITS:
            raise TemplateError(TOO_MUCH)
    elif operator == "*":
        times, items = (right, left) if isinstance(right, int) else (left, right)
        pay(size(items) * times if isinstance(times, int) and times > 0 else 0)


def cost_of_format(text: str, values: Any) -> int:
    """Compute the cost of writing values by a format. Raises TemplateError for one that fills up to a large width."""
    if LONG_WIDTH.search(text):
        raise TemplateError("it writes with a width that is computed or above 999")
    return len(text) + weight(values) * (text.count("%") + text.count("{"))


def cost_of_method(text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Compute the cost of a method of texts, before it is called."""
    values = [*args, *kwargs.values()]
    if name in ("format", "format_map"):
        return cost_of_format(text, values)
    cost = len(text) + weight(values)
    if name == "join" and args:
        return cost + len(text) * size(args[0])
    if name == "replace" and len(args) > 1 and all(isinstance(x, str) for x in args[:2]):
        return cost + text.count(args[0]) * len(args[1])
    if "split" in name:
        return cost + MANY * len(text)
    return cost + sum(x for x in values if isinstance(x, int) and x > 0)


def cost_of_filter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Compute the cost of a filter that writes its values, before it is called."""
    values = [*args, *kwargs.values()]
    texts = [x for x in values if isinstance(x, str)]
    if name == "format":
        return cost_of_format(texts[0] if texts else "", values)
    cost = weight(values)
    if name in ("indent", "tojson"):
        return cost * (1 + sum(x for x in values if isinstance(x, int) and x > 0))
    if name == "join":
        return cost + sum(map(len, texts)) * max(map(size, args))
    if name == "replace" and len(texts) > 2:
        return cost + texts[0].count(texts[1]) * len(texts[2])
    return cost
