"""Format what `tarnn info` knows of a model: a row for each fact, and a table of memory by length."""

LENGTHS = [1024, 4096, 16384, 65536]  # tokens, where nobody asks for others


def model_page(checkpoint: str, rows: dict[str, str], memory: list[dict[str, int]], limit: int | None = None) -> str:
    """memory: for each length its bytes, in the order of the table. limit: the model's positions, None: any number."""
    width = max(map(len, rows))
    lines = [checkpoint, *(f"  {name:{width}}  {value}" for name, value in rows.items())]
    if not memory:
        return "\n".join(lines)
    lines += ["", "memory to generate one sequence, bytes"]
    lines += [f"{'tokens':>12}{'state':>18}{'with weights':>18}{'softmax: cache':>18}{'with weights':>18}"]
    for row in memory:
        beyond = "  (beyond its positions)" if limit and row["length"] > limit else ""
        lines += [f"{row['length']:12,}" + "".join(f"{x:18,}" for x in list(row.values())[1:]) + beyond]
    return "\n".join(lines)
