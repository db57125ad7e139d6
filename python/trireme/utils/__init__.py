from .logging import log_dist, logger
