"""Tells a program whose own exception has ended an engine, in a step that it runs in the middle of."""
import contextlib


@contextlib.contextmanager
def telling(engine):
    """While it lasts, a program's own exception that ends `engine` says so in a note; the library's errors do in their
    text."""
    was_intact = not engine.core.failure
    try:
        yield
    except Exception as error:
        if was_intact and engine.core.failure and "This engine is spent" not in str(error) and hasattr(error, "add_note"):
            error.add_note(f"This engine is spent: {engine.anew}, and load a checkpoint")
        raise
