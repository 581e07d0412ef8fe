from pathlib import Path

import pytest

from relax_hpc.errors import ConfigError
from relax_hpc.launcher.site import find_recipe, load_site
from tests.launcher_samples import ROOT


@pytest.mark.parametrize("path", sorted((ROOT / "sbatch").glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_profiles_load(path: Path) -> None:
    assert load_site(path.stem).name == path.stem


def test_unknown_profile_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"no sbatch/moon.toml; known: .*local"):
        load_site("moon")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gress = 1", "gress: unknown key; valid here: address_prefix"),
        ("gres = 1", "Expected `str`"),
        ("signal_lead_s = 70000", "must be in 1..65535"),
        ('directives = ["exclusive"]', "is no option"),
        ("gres = ", "cannot be read as TOML"),
    ],
)
def test_bad_profiles_name_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    (tmp_path / "sbatch").mkdir()
    (tmp_path / "sbatch" / "mine.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says) as caught:
        load_site("mine")
    assert "mine.toml" in str(caught.value)


def test_a_bare_recipe_name_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "own.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert find_recipe("own") == Path("recipes/own.toml")
    assert find_recipe("other.toml") == Path("other.toml")
