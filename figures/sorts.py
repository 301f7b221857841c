"""What sort of token each of a text is, for figures that take those of a sort together."""


def sorts_of(labels):
    """What sort of token each of a text is, by its label. Of line ends there are three."""
    sorts, line = [], "."  # what the line has so far; the first may have begun before
    for label in labels:
        label = label.replace("\\\\", "/").replace("\\x0c", " ")  # \\n is not a line end
        before, end, after = label.rpartition("\\n")
        if not end:
            line += label
            sorts.append(sort_of(label))
            continue
        words = (line + before).rpartition("\\n")[2].removesuffix("\\r")
        words = words.replace("\\t", " ").strip()
        if not words:
            sorts.append("blank line")
        else:
            sorts.append("block begins" if words[-1] in ":{" else "line end")
        line = after
    return sorts


def sort_of(label):
    """Of a token without a line end; the end of a text is a sign."""
    word = label.strip()
    if word in ("", "\\t"):
        return "space"
    if word.isidentifier():
        return "letters"
    return "digits" if word.isdigit() else "signs"

