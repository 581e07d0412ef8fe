"""Prompts from every kind of source; bad input ends in one sentence with the remedy."""

import json
import pathlib
import subprocess
import sys

import pytest

from relax_hpc.config import DataConfig
from relax_hpc.data.prompts import check_source, load_prompts
from relax_hpc.errors import ConfigError

ROWS = [
    {"prompt": [{"role": "user", "content": "1+1="}], "label": "2", "source": "a"},
    {"prompt": "2+2=", "label": 4},
    {"prompt": [{"role": "system", "content": "add"}, {"role": "user", "content": "3+3="}],
     "label": "6"},
]  # fmt: skip


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def jsonl(tmp_path):
    return write_jsonl(tmp_path / "a file.jsonl", ROWS)


def test_jsonl(jsonl, tokenizer):
    prompts = load_prompts(DataConfig(train=jsonl), "train", tokenizer)
    assert len(prompts) == 3
    assert [p.label for p in prompts] == ["2", "4", "6"]
    assert prompts[0].text == "1+1="
    assert prompts[0].metadata == {"source": "a"}
    assert tokenizer.decode(prompts[2].token_ids) == "<s>[system]add[user]3+3=[assistant]"


def test_parquet_equals_jsonl(jsonl, tmp_path, tokenizer):
    import pyarrow
    import pyarrow.parquet

    rows = [
        {**row, "label": str(row["label"])} for row in ROWS if not isinstance(row["prompt"], str)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    parquet = str(tmp_path / "a.parquet")
    same = write_jsonl(tmp_path / "b.jsonl", rows)
    left = load_prompts(DataConfig(train=parquet), "train", tokenizer)
    right = load_prompts(DataConfig(train=same), "train", tokenizer)
    assert left.fingerprint == right.fingerprint
    assert check_source(DataConfig(train=parquet)) == 2


def test_dotted_keys(tmp_path, tokenizer):
    rows = [{"prompt": "1+1=", "reward_model": {"ground_truth": "2", "style": "rule"}}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    config = DataConfig(train=path, label_key="reward_model.ground_truth")
    assert load_prompts(config, "train", tokenizer)[0].label == "2"


def test_long_prompts_are_dropped_and_counted(jsonl, tokenizer):
    prompts = load_prompts(DataConfig(train=jsonl, max_prompt_tokens=25), "train", tokenizer)
    assert [p.label for p in prompts] == ["2", "4"]
    assert prompts.num_dropped == 1
    with pytest.raises(ConfigError, match=r"no prompt is left: 3 of 3.*max_prompt_tokens=3"):
        load_prompts(DataConfig(train=jsonl, max_prompt_tokens=3), "train", tokenizer)


def test_d4_fingerprint_follows_the_content(jsonl, tmp_path, tokenizer):
    def fingerprint(rows, **options):
        path = write_jsonl(tmp_path / "x.jsonl", rows)
        return load_prompts(DataConfig(train=path, **options), "train", tokenizer).fingerprint

    base = fingerprint(ROWS)
    assert base == fingerprint(ROWS)
    changed = [{**ROWS[0], "label": "3"}, *ROWS[1:]]
    others = [ROWS[::-1], ROWS[:2], changed]
    seen = {base, *map(fingerprint, others), fingerprint(ROWS, apply_chat_template=False)}
    assert len(seen) == 5


def test_d13_eval_takes_the_first_prompts(jsonl, tokenizer):
    config = DataConfig(train=jsonl, eval=jsonl, num_eval_prompts=2)
    assert [p.label for p in load_prompts(config, "eval", tokenizer)] == ["2", "4"]
    assert len(load_prompts(DataConfig(train=jsonl, eval=jsonl), "eval", tokenizer)) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no rows"),
        ("\n\n", "has no rows"),
        ("{not json\n", "line 1: not JSON"),
        ("[1, 2]\n", "line 1: must be an object"),
        ('{"question": "1", "label": "2"}\n', r"no key 'prompt'; the row has label, question"),
        ('{"prompt": "1"}\n', "no key 'label'"),
        ('{"prompt": "1", "label": null}\n', "label=None must be text or a number"),
        ('{"prompt": "1", "label": " "}\n', "must be text or a number"),
        ('{"prompt": "", "label": "2"}\n', "must be text or a list"),
        ('{"prompt": [], "label": "2"}\n', "must be text or a list"),
        ('{"prompt": [{"role": "user"}], "label": "2"}\n', "must be text or a list"),
        ('{"prompt": [{"role": "user", "content": 5}], "label": "2"}\n', "must be text or a list"),
    ],
)
def test_bad_rows_name_the_line_and_the_remedy(content, message, tmp_path, tokenizer):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    config = DataConfig(train=str(path))
    with pytest.raises(ConfigError, match=message):
        check_source(config)
    with pytest.raises(ConfigError, match=r"^data\.train="):
        load_prompts(config, "train", tokenizer)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x93\x00\xff garbage\n", "line 1: not UTF-8 text"),
        (b'{"prompt": "1", "label": "2"}\n\xff\n', "line 2: not UTF-8 text"),
        ('{"prompt": "1", "label": "2"}\n'.encode("utf-16"), "line 1: not UTF-8 text"),
        (b"[" * 100_000 + b"\n", "line 1: not JSON"),
        (b'{"prompt": "1", "label": ' + b"9" * 5000 + b"}\n", "line 1: not JSON"),
        (b'{"prompt": "1", "label": "2"}\n' * 50 + b'{"prompt": "1", "labl": "2"}\n',
         "line 51: no key 'label'; the row has labl, prompt"),
    ],
)  # fmt: skip
def test_garbage_and_a_bad_late_row_are_one_sentence(content, message, tmp_path, tokenizer):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        check_source(DataConfig(train=str(path)))
    with pytest.raises(ConfigError, match=message):
        load_prompts(DataConfig(train=str(path)), "train", tokenizer)


def test_a_byte_order_mark_is_no_content(jsonl, tmp_path, tokenizer):
    marked = tmp_path / "bom.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + pathlib.Path(jsonl).read_bytes())
    config = DataConfig(train=str(marked))
    assert check_source(config) == 3
    assert load_prompts(config, "train", tokenizer)[0].text == "1+1="
    marked.write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(ConfigError, match="has no rows"):
        check_source(config)


def test_a_file_that_cannot_be_read(jsonl, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")  # root may read everything

    monkeypatch.setattr(pathlib.Path, "open", refuse)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        check_source(DataConfig(train=jsonl))


def test_a_name_that_is_too_long():
    with pytest.raises(ConfigError, match=r"File name too long|no such file"):
        check_source(DataConfig(train="x" * 5000 + ".jsonl"))


def test_a_parquet_file_that_is_damaged_inside(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": f"{n}+1=", "label": "2"} for n in range(2000)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    data = bytearray(path.read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"cannot be read|must be text"):
        check_source(DataConfig(train=str(path)))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.jsonl", "no such file"),
        ("a.csv", r"valid are \*\.jsonl"),
        ("reasoning_gym:", "write reasoning_gym:TASK"),
        ("reasoning_gym:basic_arithmetic?size=0", "size a positive number"),
        ("reasoning_gym:basic_arithmetik", "no such task; valid are"),
        ("reasoning_gym:basic_arithmetic?terms=2", "refuses its options"),
        ("reasoning_gym:basic_arithmetic?min_terms=9&max_terms=2", "refuses its options"),
    ],
)
def test_bad_sources_say_what_is_valid(spec, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        check_source(DataConfig(train=spec))


def test_a_bad_parquet_and_a_bad_eval_source(jsonl, tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(ConfigError, match="not a parquet file"):
        check_source(DataConfig(train=str(tmp_path / "bad.parquet")))
    with pytest.raises(ConfigError, match=r"^data\.eval="):
        check_source(DataConfig(train=jsonl, eval="nowhere.jsonl"))


def test_no_eval_source(jsonl, tokenizer):
    assert check_source(DataConfig(train=jsonl)) == 3
    with pytest.raises(ConfigError, match=r"data\.eval is empty"):
        load_prompts(DataConfig(train=jsonl), "eval", tokenizer)


GYM = "reasoning_gym:basic_arithmetic?min_digits=1&max_digits=1&suffix=%20Think%21"


def test_reasoning_gym(tokenizer):
    config = DataConfig(train=GYM, eval=GYM, num_train_prompts=12, num_eval_prompts=7)
    train = load_prompts(config, "train", tokenizer)
    held_out = load_prompts(config, "eval", tokenizer)
    assert (len(train), len(held_out)) == (12, 7)
    assert train[0].text.endswith(" Think!")
    assert train[3].metadata["reasoning_gym"]["index"] == 3
    assert train.fingerprint == load_prompts(config, "train", tokenizer).fingerprint
    # Another seed: evaluation does not repeat the training questions.
    assert train.fingerprint[:7] != held_out.fingerprint[:7]
    assert [p.text for p in train][:7] != [p.text for p in held_out]
    assert check_source(config) == 12


def test_reasoning_gym_source_options_win(tokenizer):
    config = DataConfig(train=f"{GYM}&size=3&seed=5", num_train_prompts=50)
    assert len(load_prompts(config, "train", tokenizer)) == 3
    options = load_prompts(config, "train", tokenizer)[0].metadata["reasoning_gym"]["options"]
    assert options["seed"] == 5


def test_checking_a_source_is_torch_free(jsonl):
    code = (
        "import sys; from relax_hpc.config import DataConfig; from relax_hpc.data import prompts\n"
        f"print(prompts.check_source(DataConfig(train={jsonl!r})))\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
