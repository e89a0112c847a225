"""The tool of ``experiment=arithmetic_tools``."""


def multiply(a: int, b: int) -> int:
    """
    Multiplies two whole numbers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b
