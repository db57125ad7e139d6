"""Every file, symbol and test that docs/house.md names is there."""
import pathlib
import re
import unittest

from tree import ROOT

PLACEHOLDER = re.compile("NAME|NOUN")
TEST = re.compile(r"[A-Z]\w*\.[A-Z]\w*")
SYMBOL = re.compile(r"([a-z_]+)\(\)|(k[A-Z]\w*|[A-Z][a-z]\w*)")
SOURCES = [path for folder in ("include", "src", "python", "tests") for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".h", ".cpp", ".py")]


def is_there(name, text):
    """Whether `name`, one between backticks, is a file, a symbol or a test; whatever is none of these counts as
    there."""
    if "/" in name:
        known = PLACEHOLDER.sub("*", name)
        return any(ROOT.glob(known)) or any(ROOT.glob(known + ".*"))
    if TEST.fullmatch(name):
        suite, test = name.split(".")
        return re.search(rf"TEST(_F|_P)?\({suite},\s*{test}\)", text) is not None
    symbol = SYMBOL.fullmatch(name)
    return symbol is None or re.search(rf"\b{symbol.group(1) or symbol.group(2)}\b", text) is not None


class House(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.text = "\n".join(path.read_text() for path in SOURCES if path != pathlib.Path(__file__).resolve())

    def test_what_it_names_is_there(self):
        names = sorted(set(re.findall(r"`([^`\n]+)`", (ROOT / "docs/house.md").read_text())))
        self.assertGreater(len(names), 80)
        self.assertEqual([name for name in names if not is_there(name, self.text)], [])

    def test_what_is_not_there_is_seen(self):
        for name in ("src/parallel/exclusion.cpp", "src/NAME/there_is_none.cpp", "Parity.EveryStageAgreesWithNothing", "there_is_none()", "kThereIsNone"):
            self.assertFalse(is_there(name, self.text), name)


if __name__ == "__main__":
    unittest.main()
