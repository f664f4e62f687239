def why_not(x, pair, *, soft):
    return "is not there yet"


def hard(*a, **k):
    raise NotImplementedError
