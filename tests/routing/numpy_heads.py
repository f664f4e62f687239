"""The trained heads once more, in fp64 numpy, with the parameters by their names."""

import math

import numpy as np


def softmax(x):
    mass = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return mass / mass.sum(axis=-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def affine(params, x):
    return np.asarray(params["weight"], np.float64) @ x + np.asarray(params["bias"], np.float64)


def norm(params, x):
    scaled = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
    return scaled * np.asarray(params["weight"], np.float64) + np.asarray(params["bias"], np.float64)


def gelu(x):
    return np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x])


def mlp(params, hidden):
    x = np.maximum(affine(params["input"], hidden), 0)
    x = np.maximum(affine(params["inner"], x), 0)
    return sigmoid(affine(params["output"], x))[0]


def r2r(params, hidden, embedding, top_logits):
    x = np.concatenate([hidden, embedding, affine(params["logits"], top_logits)])
    x = affine(params["input"], affine(params["concat"], x))
    blocks = params["blocks"]
    for i in range(len(blocks["norm"]["weight"])):
        at = lambda name, i=i: {key: value[i] for key, value in blocks[name].items()}
        x = x + affine(at("down"), gelu(affine(at("up"), norm(at("norm"), x))))
    return sigmoid(affine(params["output"], norm(params["norm"], x)))[0]
