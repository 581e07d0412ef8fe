"""tools/make_tiny_model without its training (quickstart runs the whole)."""

import importlib.machinery
import importlib.util
import json
import random
from pathlib import Path

import pytest

from relax_hpc.config import DataConfig
from relax_hpc.data.prompts import load_prompts
from relax_hpc.data.tokenizer import load_tokenizer, stop_token_ids

TOOL = Path(__file__).parents[3] / "tools" / "make_tiny_model"


@pytest.fixture(scope="module")
def tool():
    loader = importlib.machinery.SourceFileLoader("make_tiny_model", str(TOOL))
    spec = importlib.util.spec_from_loader("make_tiny_model", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tool, tmp_path_factory):
    out = tmp_path_factory.mktemp("a tiny model")
    train, held_out = tool.split_additions(0)
    tokenizer = tool.build_tokenizer()
    tool.write_folder(out, tool.build_model(tokenizer), tokenizer, train, held_out)
    return out


def test_held_out_sums_are_not_trained_on(tool):
    train, held_out = tool.split_additions(3)
    assert len(held_out) == len(set(held_out)) == 200
    assert sum(tool.has_carry(*pair) for pair in held_out) == 110
    seen = set(train)
    assert not any((a, b) in seen or (b, a) in seen for a, b in held_out)
    assert len(train) > 7600
    assert tool.split_additions(3) == (train, held_out)
    assert tool.split_additions(4)[1] != held_out


def test_the_teachers(tool):
    generator = random.Random(0)
    assert tool.teach(38, 45, 0.0, generator) == 83
    assert {tool.teach(38, 45, 0.75, generator) for _ in range(50)} == {73, 83}
    assert {tool.teach(31, 45, 0.75, generator) for _ in range(50)} == {76}


def test_supervised_rows_are_the_chat_template(tool):
    tokenizer = tool.build_tokenizer()
    tokens, targets = tool.encode(tokenizer, [(38, 45, 83), (60, 45, 105)])
    assert tokenizer.decode(tokens[1]) == "<|user|>60+45=<|assistant|>105"
    kept = [[t for t in row if t != tool.PAD_TARGET] for row in targets.tolist()]
    assert [tokenizer.decode(row) for row in kept] == ["83<|end|>", "105<|end|>"]
    # Each target is the token after the one in its place.
    assert targets[1, -2] == tokens[1, -1]


def test_the_folder_is_one_that_steps_can_load(folder):
    tokenizer = load_tokenizer(str(folder))
    end = tokenizer.eos_token_id
    assert stop_token_ids(str(folder), tokenizer) == (end,)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["eos_token_id"] == end
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == end
    data = DataConfig(train=str(folder / "train.jsonl"), eval=str(folder / "eval.jsonl"))
    prompts = load_prompts(data, "eval", tokenizer)
    assert len(prompts) == 200
    text = tokenizer.decode(prompts[0].token_ids)
    assert text == f"<|user|>{prompts[0].text}<|assistant|>"
    a, b = prompts[0].text.rstrip("=").split("+")
    assert prompts[0].label == str(int(a) + int(b))
    assert len(load_prompts(data, "train", tokenizer)) > 7600


def test_the_weights_load_and_are_tied(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert sum(p.numel() for p in model.parameters()) == 595328
    assert model.config.tie_word_embeddings


def test_training_gives_up_after_its_steps(tool, monkeypatch):
    monkeypatch.setattr(tool, "MAX_STEPS", 2)
    monkeypatch.setattr(tool, "EVAL_EVERY", 1)
    train, held_out = tool.split_additions(0)
    tokenizer = tool.build_tokenizer()
    model = tool.build_model(tokenizer)
    assert tool.pretrain(model, tokenizer, train, held_out[:8], 0) == (None, 2)
