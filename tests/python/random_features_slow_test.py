"""500 of random_features.py. TRIREME_TEST_SEED chooses another seed."""
import random_features_test
from harness import main


class ManyRandomFeatures(random_features_test.RandomFeatures):
    """With each reason of a refusal, and how often it stands."""
    count = 500


if __name__ == "__main__":
    main()
