def why_not(ops):
    return "is not written"
