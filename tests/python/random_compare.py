"""How far the cases of random_training.py may be from plain PyTorch."""

# Relative: of losses; and of the distance between final weights, to the way that training went. In bf16 a loss that operators
# compute in it has 8 bits, and a sum that differs in fp32's last bit may round a weight to its neighbour.
TOLERANCE = {False: (1e-5, 1e-3), True: (2e-2, 1e-1)}
SMALL_LOSS = 0.1  # a smaller one is a difference of logits of order one, and has their last bits
# What a case may be off by more: so many times the distance between plain PyTorch and itself with gradients whose last bits
# differ, as another order of summation makes them. Looked at where a case is off: some multiply them.
SENSITIVITY, LAST_BITS = 4, 2.0**-22


def _distance(some, others):
    return sum((a - b).square().sum().item() for a, b in zip(some, others, strict=True)) ** 0.5


def differences(training, found, expected, begin, shaken=None):
    """(what is wrong in words, "" if nothing is; relative distance of weights). Others are (losses, weights) of a segment, `shaken`
    those of plain PyTorch with other last bits."""
    of_losses, of_weights = TOLERANCE[training.bf16]
    wrong, shaken = [], shaken or expected
    for index, (one, other, moved) in enumerate(zip(found[0], expected[0], shaken[0], strict=True)):
        if not abs(one - other) <= max(of_losses * max(abs(other), SMALL_LOSS), SENSITIVITY * abs(moved - other)):  # NaN is wrong, too
            wrong.append(f"loss {index}: {one!r}, plain PyTorch {other!r}, with other last bits {moved!r}")
    distance, way = _distance(found[1], expected[1]), _distance(begin, expected[1])
    if not distance <= max(of_weights * way, SENSITIVITY * _distance(shaken[1], expected[1])):
        names = [f"{i}: {(a - b).norm():.2g} of {(c - b).norm():.2g}"
                 for i, (a, b, c) in enumerate(zip(found[1], expected[1], begin)) if (a - b).norm() > of_weights * (c - b).norm()]
        wrong.append(f"weights: distance {distance:.3g}, way {way:.3g}, by parameter: {names[:6]}")
    return "; ".join(wrong[:4]), distance / max(way, 1e-30)
