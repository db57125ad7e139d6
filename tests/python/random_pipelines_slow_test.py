"""300 of random_pipelines.py, on two and four ranks."""
import random_pipelines_test
from harness import main


class ManyRandomPipelines(random_pipelines_test.RandomPipelines):
    seeds = {2: (1000, 150), 4: (2000, 150)}


if __name__ == "__main__":
    main()
