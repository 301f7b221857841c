"""The tables of what kernels/bench.py measures."""
from experiments.tables import markdown

HEADS = dict(tok_s="tok/s in training", of_nope="of nope's", ms="ms a decoded token",
             times_nope="times nope's", cached_s="s with the cache", uncached_s="s without",
             times_faster="times as long without")


def bench_tables(result):
    """Whatever its JSON has measured."""
    by_model = {k: result[k] for k in ("train", "decode", "generate") if k in result}
    texts = [("", models_table(by_model))] if by_model else []
    return texts + [("", attention_table(result[k])) for k in ("attention", "gpu") if k in result]


def models_table(measured):
    """{what was measured: {model: {what: number}}} -> a row for each model."""
    heads, rows = [], {}
    for by_model in measured.values():
        heads += next(iter(by_model.values()))
        for model, numbers in by_model.items():
            rows.setdefault(model, {}).update(numbers)
    lines = []
    for model, numbers in rows.items():
        cells = [numbers.get(name) for name in heads]
        lines.append([model, *("-" if y is None else f"{y:,}" if isinstance(y, int) else f"{y:.2f}"
                               for y in cells)])
    return markdown(["model", *(HEADS.get(name, name) for name in heads)], lines)


def attention_table(by_length):
    """Time beside the first row's (scaled_dot_product_attention), and peak memory."""
    names = {name: None for rows in by_length.values() for name in rows}
    reference, heads, lines = next(iter(names)), [], {name: [name] for name in names}
    for T, rows in by_length.items():
        for way, words in dict(forward="forward", both="forward and backward").items():
            ms = rows[reference].get(f"{way}_ms")
            if ms is None:
                continue
            time = f"{ms:,.0f}" if ms >= 10 else f"{ms:.2g}"
            heads.append(f"{words}, T = {int(T):,} ({reference}: {time} ms)")
            for name in names:
                lines[name].append(attention_cell(rows.get(name, {}), way, reference))
    return markdown([f"times {reference} (GB)", *heads], lines.values())


def attention_cell(row, way, reference):
    if f"{way}_ms" not in row:
        return "-"
    memory = f" ({row[f'{way}_GB']:.2f})" if f"{way}_GB" in row else ""
    return f"{row[f'{way}_of_{reference}']:.2f}{memory}"
