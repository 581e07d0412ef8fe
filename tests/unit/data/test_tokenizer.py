"""Chat template rules and end tokens, on a small tokenizer built here."""

import json

import pytest

from relax_hpc.data.tokenizer import load_tokenizer, prompt_text, prompt_token_ids, stop_token_ids
from relax_hpc.errors import ConfigError

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a b"}]


def test_chat_template_opens_the_assistants_turn(tokenizer):
    ids = prompt_token_ids(tokenizer, MESSAGES, apply_chat_template=True)
    assert tokenizer.decode(ids) == "<s>[system]be brief[user]a b[assistant]"
    # A string is one user message.
    ids = prompt_token_ids(tokenizer, "a b", apply_chat_template=True)
    assert tokenizer.decode(ids) == "<s>[user]a b[assistant]"


def test_the_start_token_is_there_once(tokenizer):
    for templated in (True, False):
        ids = prompt_token_ids(tokenizer, "a b", apply_chat_template=templated)
        assert ids.count(tokenizer.bos_token_id) == 1
        assert ids[0] == tokenizer.bos_token_id


def test_plain_text_is_the_contents_of_the_messages(tokenizer):
    ids = prompt_token_ids(tokenizer, MESSAGES, apply_chat_template=False)
    assert tokenizer.decode(ids) == "<s>be brief\na b"
    assert prompt_text(MESSAGES) == "be brief\na b"


def test_no_chat_template_is_an_error_with_a_remedy(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="apply_chat_template"):
        prompt_token_ids(tokenizer, MESSAGES, apply_chat_template=True)
    assert prompt_token_ids(tokenizer, MESSAGES, apply_chat_template=False)


def test_load_tokenizer_round_trip(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    ids = prompt_token_ids(loaded, MESSAGES, True)
    assert ids == prompt_token_ids(tokenizer, MESSAGES, True)


def test_load_tokenizer_says_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        load_tokenizer(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, None, (2,)),
        ({"eos_token_id": [7, 5]}, {"eos_token_id": 5}, (2, 5, 7)),
        ({"eos_token_id": None}, {"eos_token_id": 0}, (0, 2)),
        ({}, {"other": 1}, (2,)),
    ],
)
def test_stop_tokens_are_the_union_of_what_the_folder_says(
    tokenizer, tmp_path, generation, config, expected
):
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert stop_token_ids(str(tmp_path), tokenizer) == expected
