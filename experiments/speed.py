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
        names = list(next(iter(by_model.values())))
        heads += [HEADS.get(name, name.replace("_", " ")) for name in names]
        rows |= {model: [] for model in by_model if model not in rows}
    for model, cells in rows.items():
        for by_model in measured.values():
            for name in next(iter(by_model.values())):
                y = by_model.get(model, {}).get(name)
                cells.append("-" if y is None else f"{y:,}" if isinstance(y, int) else f"{y:.2f}")
    return markdown(["model", *heads], [[model, *cells] for model, cells in rows.items()])


def attention_table(by_length):
    """Time beside the first row's (scaled_dot_product_attention), and peak memory."""
    columns, names = [], {}
    for T, rows in by_length.items():
        names |= dict.fromkeys(rows)
        columns += [(T, way) for way in ("forward", "both")
                    if any(f"{way}_ms" in row for row in rows.values())]
    reference, heads = next(iter(names)), []
    for T, way in columns:
        what = dict(forward="forward", both="forward and backward")[way]
        ms = by_length[T][reference][f"{way}_ms"]
        time = f"{ms:,.0f}" if ms >= 10 else f"{ms:.2g}"
        heads.append(f"{what}, T = {int(T):,} ({reference}: {time} ms)")
    lines = [[name, *(attention_cell(by_length[T].get(name, {}), way, reference)
                      for T, way in columns)] for name in names]
    return markdown([f"times {reference} (GB)", *heads], lines)


def attention_cell(row, way, reference):
    if f"{way}_ms" not in row:
        return "-"
    memory = f" ({row[f'{way}_GB']:.2f})" if f"{way}_GB" in row else ""
    return f"{row[f'{way}_of_{reference}']:.2f}{memory}"
