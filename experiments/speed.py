"""The tables of what bench.py measures."""
from experiments.tables import markdown

HEADS = dict(tok_s="tok/s in training", of_nope="of nope's", ms="ms a decoded token",
             times_nope="times nope's", peak_GB="peak memory, GB", cached_s="s with the cache",
             uncached_s="s without", times_faster="times as long without")


def bench_table(result):
    """Whatever kinds of measurement are in a JSON of bench.py."""
    text = []
    kinds = {k: result[k] for k in ("train", "decode", "memory") if k in result}
    if kinds:
        text.append(models_table(kinds))
    if "generate" in result:
        text.append(models_table({"generate": result["generate"]}))
    if "attention" in result:
        text.append(attention_table(result["attention"]))
    if "kernels" in result:
        text.append(kernels_table(result["kernels"]))
    return "\n\n".join(text)


def models_table(kinds):
    """{kind: {model: {what: number}}} -> a row for each model."""
    heads, rows = [], {}
    for found in kinds.values():
        names = list(next(iter(found.values())))
        heads += [HEADS.get(name, name.replace("_", " ")) for name in names]
        for model in found:
            rows.setdefault(model, [])
    for model, cells in rows.items():
        for found in kinds.values():
            for name in next(iter(found.values())):
                y = found.get(model, {}).get(name)
                cells.append("-" if y is None else f"{y:,}" if isinstance(y, int) else f"{y:.2f}")
    return markdown(["model", *heads], [[model, *cells] for model, cells in rows.items()])


def attention_table(found):
    """Time beside the first row's (scaled_dot_product_attention), and peak memory."""
    columns, names = [], {}
    for T, rows in found.items():
        names |= dict.fromkeys(rows)
        for kind in ("forward", "both"):
            if any(f"{kind}_ms" in r for r in rows.values()):
                columns.append((T, kind))
    reference = next(iter(names))
    heads = []
    for T, kind in columns:
        what = dict(forward="forward", both="forward and backward")[kind]
        ms = found[T][reference].get(f"{kind}_ms")
        took = f"{ms:,.0f} ms" if ms else "failed"
        heads.append(f"{what}, T = {int(T):,} ({reference}: {took})")
    lines = []
    for name in names:
        cells = []
        for T, kind in columns:
            r = found[T].get(name, {})
            cell = "failed" if f"{kind}_failed" in r else "-"
            if f"{kind}_ms" in r:  # and no time to compare it with
                cell = f"{r[f'{kind}_ms']:,.1f} ms"
            if f"{kind}_of_{reference}" in r:
                cell = f"{r[f'{kind}_of_{reference}']:.2f}"
            if f"{kind}_GB" in r:
                cell += f" ({r[f'{kind}_GB']:.2f})"
            cells.append(cell)
        lines.append([name, *cells])
    return markdown([f"times {reference} (GB)", *heads], lines)


def kernels_table(found):
    """Registers / bytes spilled / instructions, a row for each kernel."""
    rows, columns = {}, {}
    for name, r in found.items():
        kernel, _, target = name.partition(", ")
        columns[target] = None
        spilled = max(r["spill_stores"], r["spill_loads"])
        cell = f"{r['registers']} / {spilled} / {r['instructions']:,}"
        rows.setdefault(kernel, {})[target] = cell + (" C7515" if r["serialized"] else "")
    lines = [[kernel, *(cells.get(t, "-") for t in columns)] for kernel, cells in rows.items()]
    return markdown(["registers / bytes spilled / instructions a tile", *columns], lines)
