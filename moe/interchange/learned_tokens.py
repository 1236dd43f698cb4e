"""Files that go with a `tokenizer.json` trained here, and tell other tools its BOS and EOS tokens."""

import json
from collections.abc import Mapping

from moe.data.tokenizer import BOS, EOS, PAD, SPECIALS, UNK
from moe.interchange.tokenizer import CONFIG, JSON

_GENERATION = "generation_config.json"
_IDS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}


def is_learned(files: Mapping[str, bytes]) -> bool:
    """Whether these files have a tokenizer trained here, whose special tokens cannot occur in text."""
    try:
        vocabulary = json.loads(files[JSON])["model"]["vocab"]
        return all(vocabulary.get(name) == id for id, name in enumerate(SPECIALS))
    except (KeyError, TypeError, ValueError):
        return False


def ids() -> dict[str, int]:
    """Token ids for `config.json`."""
    return dict(_IDS)


def describe_special_tokens(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Tokenizer files by name. In training, each document started with BOS and ended with EOS."""
    names = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNK}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: SPECIALS[id] for name, id in names.items()},
        "clean_up_tokenization_spaces": False,
    }
    tokenizer = json.loads(files[JSON])
    first = {"SpecialToken": {"id": SPECIALS[BOS], "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": index}} for index, name in enumerate("AB")]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, texts[0]],
        "pair": [first, *texts],
        "special_tokens": {SPECIALS[BOS]: {"id": SPECIALS[BOS], "ids": [BOS], "tokens": [SPECIALS[BOS]]}},
    }
    return {
        JSON: json.dumps(tokenizer, ensure_ascii=False).encode(),
        CONFIG: json.dumps(config, indent=1, ensure_ascii=False).encode(),
        _GENERATION: json.dumps(_IDS, indent=1).encode(),
    }
