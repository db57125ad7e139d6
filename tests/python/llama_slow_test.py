"""As llama_test.py, 20 steps of 8 layers of hidden size 256."""
import llama_test
from harness import main


class LargeLlama(llama_test.Llama):
    layers, hidden, steps = 8, 256, 20


if __name__ == "__main__":
    main()
