"""State dicts of transformers' models under smp: their names and shapes are kept, so there is nothing to translate."""
from . import bert, gpt2, gptj, gptneo, roberta

__all__ = ["bert", "gpt2", "gptj", "gptneo", "roberta"]
