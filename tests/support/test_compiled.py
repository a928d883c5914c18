"""JAX's settings are as before behind a folder of compiled programs, and the folder has a bound."""

import jax
import pytest

from jdist.support import xla


@pytest.fixture
def no_folder():
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.usefixtures("no_folder")
@pytest.mark.parametrize("is_chief", [True, False])
def test_the_chief_empties_a_folder_that_has_grown_too_large(tmp_path, monkeypatch, is_chief):
    monkeypatch.setattr(xla, "_MOST_COMPILED_BYTES", 10)
    (tmp_path / "old").write_bytes(b"x" * 11)
    with xla.compiled_in(tmp_path, is_chief=is_chief):
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
        assert (tmp_path / "old").exists() != is_chief
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.usefixtures("no_folder")
def test_a_folder_of_the_users_is_taken_instead(tmp_path):
    jax.config.update("jax_compilation_cache_dir", "mine")
    with xla.compiled_in(tmp_path, is_chief=True):
        assert jax.config.jax_compilation_cache_dir == "mine"
    assert jax.config.jax_compilation_cache_dir == "mine"


@pytest.mark.usefixtures("no_folder")
def test_a_folder_that_the_user_chooses_meanwhile_stays(tmp_path):
    with xla.compiled_in(tmp_path, is_chief=True):
        jax.config.update("jax_compilation_cache_dir", "mine")
    assert jax.config.jax_compilation_cache_dir == "mine"
