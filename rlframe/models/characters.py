"""A character tokenizer as an ordinary Hugging Face fast tokenizer, for models of a few thousand parameters."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
ALPHABET = "0123456789+-*/=()abcdefghijklmnopqrstuvwxyz .,:;?!'\"<>[]_\n"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{{ '\n' }}{% endfor %}"


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, with pad, bos, eos and a plain chat template; upper case is folded, anything else unknown."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *ALPHABET))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    pad, bos, eos, unk = SPECIAL
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk)
    fast.chat_template = CHAT_TEMPLATE
    return fast
