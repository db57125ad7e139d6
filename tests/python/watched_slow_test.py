"""Many of watched_programs.py. TRIREME_TEST_SEED chooses others."""
import watched_test
from harness import main


class ManyWatched(watched_test.Watched):
    ranks, count = (2, 4), 60


if __name__ == "__main__":
    main()
