"""The domain of every token of an example, which a token-level router should find."""

from molora_jax.config import UserError
from molora_jax.data.document import from_example
from molora_jax.data.example import Example
from molora_jax.text.tokenizer import Tokenizer


def token_domains(tokenizer: Tokenizer, example: Example) -> list[str]:
    """Names of domains, one a token of `document.from_example`; the example's task where it has no spans.

    A token belongs where its last character does; the first and the last tokens, which stand for no text, belong with
    their neighbours.

    Raises:
      UserError: the tokens do not follow from the text as a whole, so that they have no place in it.
    """
    tokens = from_example(tokenizer, example).tokens
    text = example.prompt + example.completion
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    before = len(tokenizer.prefix)
    if tokens[before:-1].tolist() != encoding.ids:
        raise UserError(
            f"{example.id}: its prompt does not end between two tokens; the domains of tokens are not known"
        )
    ends = [span.stop for span in example.spans] or [len(text)]
    names = [span.domain for span in example.spans] or [example.task]
    found = [names[next(i for i, end in enumerate(ends) if stop <= end)] for _, stop in encoding.offsets]
    return [*names[:1] * before, *found, names[-1]]
