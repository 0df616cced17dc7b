"""The page of the command line: each command, its arguments and options, as typer declares them."""

import inspect

import typer

from tarnn.cli.main import COMMANDS, EXAMPLES, function_of


def command_line() -> str:
    """Return the page."""
    parts = [section(name) for name in COMMANDS]
    listed = "\n".join(f"* [`tarnn {name}`](#tarnn-{name}): {text}" for name, text in COMMANDS.items())
    intro = "Every command, with its options and their defaults. `tarnn COMMAND --help` prints the same."
    return "\n\n".join([f"# The command line\n\n{intro}\n\n{listed}", *parts]) + "\n"


def section(name: str) -> str:
    """Return the part of one command."""
    function = function_of(name)
    app = typer.Typer(add_completion=False)
    app.command(name=name)(function)
    command = typer.main.get_command(app)
    rows = [row(parameter) for parameter in command.params if parameter.name != "help"]
    text = inspect.cleandoc(function.__doc__ or "")
    table = "\n".join(["| argument or option | default | what it is |", "|---|---|---|", *rows])
    return f"## tarnn {name}\n\n```text\n{EXAMPLES[name]}\n```\n\n{text}\n\n{table}"


def row(parameter: object) -> str:
    """Return one row of the table of options."""
    if parameter.param_type_name == "argument":
        name = f"`{parameter.make_metavar_of() if hasattr(parameter, 'make_metavar_of') else parameter.name.upper()}`"
    else:
        name = ", ".join(f"`{x}`" for x in (*parameter.opts, *parameter.secondary_opts))
    default = parameter.default
    if callable(default) or default is None or default == () or default is ... or "UNSET" in repr(default).upper():
        default = "required" if parameter.required else ""
    elif parameter.param_type_name == "option" and parameter.is_flag:
        default = "on" if default is True else ""
    else:
        default = f"`{default}`"
    return f"| {name} | {cell(default)} | {cell(getattr(parameter, 'help', '') or '')} |"


def cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")
