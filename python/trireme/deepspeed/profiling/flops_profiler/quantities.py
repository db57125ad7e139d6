"""Numbers as texts, with a prefix of the SI: 1.5 G."""

DEFAULT_PRECISION = 2
_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1, "m": 1e-3, "u": 1e-6}


def _prefix_of(number, prefixes):
    """The greatest that is not above the number; the least for smaller ones."""
    fitting = [prefix for prefix in prefixes if abs(number) >= _PREFIXES[prefix]]
    if number == 0:
        return ""
    return fitting[0] if fitting else prefixes[-1]


def number_to_string(num, units=None, precision=DEFAULT_PRECISION):
    """"1.5 G". `units` is a prefix, "T" to "u", by default the one that fits."""
    prefix = _prefix_of(num, list(_PREFIXES)) if units is None else units
    return f"{round(num / _PREFIXES[prefix], precision)}".removesuffix(".0") + f" {prefix}"


def flops_to_string(flops, units=None, precision=DEFAULT_PRECISION):
    """"1.5 GFLOPS". `units` may have the word, too: "GFLOPS"."""
    return f"{number_to_string(flops, _without(units, 'FLOPS'), precision)}FLOPS"


def macs_to_string(macs, units=None, precision=DEFAULT_PRECISION):
    """"1.5 GMACs". `units` may have the word, too: "GMACs"."""
    return f"{number_to_string(macs, _without(units, 'MACs'), precision)}MACs"


def params_to_string(params_num, units=None, precision=DEFAULT_PRECISION):
    """"1.5 B", "1.5 M": billions are B."""
    return number_to_string(params_num, units and units.replace("B", "G"), precision).replace("G", "B").strip()


def bytes_to_string(b, units=None, precision=DEFAULT_PRECISION):
    """"1.5 GB", powers of 1000."""
    return f"{number_to_string(b, _without(units, 'B'), precision)}B"


def duration_to_string(duration, units=None, precision=DEFAULT_PRECISION):
    """Seconds as "1.5 ms"."""
    prefix = _prefix_of(duration, ["", "m", "u"]) if units is None else units.removesuffix("s")
    return f"{number_to_string(duration, prefix, precision)}s"


def _without(units, word):
    return units and units.removesuffix(word)
