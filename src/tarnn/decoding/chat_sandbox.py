"""A chat template is somebody's program in Jinja: it runs on plain data, in a sandbox, with an allowance of steps.

jinja2's sandbox keeps templates from code and files, but not from loops that never end or texts that double at each step.
Here each step pays from an allowance. Else a template is given what transformers gives it: the same functions and tags.
"""

import functools
import json
from collections.abc import Callable
from datetime import datetime
from types import GeneratorType
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from tarnn.decoding.chat_allowance import (
    ALLOWANCE,
    ITEM,
    LEFT,
    LOOKING,
    STEP,
    WRITING,
    check_product,
    compared,
    cost_of_filter,
    cost_of_format,
    cost_of_method,
    held,
    joined,
    pay,
    size,
    weight,
    written,
)

LEFT_OUT = {"batch", "center", "filesizeformat", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr"}
METHODS_LEFT_OUT = {"encode", "expandtabs", "maketrans", "translate"}


class Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with an allowance, and with the names that transformers gives to chat templates."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], finalize=written)
        self.filters["tojson"] = tojson
        self.filters = {name: metered(name, f) for name, f in self.filters.items() if name not in LEFT_OUT}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
        self.globals |= {"dict": TemplateDict(), "namespace": TemplateNamespace}
        self.pay, self.held, self.joined, self.compared = pay, held, joined, compared

    def compile_metered(self, source: str) -> Template:
        """Compile a template whose loops and macros pay. Raises whatever jinja2 does for a template that is none."""
        LEFT.set([ALLOWANCE])  # constant expressions are computed here
        return self.from_string(Metered().visit(self.parse(source)))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and not (isinstance(obj, str) and attr in METHODS_LEFT_OUT)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            pay(cost_of_format(left, right))
        elif operator in ("*", "**"):
            check_product(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        pay(ITEM + size(result))
        return result

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if __obj is pay or __obj is joined or __obj is compared or __obj is held:
            return __obj(*args)
        method = getattr(__obj, "__wrapped__", __obj)
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            args = tuple(list(x) if isinstance(x, GeneratorType) else x for x in args)
            pay(cost_of_method(text, method.__name__, args, kwargs))
        elif isinstance(__obj, TemplateDict) or __obj is TemplateNamespace:
            pay(weight([*args, *kwargs.values()]))
        result = super().call(__context, __obj, *args, **kwargs)
        pay(STEP + size(result))
        return result


class Metered(NodeTransformer):
    """Rewrite a parsed template so that its loops, macros, lists and comparisons pay."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        step = call_of("pay", nodes.Const(STEP + literal_length(node.body)))
        node.body.insert(0, nodes.ExprStmt(step))
        if node.test is not None:
            node.test = nodes.And(call_of("pay", nodes.Const(STEP)), node.test)
        return node

    def visit_Macro(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(call_of("pay", nodes.Const(STEP + literal_length(node.body)))))
        return node

    visit_CallBlock = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return call_of("joined", *node.nodes)

    def visit_List(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else call_of("held", node)

    visit_Tuple = visit_Dict = visit_List

    def visit_Operand(self, node: nodes.Operand) -> nodes.Node:
        self.generic_visit(node)
        node.expr = call_of("compared", node.expr)
        return node


def call_of(name: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)


def literal_length(body: list[nodes.Node]) -> int:
    return sum(len(text.data) for node in body for text in node.find_all(nodes.TemplateData))


def metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that pays for what it does."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if name in WRITING:
            args = tuple(list(x) if isinstance(x, GeneratorType) else x for x in args)
            pay(cost_of_filter(name, args, kwargs))
        elif name not in LOOKING:
            pay(ITEM * sum(map(size, args)))
        result = function(*args, **kwargs)
        pay(STEP if name in LOOKING else STEP + size(result))
        return result

    return run


def tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON as it is: jinja2's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def strftime_now(form: str) -> str:
    """Write the present time."""
    pay(cost_of_format(form, ""))
    return datetime.now().strftime(form)


class TemplateDict:
    """The function `dict` of a template, without the attributes of Python's class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class TemplateNamespace(Namespace):
    """A template's `namespace`, which takes no names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that a template may name a variable `self`
        values = dict(*rest, **kwargs)
        for name in values:
            check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name)
        Namespace.__setitem__(self, name, value)


def check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore; got {name!r:.60}")


class Generation(Extension):
    """The tag `generation`, which marks answers for training, and writes what stands in it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("write"), [], [], body).set_lineno(line)

    def write(self, caller: Callable[[], str]) -> str:
        return caller()
