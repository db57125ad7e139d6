"""How far the cases of random_training.py may be from plain PyTorch."""

# Relative: of losses; and of the distance between final weights, to the way that training went. In bf16 a loss that
# operators compute in it has 8 bits, and a sum that differs in fp32's last bit may round a weight to its neighbour.
TOLERANCE = {False: (1e-5, 1e-3), True: (2e-2, 1e-1)}
SMALL_LOSS = 0.1  # a smaller one is a difference of logits of order one, and has their last bits
# The larger tolerance of a case: so many times the largest distance between plain PyTorch and itself with gradients
# whose last bits differ, as another order of summation makes them. Looked at where a case is off: some multiply them,
# and some of those (a norm behind a single number is its sign) by another factor with each draw of the bits.
SENSITIVITY, LAST_BITS, DRAWS = 4, 2.0**-22, 4


def _distance(some, others):
    return sum((a - b).square().sum().item() for a, b in zip(some, others, strict=True)) ** 0.5


def differences(training, found, expected, begin, shaken=()):
    """(what is wrong in words, "" if nothing is; relative distance of weights). Others are (losses, weights) of a
    segment, `shaken` several of plain PyTorch with other last bits."""
    of_losses, of_weights = TOLERANCE[training.bf16]
    wrong = []
    for index, (one, other) in enumerate(zip(found[0], expected[0], strict=True)):
        moved = [losses[index] for losses, _ in shaken]
        sensitive = SENSITIVITY * max((abs(loss - other) for loss in moved), default=0.0)
        if not abs(one - other) <= max(of_losses * max(abs(other), SMALL_LOSS), sensitive):  # NaN is wrong, too
            wrong.append(f"loss {index}: {one!r}, plain PyTorch {other!r}, with other last bits {moved!r}")
    distance, way = _distance(found[1], expected[1]), _distance(begin, expected[1])
    sensitive = SENSITIVITY * max((_distance(weights, expected[1]) for _, weights in shaken), default=0.0)
    if not distance <= max(of_weights * way, sensitive):
        names = [f"{i}: {(a - b).norm():.2g} of {(c - b).norm():.2g}"
                 for i, (a, b, c) in enumerate(zip(found[1], expected[1], begin)) if (a - b).norm() > of_weights * (c - b).norm()]
        wrong.append(f"weights: distance {distance:.3g}, way {way:.3g}, by parameter: {names[:6]}")
    return "; ".join(wrong[:4]), distance / max(way, 1e-30)
