"""Models of smp_delayed_test.py on other numbers of ranks."""
import smp_delayed_test
from harness import main


class Bits(smp_delayed_test.Bits):
    cases = {"net": (1, 3), "gpt2": (1, 3)}


if __name__ == "__main__":
    main()
