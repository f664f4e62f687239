"""Messages survive their form as bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.engine.messages import FRONT, PLAIN, Kind, Message, decode, encode, read_text, text

PAYLOADS = [
    (),
    np.int32(-7),
    {"a": np.zeros((0, 3), np.int8), "b": (np.float64(np.pi), np.array([True, False]))},
    [np.arange(12, dtype=np.uint32).reshape(3, 4)[:, ::2], None, np.array(jnp.bfloat16([0.1, 3]))],
]


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
def test_any_arrays_come_back(payload):
    sent = Message(Kind.HAND, payload)
    got = decode(encode(sent), {Kind.HAND: jax.tree.structure(payload)})
    assert got.kind == Kind.HAND
    assert jax.tree.structure(got.payload) == jax.tree.structure(payload)
    for a, b in zip(jax.tree.leaves(got.payload), jax.tree.leaves(payload), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a, b)


def test_text_comes_back_and_other_bytes_do_not():
    message = Message(Kind.FAILED, (np.int32(FRONT), text("größer: 1 µs")))
    assert read_text(decode(encode(message), PLAIN).payload[1]) == "größer: 1 µs"
    with pytest.raises(ValueError, match="something else"):
        decode(b"\x80\x04\x95" + bytes(20), PLAIN)
