"""The page of the server's API, from the document that `GET /openapi.json` answers."""

from typing import Any

from scripts.site.command_line import cell
from tarnn.serving.http.app import GROUPS
from tarnn.serving.http.openapi import document


def http_api() -> str:
    """Return the page: operations, then schemas."""
    routes = [route for group in GROUPS for route in group.routes]
    whole = document(routes, with_keys=False)
    intro = (
        "What [`tarnn serve`](../docs/serving.md) answers. A running server describes itself at `/openapi.json`, from which this "
        "page is made. An error has a status of 4xx or 5xx and a [sentence](#erroranswer)."
    )
    parts = [f"# The HTTP API\n\n{intro}\n\n## Operations"]
    for path, methods in whole["paths"].items():
        for method, operation in methods.items():
            parts.append(f"### {method.upper()} {path}\n\n{operation['summary']}.\n\n{lines_of(operation)}")
    schemas = whole["components"]["schemas"]
    parts.append("## Schemas")
    parts += [schema(name, body) for name, body in sorted(schemas.items())]
    return "\n\n".join(parts) + "\n"


def lines_of(operation: dict[str, Any]) -> str:
    """Return what an operation takes and answers, as a list."""
    lines = [f"* {x['in']}: `{x['name']}`, {kind(x['schema'])}" for x in operation.get("parameters", ())]
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        lines.append(f"* body, `{media}`: {kind(content['schema'])}")
    for media, content in operation["responses"]["200"]["content"].items():
        lines.append(f"* answer, `{media}`: {kind(content['schema'])}")
    return "\n".join(lines)


def schema(name: str, body: dict[str, Any]) -> str:
    """Return the section of one schema: a table of its fields, or its kind."""
    text = " ".join(body.get("description", "").split())
    rows = [
        f"| `{key}` | {kind(x)} | {default(x, key in body.get('required', ()))} | {cell(x.get('description', ''))} |"
        for key, x in body.get("properties", {}).items()
    ]
    table = "\n".join(["| field | type | default | what it is |", "|---|---|---|---|", *rows]) if rows else kind(body)
    return f"### {name}\n\n{text}\n\n{table}".replace("\n\n\n\n", "\n\n")


def default(field: dict[str, Any], required: bool) -> str:
    return "required" if required else f"`{field['default']}`" if field.get("default") is not None else ""


def kind(field: dict[str, Any]) -> str:
    """Write a type of JSON schema in words, with its range."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key, word in (("anyOf", " or "), ("oneOf", " or "), ("allOf", " and ")):
        if key in field:
            return word.join(dict.fromkeys(kind(x) for x in field[key] if x != {"type": "null"}))
    if "const" in field or "enum" in field:
        return ", ".join(f"`{x}`" for x in field.get("enum", [field.get("const")]))
    words = str(field.get("type", "any"))
    if words == "array":
        words = f"list of {kind(field.get('items', {}))}"
    signs = {"minimum": "≥", "maximum": "≤", "exclusiveMinimum": "&gt;", "exclusiveMaximum": "&lt;"}
    ranges = [f"{sign} {field[key]}" for key, sign in signs.items() if key in field]
    return " ".join([words, *([f"({', '.join(ranges)})"] if ranges else [])])
