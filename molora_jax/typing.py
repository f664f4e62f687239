"""Array annotations and the axis legend that the whole project writes shapes in.

B batch rows · T tokens of a row · N tokens of a flat list (SSM code: state) · S cache positions · D model width
F output features (MLP width in the MLP) · H query heads · K key/value heads · d head width · V vocabulary
L layers · E experts · R LoRA rank · C channels of the SSM · G segments · M models · P pages or slots

Inside the decoder a token is a column, x: [D, N] and y = W x, as in the papers; what callers see has tokens first.
"""

from jaxtyping import Array, Bool, Float, Int, Key, UInt32

Params = dict
"""Nested dict with string keys whose leaves are arrays; what every room but `models` sees of a model."""

__all__ = ["Array", "Bool", "Float", "Int", "Key", "Params", "UInt32"]
